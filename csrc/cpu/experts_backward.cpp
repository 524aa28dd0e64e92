// experts_backward: the gradients of experts from x, the pre-activation z and the routing.
//
// Phases, each over all experts at once; only those whose result is wanted run:
//   hidden   d [T, H], down -> g = d @ down; with z -> d_z f32 [S, 2 I], weighted hidden f32 [S, I], parts of d_weights
//   weights  those parts, down_bias -> d_weights [T, top_k]
//   outer    d_z, x -> d_gate_up [E, 2 I, H];  d, weighted hidden -> d_down [E, H, I];  sums -> biases
//   input    d_z @ gate_up -> slot rows, a stretch of columns at a time, then summed in slot order -> d_x [T, H]
// Rows of d_z and of the hidden stand in expert-major order. Column blocks do not depend on the thread count, so neither
// do the sums.
#include <sys/mman.h>

#include <algorithm>

#include "mirror.h"
#include "pool.h"
#include "scratch.h"
#include "training.h"

namespace moefuse {
namespace {

constexpr int64_t kOuterRows = 64;       // gradient rows per task
constexpr int64_t kOuterPositions = 64;  // positions summed at a time
constexpr int64_t kSlotBytes = 32 << 20;  // slot rows of d_x held at once

// A gradient of gigabytes goes into fresh memory: asking for a task's pages at once is cheaper than a fault for each.
void populate(char* data, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr uintptr_t kPage = 4096;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(kPage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

class Backward {
 public:
  Backward(const ExpertsBackwardArgs& args, int threads)
      : a_(args),
        threads_(worth(threads, args.T * args.top_k * args.H * args.I)),
        live_(args.buckets.offsets[args.E]),
        rows_((args.gated ? 2 : 1) * args.I),
        ldh_(round_up(args.I, kChunk)),
        hidden_columns_((args.I + kMirrorColumns - 1) / kMirrorColumns),
        blocks_(row_blocks(args.buckets.offsets, args.E)),
        buffers_(mirror_buffers(threads_)) {
    bool into_stack = a_.d_gate_up || a_.d_up || a_.d_gate_up_bias;
    needs_d_z_ = a_.d_x || into_stack;
    needs_g_ = needs_d_z_ || a_.d_weights;
    if (needs_d_z_) d_z_ = scratch_floats(Slot::gradients, live_ * rows_);
    if (a_.d_down) hidden_ = scratch_floats(Slot::hidden, live_ * ldh_);
    if (a_.d_weights) parts_ = scratch_floats(Slot::logits, live_ * hidden_columns_);
    stretch_ = std::max<int64_t>(1, kSlotBytes / 4 / std::max<int64_t>(1, a_.T * a_.top_k) / kMirrorColumns);
    stretch_ = std::min(round_up(a_.H, kMirrorColumns), stretch_ * kMirrorColumns);
    if (a_.d_x) slots_ = scratch_floats(Slot::products, a_.T * a_.top_k * stretch_);
  }

  void run() {
    std::vector<Phase> phases;
    auto add = [&](bool wanted, int64_t tasks, auto method) {
      if (wanted) phases.push_back({tasks, [this, method](int64_t task, int64_t, int w) { (this->*method)(task, w); }});
    };
    auto blocks = static_cast<int64_t>(blocks_.size());
    auto tiles = [](int64_t n) { return (n + kOuterRows - 1) / kOuterRows; };
    add(needs_g_ || a_.d_down, blocks * hidden_columns_, &Backward::hidden);
    add(static_cast<bool>(a_.d_weights), a_.T, &Backward::weights);
    add(a_.d_gate_up || a_.d_up, a_.E * tiles(rows_), &Backward::outer_up);
    add(static_cast<bool>(a_.d_down), a_.E * tiles(a_.H), &Backward::outer_down);
    add(static_cast<bool>(a_.d_gate_up_bias), a_.E, &Backward::sum_up);
    add(static_cast<bool>(a_.d_down_bias), a_.E, &Backward::sum_down);
    for (int64_t first = 0; a_.d_x && first < a_.H; first += stretch_) {
      int64_t columns = std::min(stretch_, a_.H - first);
      int64_t per_block = (columns + kMirrorColumns - 1) / kMirrorColumns;
      phases.push_back({blocks * per_block, [=, this](int64_t task, int64_t, int worker) {
                          input(blocks_[static_cast<size_t>(task / per_block)], first,
                                first + task % per_block * kMirrorColumns, first + columns, worker);
                        }});
      phases.push_back({a_.T, [=, this](int64_t t, int64_t, int) { sum_slots(t, first, columns); }});
    }
    run_phases(phases, threads_);
  }

 private:
  int64_t token(int64_t p) const { return a_.buckets.order[p] / a_.top_k; }
  float share(int64_t p) const { return element(a_.weights, a_.buckets.order[p]); }
  int64_t gate_row(int64_t i) const { return a_.gated && a_.interleaved ? 2 * i : i; }
  int64_t up_row(int64_t i) const { return a_.interleaved ? 2 * i + 1 : a_.I + i; }

  const char* stack_row(int64_t expert, int64_t row) const {
    return a_.up && row >= a_.I ? row_of(a_.up, expert, row - a_.I) : row_of(a_.gate_up, expert, row);
  }

  // Where the gradient of a stack row goes; null when it is not wanted.
  char* d_stack_row(int64_t expert, int64_t row) const {
    Output to = a_.up && row >= a_.I ? a_.d_up : a_.d_gate_up;
    int64_t per_expert = a_.up ? a_.I : rows_;
    return to ? row_of(to, expert * per_expert + row % per_expert, a_.H) : nullptr;
  }

  // Columns [begin, begin + n) of gate and up in row p of z.
  void decode_z(int64_t p, int64_t begin, int64_t n, float* gate, float* up) const {
    const Kernels& k = kernels();
    const char* row = row_of(a_.z, p, rows_);
    int64_t bytes = size_of(a_.z.dtype);
    if (a_.gated && a_.interleaved) {
      float both[2 * kMirrorColumns];
      k.decode(a_.z.dtype, row + 2 * begin * bytes, both, 2 * n);
      for (int64_t i = 0; i < n; ++i) {
        gate[i] = both[2 * i];
        up[i] = both[2 * i + 1];
      }
      return;
    }
    k.decode(a_.z.dtype, row + begin * bytes, gate, n);
    if (a_.gated) k.decode(a_.z.dtype, row + (a_.I + begin) * bytes, up, n);
  }

  void hidden(int64_t task, int worker) {
    const Kernels& k = kernels();
    const RowBlock& block = blocks_[static_cast<size_t>(task / hidden_columns_)];
    int64_t column = task % hidden_columns_ * kMirrorColumns;
    int64_t width = std::min(kMirrorColumns, a_.I - column);
    MirrorBuffers& own = buffers_[worker];
    if (needs_g_) {
      MirrorRows rows;
      rows.dtype = a_.d.dtype;
      rows.count = block.rows;
      for (int64_t m = 0; m < block.rows; ++m) rows.a[m] = row_of(a_.d, token(block.row + m), a_.H);
      mirror(rows, a_.H, [&](int64_t row) { return row_of(a_.down, block.expert, row); }, a_.down.dtype(), column, width,
             own);
    }
    for (int64_t m = 0; m < block.rows; ++m) {
      int64_t p = block.row + m;
      float gate[kMirrorColumns], up[kMirrorColumns], h[kMirrorColumns];
      decode_z(p, column, width, gate, up);
      const float* ups = a_.gated ? up : nullptr;
      const float* g = own.acc + m * kMirrorColumns;
      float w = share(p);
      if (a_.d_weights || a_.d_down) k.activate(a_.act, gate, ups, h, width);
      if (a_.d_weights) parts_[p * hidden_columns_ + task % hidden_columns_] = k.dot(h, g, width);
      if (needs_d_z_) {
        float by_gate[kMirrorColumns], by_up[kMirrorColumns];
        k.slopes(a_.act, gate, ups, by_gate, by_up, width);
        float* to = d_z_ + p * rows_;
        for (int64_t i = 0; i < width; ++i) to[gate_row(column + i)] = w * g[i] * by_gate[i];
        for (int64_t i = 0; a_.gated && i < width; ++i) to[up_row(column + i)] = w * g[i] * by_up[i];
      }
      if (a_.d_down) {
        float* to = hidden_ + p * ldh_ + column;
        for (int64_t i = 0; i < width; ++i) to[i] = w * h[i];
        if (column + width == a_.I) std::fill(to + width, hidden_ + (p + 1) * ldh_, 0.0f);
      }
    }
  }

  void weights(int64_t t, int worker) {
    const Kernels& k = kernels();
    // The buffers of this worker hold one row of d and one bias row a strip at a time.
    float* d = buffers_[worker].strip;
    float* bias = buffers_[worker].acc;
    for (int64_t s = t * a_.top_k; s < (t + 1) * a_.top_k; ++s) {
      int64_t p = a_.inverse[s];
      float total = 0;
      if (p < live_) {
        for (int64_t c = 0; c < hidden_columns_; ++c) total += parts_[p * hidden_columns_ + c];
        if (a_.down_bias) {
          const int32_t* after = std::upper_bound(a_.buckets.offsets, a_.buckets.offsets + a_.E + 1, p);
          int64_t expert = after - a_.buckets.offsets - 1;
          for (int64_t h = 0; h < a_.H; h += kMirrorColumns) {
            int64_t n = std::min(kMirrorColumns, a_.H - h);
            k.decode(a_.d.dtype, row_of(a_.d, t, a_.H) + h * size_of(a_.d.dtype), d, n);
            k.decode(a_.down_bias.dtype, row_of(a_.down_bias, expert, a_.H) + h * size_of(a_.down_bias.dtype), bias, n);
            total += k.dot(d, bias, n);
          }
        }
      }
      k.encode(&total, a_.d_weights.dtype, row_of(a_.d_weights, s, 1), 1);
    }
  }

  // Rows [first, first + n) of one expert's weight gradient [.., width]: `left` fills [positions, n], `right`
  // [positions, columns], and `to` says where a row goes.
  template <class Left, class Right, class To>
  void outer(int64_t expert, int64_t n, int64_t width, Dtype dtype, int worker, Left left, Right right, To to) {
    const Kernels& k = kernels();
    MirrorBuffers& own = buffers_[worker];
    int64_t begin = a_.buckets.offsets[expert];
    int64_t end = a_.buckets.offsets[expert + 1];
    bool dense = to(0) != nullptr && to(n - 1) == to(0) + (n - 1) * width * size_of(dtype);
    if (dense) populate(to(0), n * width * size_of(dtype));
    for (int64_t column = 0; column < width; column += kMirrorColumns) {
      int64_t columns = std::min(kMirrorColumns, width - column);
      // f32 rows that lie one behind the other take the sums as they leave the registers.
      bool direct = dtype == Dtype::f32 && columns % kChunk == 0 && end > begin && end - begin <= kOuterPositions &&
                    dense;
      float* acc = direct ? reinterpret_cast<float*>(to(0)) + column : own.acc;
      if (begin == end) std::fill_n(own.acc, n * kMirrorColumns, 0.0f);
      for (int64_t p = begin; p < end; p += kOuterPositions) {
        int64_t count = std::min(kOuterPositions, end - p);
        auto [g, ldg] = left(p, count);
        auto [x, ldx] = right(p, count, column, columns);
        k.outer(g, ldg, x, ldx, count, n, round_up(columns, kChunk), acc, direct ? width : kMirrorColumns, p == begin);
      }
      for (int64_t i = 0; !direct && i < n; ++i) {
        if (char* row = to(i)) k.encode(own.acc + i * kMirrorColumns, dtype, row + column * size_of(dtype), columns);
      }
    }
  }

  struct Matrix {
    const float* data;
    int64_t pitch;
  };

  void outer_up(int64_t task, int worker) {
    int64_t tiles = (rows_ + kOuterRows - 1) / kOuterRows;
    int64_t expert = task / tiles;
    int64_t first = task % tiles * kOuterRows;
    int64_t n = std::min(kOuterRows, rows_ - first);
    if (d_stack_row(expert, first) == nullptr && d_stack_row(expert, first + n - 1) == nullptr) return;
    float* strip = buffers_[worker].strip;
    auto left = [&](int64_t p, int64_t) { return Matrix{d_z_ + p * rows_ + first, rows_}; };
    auto right = [&](int64_t p, int64_t count, int64_t column, int64_t columns) {
      for (int64_t i = 0; i < count; ++i) {
        const char* from = row_of(a_.x, token(p + i), a_.H) + column * size_of(a_.x.dtype);
        kernels().decode(a_.x.dtype, from, strip + i * kMirrorColumns, columns);
        std::fill(strip + i * kMirrorColumns + columns, strip + i * kMirrorColumns + round_up(columns, kChunk), 0.0f);
      }
      return Matrix{strip, kMirrorColumns};
    };
    Dtype dtype = a_.d_gate_up ? a_.d_gate_up.dtype : a_.d_up.dtype;
    outer(expert, n, a_.H, dtype, worker, left, right, [&](int64_t i) { return d_stack_row(expert, first + i); });
  }

  void outer_down(int64_t task, int worker) {
    int64_t tiles = (a_.H + kOuterRows - 1) / kOuterRows;
    int64_t expert = task / tiles;
    int64_t first = task % tiles * kOuterRows;
    int64_t n = std::min(kOuterRows, a_.H - first);
    float* panel = buffers_[worker].panel;
    auto left = [&](int64_t p, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const char* from = row_of(a_.d, token(p + i), a_.H) + first * size_of(a_.d.dtype);
        kernels().decode(a_.d.dtype, from, panel + i * kOuterRows, n);
      }
      return Matrix{panel, kOuterRows};
    };
    auto right = [&](int64_t p, int64_t, int64_t column, int64_t) {
      return Matrix{hidden_ + p * ldh_ + column, ldh_};
    };
    outer(expert, n, a_.I, a_.d_down.dtype, worker, left, right,
          [&](int64_t i) { return row_of(a_.d_down, expert * a_.H + first + i, a_.I); });
  }

  // Sums rows of `width` floats over an expert's positions, a strip at a time.
  template <class Add>
  void sum(int64_t expert, int64_t width, Output to, int worker, Add add_row) {
    float* acc = buffers_[worker].acc;
    for (int64_t column = 0; column < width; column += kMirrorColumns) {
      int64_t n = std::min(kMirrorColumns, width - column);
      std::fill_n(acc, n, 0.0f);
      for (int64_t p = a_.buckets.offsets[expert]; p < a_.buckets.offsets[expert + 1]; ++p) add_row(p, column, acc, n);
      kernels().encode(acc, to.dtype, row_of(to, expert, width) + column * size_of(to.dtype), n);
    }
  }

  void sum_up(int64_t expert, int worker) {
    sum(expert, rows_, a_.d_gate_up_bias, worker, [&](int64_t p, int64_t column, float* acc, int64_t n) {
      kernels().axpy(1, Dtype::f32, d_z_ + p * rows_ + column, acc, n);
    });
  }

  void sum_down(int64_t expert, int worker) {
    sum(expert, a_.H, a_.d_down_bias, worker, [&](int64_t p, int64_t column, float* acc, int64_t n) {
      const char* from = row_of(a_.d, token(p), a_.H) + column * size_of(a_.d.dtype);
      kernels().axpy(share(p), a_.d.dtype, from, acc, n);
    });
  }

  // Columns from `column` of d_z @ gate_up for one block, into the slot rows of the stretch that begins at `first`.
  void input(const RowBlock& block, int64_t first, int64_t column, int64_t end, int worker) {
    MirrorBuffers& own = buffers_[worker];
    int64_t width = std::min(kMirrorColumns, end - column);
    MirrorRows rows;
    rows.dtype = Dtype::f32;
    rows.count = block.rows;
    for (int64_t m = 0; m < block.rows; ++m) {
      rows.a[m] = reinterpret_cast<const char*>(d_z_ + (block.row + m) * rows_);
    }
    mirror(rows, rows_, [&](int64_t row) { return stack_row(block.expert, row); }, a_.gate_up.dtype(), column, width,
           own);
    for (int64_t m = 0; m < block.rows; ++m) {
      int64_t s = a_.buckets.order[block.row + m];
      std::copy_n(own.acc + m * kMirrorColumns, width, slots_ + s * stretch_ + column - first);
    }
  }

  void sum_slots(int64_t t, int64_t first, int64_t columns) {
    float acc[kMirrorColumns];
    for (int64_t column = 0; column < columns; column += kMirrorColumns) {
      int64_t n = std::min(kMirrorColumns, columns - column);
      std::fill_n(acc, n, 0.0f);
      for (int64_t s = t * a_.top_k; s < (t + 1) * a_.top_k; ++s) {
        if (a_.inverse[s] < live_) kernels().axpy(1, Dtype::f32, slots_ + s * stretch_ + column, acc, n);
      }
      char* to = row_of(a_.d_x, t, a_.H) + (first + column) * size_of(a_.d_x.dtype);
      kernels().encode(acc, a_.d_x.dtype, to, n);
    }
  }

  const ExpertsBackwardArgs& a_;
  int threads_;
  int64_t live_;
  int64_t rows_;  // of an expert's first stack, which is the width of z
  int64_t ldh_;
  int64_t hidden_columns_;
  std::vector<RowBlock> blocks_;
  MirrorBuffers* buffers_;
  bool needs_d_z_ = false;
  bool needs_g_ = false;
  int64_t stretch_ = 0;  // columns of d_x made at a time
  float* d_z_ = nullptr;
  float* hidden_ = nullptr;
  float* parts_ = nullptr;
  float* slots_ = nullptr;
};

}  // namespace

void experts_backward(const ExpertsBackwardArgs& args, int threads) {
  Backward(args, threads).run();
  trim_scratch();
}

}  // namespace moefuse
