// experts_backward: the gradients of experts from x, the pre-activation z and the routing.
//
// Phases, each over all experts at once; only those whose result is wanted run:
//   hidden   d [T, H], down -> g = d @ down; with z -> d_z f32 [S, 2 I], weighted hidden f32 [S, I], parts of d_weights
//   weights  those parts, down_bias -> d_weights [T, top_k]
//   outer    d_z, x -> d_gate_up [E, 2 I, H];  d, weighted hidden -> d_down [E, H, I];  sums -> biases
//   input    d_z @ gate_up -> slot rows, a chunk of columns at a time, then summed in slot order -> d_x [T, H]
// Rows of d_z and of the hidden stand in expert-major order. How columns are cut does not depend on the thread count,
// so neither do the sums.
#include <sys/mman.h>

#include <algorithm>

#include "ops/glu.h"
#include "ops/transposed.h"
#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace moefuse {
namespace {

constexpr int64_t kOuterRows = 64;        // gradient rows per task
constexpr int64_t kOuterPositions = 64;   // positions summed at a time
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

struct Arguments {
  Tensor d, x, z, weights;
  const Stacks& stacks;
  const Plan& plan;
  Activation activation;
  const ExpertsGradients& gradients;
};

class Backward {
 public:
  Backward(const Arguments& arguments, int threads)
      : a_(arguments),
        T_(a_.weights.rows),
        top_k_(a_.weights.columns),
        E_(a_.stacks.down.E),
        H_(a_.stacks.down.N),
        I_(a_.stacks.down.K),
        gated_(a_.activation.gated),
        threads_(worth(threads, T_ * top_k_ * H_ * I_)),
        live_(a_.plan.live()),
        z_rows_(I_, gated_, false, a_.stacks.layout),
        rows_(z_rows_.width()),
        ldh_(round_up(I_, kChunk)),
        hidden_columns_(parts_of(I_, kPanelColumns)),
        panels_(panels_of(a_.plan.offsets)),
        buffers_(panel_buffers(threads_)) {
    bool into_stack = to_.gate_up || to_.up || to_.gate_up_bias;
    needs_d_z_ = to_.x || into_stack;
    needs_g_ = needs_d_z_ || to_.weights;
    if (needs_d_z_) d_z_ = scratch_floats(Slot::gradients, live_ * rows_);
    if (to_.down) hidden_ = scratch_floats(Slot::hidden, live_ * ldh_);
    if (to_.weights) parts_ = scratch_floats(Slot::logits, live_ * hidden_columns_);
    chunk_ = std::max<int64_t>(1, kSlotBytes / 4 / std::max<int64_t>(1, T_ * top_k_) / kPanelColumns);
    chunk_ = std::min(round_up(H_, kPanelColumns), chunk_ * kPanelColumns);
    if (to_.x) slots_ = scratch_floats(Slot::products, T_ * top_k_ * chunk_);
  }

  void run() {
    std::vector<Phase> phases;
    auto add = [&](bool wanted, int64_t tasks, auto method) {
      if (wanted) phases.push_back({tasks, [this, method](int64_t task, int64_t, int w) { (this->*method)(task, w); }});
    };
    auto panels = static_cast<int64_t>(panels_.size());
    add(needs_g_ || to_.down, panels * hidden_columns_, &Backward::hidden);
    add(static_cast<bool>(to_.weights), T_, &Backward::weights);
    add(to_.gate_up || to_.up, E_ * parts_of(rows_, kOuterRows), &Backward::outer_up);
    add(static_cast<bool>(to_.down), E_ * parts_of(H_, kOuterRows), &Backward::outer_down);
    add(static_cast<bool>(to_.gate_up_bias), E_, &Backward::sum_up);
    add(static_cast<bool>(to_.down_bias), E_, &Backward::sum_down);
    for (int64_t first = 0; to_.x && first < H_; first += chunk_) {
      int64_t columns = std::min(chunk_, H_ - first);
      int64_t per_panel = parts_of(columns, kPanelColumns);
      phases.push_back({panels * per_panel, [=, this](int64_t task, int64_t, int worker) {
                          input(panels_[static_cast<size_t>(task / per_panel)], first,
                                first + task % per_panel * kPanelColumns, first + columns, worker);
                        }});
      phases.push_back({T_, [=, this](int64_t t, int64_t, int) { sum_slots(t, first, columns); }});
    }
    run_phases(phases, threads_);
  }

