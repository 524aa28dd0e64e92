// experts: up product with activation, down product, combine and tail, for all experts in one call.
//
// Phases, each over all experts at once:
//   pack   x [T, H] -> packed rows, twice if gate and up differ       tasks: rows
//   up     packed x, gate_up [E, 2 I, H] -> packed hidden [S, I]      tasks: (expert, row block, column block)
//   down   packed hidden, down [E, H, I] -> y f32 [S, H]              tasks: likewise
//   finish y, weights, tail -> out [T, H], normed [T, H]              tasks: tokens
// Hidden rows stand in expert-major order, y rows in slot order.
#include <algorithm>
#include <cstring>
#include <memory>

#include "combine.h"
#include "core.h"
#include "pool.h"
#include "products.h"
#include "scratch.h"

namespace moefuse {
namespace {

struct OwnBuckets {
  std::unique_ptr<int32_t[]> memory;
  Buckets buckets;

  explicit OwnBuckets(const ExpertsArgs& a) : buckets(a.buckets) {
    if (buckets.offsets != nullptr) return;
    int64_t S = a.T * a.top_k;
    memory.reset(new int32_t[static_cast<size_t>(2 * a.E + 1 + 2 * S)]);
    int32_t* offsets = memory.get();
    int32_t* counts = offsets + a.E + 1;
    int32_t* order = counts + a.E;
    plan(a.ids, S, a.E, counts, offsets, order, order + S);
    buckets = {offsets, order};
  }
};

// The rows of gate and up that feed one column, for any layout.
struct GateUp {
  const ExpertsArgs& a;

  int64_t rows_per_column() const { return a.gated ? 2 : 1; }
  int64_t gate_row(int64_t i) const { return a.gated && !a.up && a.interleaved ? 2 * i : i; }
  int64_t up_row(int64_t i) const { return a.interleaved ? 2 * i + 1 : a.I + i; }

  const char* gate(int64_t expert, int64_t i) const { return row_of(a.gate_up, expert, gate_row(i)); }
  const char* up(int64_t expert, int64_t i) const {
    return a.up ? row_of(a.up, expert, i) : row_of(a.gate_up, expert, up_row(i));
  }

  // Gate biases of the cell's columns, then up biases.
  void biases(const Cell& c, float* out) const {
    int64_t row = c.expert * a.I * rows_per_column();
    for (int64_t n = 0; n < c.columns; ++n) {
      out[n] = element(a.gate_up_bias, row + gate_row(c.column + n));
      if (a.gated) out[c.columns + n] = element(a.gate_up_bias, row + up_row(c.column + n));
    }
  }
};

class Layer {
 public:
  Layer(const ExpertsArgs& args, int threads)
      : a_(args),
        own_(args),
        buckets_(own_.buckets),
        threads_(worth(threads, args.T * args.top_k * args.H * args.I)),
        gate_up_{args},
        x_{&format_of(args.gate_up, args.x.dtype), nullptr, args.H},
        up_x_{&format_of(args.up ? args.up : args.gate_up, args.x.dtype), nullptr, args.H},
        hidden_{&format_of(args.down, args.x.dtype), nullptr, args.I},
        up_grid_(buckets_.offsets, args.E, args.I, gate_up_.rows_per_column(), args.H, *x_.format,
                 hidden_.format->pack_unit, threads_),
        down_grid_(buckets_.offsets, args.E, args.H, 1, args.I, *hidden_.format, hidden_.format->pack_unit, threads_) {
    int64_t S = a_.T * a_.top_k;
    x_.data = scratch(Slot::activations, a_.T * x_.pitch());
    up_x_.data = packs_twice() ? scratch(Slot::up_activations, a_.T * up_x_.pitch()) : x_.data;
    hidden_.data = scratch(Slot::hidden, S * hidden_.pitch());
    y_ = scratch_floats(Slot::products, S * a_.H);
    rows_ = scratch_floats(Slot::rows, threads_ * a_.H);
  }

  void run() {
    auto up = [this](int64_t task, int64_t next, int) { this->up(task, next); };
    auto down = [this](int64_t task, int64_t next, int) { this->down(task, next); };
    auto finish = [this](int64_t t, int64_t, int worker) { this->finish(t, rows_ + worker * a_.H); };
    // A plan that a caller brought may leave out what the ids have: those rows of y must not be what was there before.
    auto clear = [this](int64_t task, int64_t, int) {
      int64_t p = up_grid_.rows() + task;
      int64_t width = a_.I * gate_up_.rows_per_column();
      if (a_.z) std::memset(row_of(a_.z, p, width), 0, static_cast<size_t>(width * size_of(a_.z.dtype)));
      std::fill_n(y_ + buckets_.order[p] * a_.H, a_.H, 0.0f);
    };
    bool clears = a_.z || a_.buckets.offsets != nullptr;
    int64_t without_expert = clears ? a_.T * a_.top_k - up_grid_.rows() : 0;
    run_phases({pack_phase(a_.x, a_.T, x_), pack_phase(a_.x, packs_twice() ? a_.T : 0, up_x_),
                {up_grid_.tasks(), up}, {without_expert, clear}, {down_grid_.tasks(), down}, {a_.T, finish}},
               threads_);
  }