 private:
  int64_t token(int64_t p) const { return a_.plan.order[p] / top_k_; }
  float share(int64_t p) const { return element(a_.weights, a_.plan.order[p]); }

  // Where the gradient of a stack row goes; null when it is not wanted.
  char* d_stack_row(int64_t expert, int64_t row) const {
    Output to = a_.stacks.up && row >= I_ ? to_.up : to_.gate_up;
    int64_t per_expert = a_.stacks.up ? I_ : rows_;
    return to ? row_of(to, expert * per_expert + row % per_expert, H_) : nullptr;
  }

  void hidden(int64_t task, int worker) {
    const Kernels& k = kernels();
    const Panel& panel = panels_[static_cast<size_t>(task / hidden_columns_)];
    int64_t column = task % hidden_columns_ * kPanelColumns;
    int64_t width = std::min(kPanelColumns, I_ - column);
    PanelBuffers& own = buffers_[worker];
    if (needs_g_) {
      PanelRows rows(a_.d.dtype, panel, [&](int64_t p) { return row_of(a_.d, token(p), H_); });
      multiply_transposed(rows, H_, {panel.expert, a_.stacks.down, H_}, column, width, own);
    }
    for (int64_t m = 0; m < panel.rows; ++m) {
      int64_t p = panel.row + m;
      float gate[kPanelColumns], up[kPanelColumns], h[kPanelColumns];
      z_rows_.decode(a_.z, {}, p, column, width, gate, up);
      const float* ups = gated_ ? up : nullptr;
      const float* g = own.acc + m * kPanelColumns;
      float w = share(p);
      if (to_.weights || to_.down) k.activate(a_.activation, gate, ups, h, width);
      if (to_.weights) parts_[p * hidden_columns_ + task % hidden_columns_] = k.dot(h, g, width);
      if (needs_d_z_) {
        float by_gate[kPanelColumns], by_up[kPanelColumns];
        k.derivatives(a_.activation, gate, ups, by_gate, by_up, width);
        float* to = d_z_ + p * rows_;
        for (int64_t i = 0; i < width; ++i) to[z_rows_.gate_column(column + i)] = w * g[i] * by_gate[i];
        for (int64_t i = 0; gated_ && i < width; ++i) to[z_rows_.up_column(column + i)] = w * g[i] * by_up[i];
      }
      if (to_.down) {
        float* to = hidden_ + p * ldh_ + column;
        for (int64_t i = 0; i < width; ++i) to[i] = w * h[i];
        if (column + width == I_) std::fill(to + width, hidden_ + (p + 1) * ldh_, 0.0f);
      }
    }
  }

  void weights(int64_t t, int worker) {
    const Kernels& k = kernels();
    // The buffers of this worker hold one row of d and one bias row a strip at a time.
    float* d = buffers_[worker].strip;
    float* bias = buffers_[worker].acc;
    for (int64_t s = t * top_k_; s < (t + 1) * top_k_; ++s) {
      int64_t p = a_.plan.inverse[s];
      float total = 0;
      if (p < live_) {
        for (int64_t c = 0; c < hidden_columns_; ++c) total += parts_[p * hidden_columns_ + c];
        if (Tensor biases = a_.stacks.down_bias) {
          const int32_t* after = std::upper_bound(a_.plan.offsets.data, a_.plan.offsets.data + E_ + 1, p);
          int64_t expert = after - a_.plan.offsets.data - 1;
          for (int64_t h = 0; h < H_; h += kPanelColumns) {
            int64_t n = std::min(kPanelColumns, H_ - h);
            k.decode(a_.d.dtype, row_of(a_.d, t, H_) + h * size_of(a_.d.dtype), d, n);
            k.decode(biases.dtype, row_of(biases, expert, H_) + h * size_of(biases.dtype), bias, n);
            total += k.dot(d, bias, n);
          }
        }
      }
      k.encode(&total, to_.weights.dtype, row_of(to_.weights, s, 1), 1);
    }
  }