 private:
  bool packs_twice() const { return up_x_.format->pack != x_.format->pack; }

  void up(int64_t task, int64_t next) {
    Workspace ws;
    Cell c = up_grid_.cell(task);
    int64_t width = c.columns * gate_up_.rows_per_column();
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = x_.row(buckets_.order[c.row + m] / a_.top_k);
    for (int64_t n = 0; n < c.columns; ++n) {
      ws.w[n] = gate_up_.gate(c.expert, c.column + n);
      if (a_.gated) ws.w[c.columns + n] = gate_up_.up(c.expert, c.column + n);
    }
    const char* ahead = nullptr;
    if (next >= 0) {
      Cell after = up_grid_.cell(next);
      ahead = gate_up_.gate(after.expert, after.column);
    }
    if (up_x_.format == x_.format) {
      x_.format->dots({ws.a, ws.w, c.rows, width, a_.H, ws.z, width, ahead});
    } else {
      x_.format->dots({ws.a, ws.w, c.rows, c.columns, a_.H, ws.z, width, ws.w[c.columns]});
      for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = up_x_.row(buckets_.order[c.row + m] / a_.top_k);
      up_x_.format->dots({ws.a, ws.w + c.columns, c.rows, c.columns, a_.H, ws.z + c.columns, width, ahead});
    }

    float biases[kMaxColumns], h[kMaxColumns];
    if (a_.gate_up_bias) gate_up_.biases(c, biases);
    // The last block of a row also writes its padding.
    int64_t padded = c.column + c.columns == a_.I ? hidden_.padded() - c.column : c.columns;
    for (int64_t m = 0; m < c.rows; ++m) {
      float* z = ws.z + m * width;
      for (int64_t n = 0; a_.gate_up_bias && n < width; ++n) z[n] += biases[n];
      if (a_.z) keep(c, c.row + m, z);
      kernels().activate(a_.act, z, a_.gated ? z + c.columns : nullptr, h, c.columns);
      hidden_.format->pack(Dtype::f32, h, c.columns, padded, hidden_.row(c.row + m) + hidden_.offset(c.column));
    }
  }

  // Writes the pre-activations of one row: gate columns, then up columns.
  void keep(const Cell& c, int64_t p, const float* z) {
    char* row = row_of(a_.z, p, a_.I * gate_up_.rows_per_column());
    int64_t bytes = size_of(a_.z.dtype);
    if (a_.gated && a_.interleaved) {
      float both[2 * kMaxColumns];
      for (int64_t n = 0; n < c.columns; ++n) {
        both[2 * n] = z[n];
        both[2 * n + 1] = z[c.columns + n];
      }
      kernels().encode(both, a_.z.dtype, row + 2 * c.column * bytes, 2 * c.columns);
      return;
    }
    kernels().encode(z, a_.z.dtype, row + c.column * bytes, c.columns);
    if (a_.gated) kernels().encode(z + c.columns, a_.z.dtype, row + (a_.I + c.column) * bytes, c.columns);
  }

  void down(int64_t task, int64_t next) {
    Workspace ws;
    Cell c = down_grid_.cell(task);
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = hidden_.row(c.row + m);
    for (int64_t n = 0; n < c.columns; ++n) ws.w[n] = row_of(a_.down, c.expert, c.column + n);
    const char* ahead = nullptr;
    if (next >= 0) {
      Cell after = down_grid_.cell(next);
      ahead = row_of(a_.down, after.expert, after.column);
    }
    hidden_.format->dots({ws.a, ws.w, c.rows, c.columns, a_.I, ws.z, c.columns, ahead});

    float biases[kMaxColumns] = {};
    if (a_.down_bias) {
      const char* from = row_of(a_.down_bias, c.expert, a_.H) + c.column * size_of(a_.down_bias.dtype);
      kernels().decode(a_.down_bias.dtype, from, biases, c.columns);
    }
    for (int64_t m = 0; m < c.rows; ++m) {
      float* y = y_ + buckets_.order[c.row + m] * a_.H + c.column;
      for (int64_t n = 0; n < c.columns; ++n) y[n] = ws.z[m * c.columns + n] + biases[n];
    }
  }

  void finish(int64_t t, float* acc) {
    std::fill_n(acc, a_.H, 0.0f);
    for (int64_t s = t * a_.top_k; s < (t + 1) * a_.top_k; ++s) {
      int64_t id = a_.ids[s];
      if (id < 0 || id >= a_.E) continue;
      kernels().axpy(element(a_.weights, s), Dtype::f32, y_ + s * a_.H, acc, a_.H);
    }
    finish_token(a_.tail, t, a_.H, acc);
  }

  const ExpertsArgs& a_;
  OwnBuckets own_;
  Buckets buckets_;
  int threads_;
  GateUp gate_up_;
  Packed x_;
  Packed up_x_;
  Packed hidden_;
  Grid up_grid_;
  Grid down_grid_;
  float* y_ = nullptr;
  float* rows_ = nullptr;
};

}  // namespace

void experts(const ExpertsArgs& args, int threads) {
  Layer(args, threads).run();
  trim_scratch();
}

}  // namespace moefuse