  // Rows [first, first + n) of one expert's weight gradient [.., width]: `left` fills [positions, n], `right`
  // [positions, columns], and `to` says where a row goes.
  template <class Left, class Right, class To>
  void outer(int64_t expert, int64_t n, int64_t width, Dtype dtype, int worker, Left left, Right right, To to) {
    const Kernels& k = kernels();
    PanelBuffers& own = buffers_[worker];
    int64_t begin = a_.plan.offsets[expert];
    int64_t end = a_.plan.offsets[expert + 1];
    bool dense = to(0) != nullptr && to(n - 1) == to(0) + (n - 1) * width * size_of(dtype);
    if (dense) populate(to(0), n * width * size_of(dtype));
    for (int64_t column = 0; column < width; column += kPanelColumns) {
      int64_t columns = std::min(kPanelColumns, width - column);
      // f32 rows that lie one behind the other take the sums as they leave the registers.
      bool direct = dtype == Dtype::f32 && columns % kChunk == 0 && end > begin && end - begin <= kOuterPositions &&
                    dense;
      float* acc = direct ? reinterpret_cast<float*>(to(0)) + column : own.acc;
      if (begin == end) std::fill_n(own.acc, n * kPanelColumns, 0.0f);
      for (int64_t p = begin; p < end; p += kOuterPositions) {
        int64_t count = std::min(kOuterPositions, end - p);
        auto [g, ldg] = left(p, count);
        auto [x, ldx] = right(p, count, column, columns);
        k.outer(g, ldg, x, ldx, count, n, round_up(columns, kChunk), acc, direct ? width : kPanelColumns, p == begin);
      }
      for (int64_t i = 0; !direct && i < n; ++i) {
        if (char* row = to(i)) k.encode(own.acc + i * kPanelColumns, dtype, row + column * size_of(dtype), columns);
      }
    }
  }

  struct Floats {
    const float* data;
    int64_t pitch;
  };

  void outer_up(int64_t task, int worker) {
    int64_t tiles = parts_of(rows_, kOuterRows);
    int64_t expert = task / tiles;
    int64_t first = task % tiles * kOuterRows;
    int64_t n = std::min(kOuterRows, rows_ - first);
    if (d_stack_row(expert, first) == nullptr && d_stack_row(expert, first + n - 1) == nullptr) return;
    float* strip = buffers_[worker].strip;
    auto left = [&](int64_t p, int64_t) { return Floats{d_z_ + p * rows_ + first, rows_}; };
    auto right = [&](int64_t p, int64_t count, int64_t column, int64_t columns) {
      for (int64_t i = 0; i < count; ++i) {
        const char* from = row_of(a_.x, token(p + i), H_) + column * size_of(a_.x.dtype);
        kernels().decode(a_.x.dtype, from, strip + i * kPanelColumns, columns);
        std::fill(strip + i * kPanelColumns + columns, strip + i * kPanelColumns + round_up(columns, kChunk), 0.0f);
      }
      return Floats{strip, kPanelColumns};
    };
    Dtype dtype = to_.gate_up ? to_.gate_up.dtype : to_.up.dtype;
    outer(expert, n, H_, dtype, worker, left, right, [&](int64_t i) { return d_stack_row(expert, first + i); });
  }

  void outer_down(int64_t task, int worker) {
    int64_t tiles = parts_of(H_, kOuterRows);
    int64_t expert = task / tiles;
    int64_t first = task % tiles * kOuterRows;
    int64_t n = std::min(kOuterRows, H_ - first);
    float* panel = buffers_[worker].panel;
    auto left = [&](int64_t p, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const char* from = row_of(a_.d, token(p + i), H_) + first * size_of(a_.d.dtype);
        kernels().decode(a_.d.dtype, from, panel + i * kOuterRows, n);
      }
      return Floats{panel, kOuterRows};
    };
    auto right = [&](int64_t p, int64_t, int64_t column, int64_t) {
      return Floats{hidden_ + p * ldh_ + column, ldh_};
    };
    outer(expert, n, I_, to_.down.dtype, worker, left, right,
          [&](int64_t i) { return row_of(to_.down, expert * H_ + first + i, I_); });
  }

  // Sums rows of `width` floats over an expert's positions, a strip at a time.
  template <class Add>
  void sum(int64_t expert, int64_t width, Output to, int worker, Add add_row) {
    float* acc = buffers_[worker].acc;
    for (int64_t column = 0; column < width; column += kPanelColumns) {
      int64_t n = std::min(kPanelColumns, width - column);
      std::fill_n(acc, n, 0.0f);
      for (int64_t p = a_.plan.offsets[expert]; p < a_.plan.offsets[expert + 1]; ++p) add_row(p, column, acc, n);
      kernels().encode(acc, to.dtype, row_of(to, expert, width) + column * size_of(to.dtype), n);
    }
  }

  void sum_up(int64_t expert, int worker) {
    sum(expert, rows_, to_.gate_up_bias, worker, [&](int64_t p, int64_t column, float* acc, int64_t n) {
      kernels().axpy(1, Dtype::f32, d_z_ + p * rows_ + column, acc, n);
    });
  }

  void sum_down(int64_t expert, int worker) {
    sum(expert, H_, to_.down_bias, worker, [&](int64_t p, int64_t column, float* acc, int64_t n) {
      const char* from = row_of(a_.d, token(p), H_) + column * size_of(a_.d.dtype);
      kernels().axpy(share(p), a_.d.dtype, from, acc, n);
    });
  }

  // Columns from `column` of d_z @ gate_up for one panel, into the slot rows of the chunk that begins at `first`.
  void input(const Panel& panel, int64_t first, int64_t column, int64_t end, int worker) {
    PanelBuffers& own = buffers_[worker];
    int64_t width = std::min(kPanelColumns, end - column);
    PanelRows rows(Dtype::f32, panel, [&](int64_t p) { return reinterpret_cast<const char*>(d_z_ + p * rows_); });
    const Stacks& stacks = a_.stacks;
    WeightRows weight{panel.expert, stacks.gate_up, stacks.gate_up.N, stacks.up ? &stacks.up : nullptr};
    multiply_transposed(rows, rows_, weight, column, width, own);
    for (int64_t m = 0; m < panel.rows; ++m) {
      int64_t s = a_.plan.order[panel.row + m];
      std::copy_n(own.acc + m * kPanelColumns, width, slots_ + s * chunk_ + column - first);
    }
  }

  void sum_slots(int64_t t, int64_t first, int64_t columns) {
    float acc[kPanelColumns];
    for (int64_t column = 0; column < columns; column += kPanelColumns) {
      int64_t n = std::min(kPanelColumns, columns - column);
      std::fill_n(acc, n, 0.0f);
      for (int64_t s = t * top_k_; s < (t + 1) * top_k_; ++s) {
        if (a_.plan.inverse[s] < live_) kernels().axpy(1, Dtype::f32, slots_ + s * chunk_ + column, acc, n);
      }
      char* to = row_of(to_.x, t, H_) + (first + column) * size_of(to_.x.dtype);
      kernels().encode(acc, to_.x.dtype, to, n);
    }
  }

  const Arguments& a_;
  const ExpertsGradients& to_ = a_.gradients;
  int64_t T_, top_k_, E_, H_, I_;
  bool gated_;
  int threads_;
  int64_t live_;
  GateUpRows z_rows_;
  int64_t rows_;  // of an expert's first stack, which is the width of z
  int64_t ldh_;
  int64_t hidden_columns_;
  std::vector<Panel> panels_;
  PanelBuffers* buffers_;
  bool needs_d_z_ = false;
  bool needs_g_ = false;
  int64_t chunk_ = 0;  // columns of d_x made at a time
  float* d_z_ = nullptr;
  float* hidden_ = nullptr;
  float* parts_ = nullptr;
  float* slots_ = nullptr;
};

}  // namespace

void experts_backward(Tensor d, Tensor x, Tensor z, Tensor weights, const Stacks& stacks, const Plan& plan,
                      const Activation& activation, const ExpertsGradients& gradients, int threads) {
  Arguments arguments{d, x, z, weights, stacks, plan, activation, gradients};
  Backward(arguments, threads).run();
  trim_scratch();
}

}  // namespace moefuse
