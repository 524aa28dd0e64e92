// experts: up product with activation, down product, combine and tail, for all experts in one call.
//
// Phases, each over all experts at once:
//   pack   x [T, H] -> packed rows, twice if gate and up differ       tasks: rows
//   up     packed x, gate_up [E, 2 I, H] -> packed hidden [S, I]      tasks: (expert, rows, columns)
//   down   packed hidden, down [E, H, I] -> y f32 [S, H]              tasks: likewise
//   finish y, weights, tail -> out [T, H], normed [T, H]              tasks: tokens
// Hidden rows stand in expert-major order, y rows in slot order.
#include <algorithm>
#include <cstring>
#include <memory>

#include "ops/combine.h"
#include "ops/glu.h"
#include "ops/grouped.h"
#include "runtime/scratch.h"

namespace moefuse {
namespace {

// The plan that was given, or one made of the ids.
struct PlanOf {
  std::unique_ptr<int32_t[]> memory;
  Plan plan;

  PlanOf(const Plan& given, Ids ids, int64_t E) : plan(given) {
    if (given) return;
    int64_t S = ids.rows * ids.columns;
    memory.reset(new int32_t[static_cast<size_t>(2 * E + 1 + 2 * S)]);
    int32_t* offsets = memory.get();
    int32_t* counts = offsets + E + 1;
    int32_t* order = counts + E;
    plan = {{offsets, E + 1}, {order, S}, {order + S, S}};
    moefuse::plan(ids, {counts, E}, plan.offsets, plan.order, plan.inverse);
  }
};

struct Arguments {
  Tensor x;
  Ids ids;
  Tensor weights;
  const Stacks& stacks;
  Activation activation;
  const Tail& tail;
  const Outputs& outputs;
  Output z;
};

class Layer {
 public:
  Layer(const Arguments& arguments, const Plan& plan, int threads)
      : a_(arguments),
        T_(a_.ids.rows),
        top_k_(a_.ids.columns),
        E_(a_.stacks.down.E),
        H_(a_.stacks.down.N),
        I_(a_.stacks.down.K),
        gated_(a_.activation.gated),
        brought_(plan),
        own_(plan, a_.ids, E_),
        order_(own_.plan.order),
        threads_(worth(threads, (own_.plan.live() * I_ + T_) * H_)),
        z_rows_(I_, gated_, false, a_.stacks.layout),
        x_{&format_of(a_.stacks.gate_up, a_.x.dtype), nullptr, H_},
        up_x_{&format_of(a_.stacks.up ? a_.stacks.up : a_.stacks.gate_up, a_.x.dtype), nullptr, H_},
        hidden_{&format_of(a_.stacks.down, a_.x.dtype), nullptr, I_},
        up_grid_(own_.plan.offsets, I_, gated_ ? 2 : 1, H_, *x_.format, std::max(hidden_.format->pack_unit, kStripRows),
                 threads_),
        down_grid_(own_.plan.offsets, H_, 1, I_, *hidden_.format, hidden_.format->pack_unit, threads_) {
    x_.data = scratch(Slot::activations, T_ * x_.pitch());
    up_x_.data = packs_twice() ? scratch(Slot::up_activations, T_ * up_x_.pitch()) : x_.data;
    hidden_.data = scratch(Slot::hidden, T_ * top_k_ * hidden_.pitch());
    y_ = scratch_floats(Slot::products, T_ * top_k_ * H_);
    rows_ = scratch_floats(Slot::rows, threads_ * H_);
  }

  void run() {
    auto up = [this](int64_t task, int64_t next, int) { this->up(task, next); };
    auto down = [this](int64_t task, int64_t next, int) { this->down(task, next); };
    auto finish = [this](int64_t t, int64_t, int worker) { this->finish(t, rows_ + worker * H_); };
    // A plan that a caller brought may leave out what the ids have: those rows of y must not be what was there before.
    auto clear = [this](int64_t task, int64_t, int) {
      int64_t p = up_grid_.rows() + task;
      int64_t width = z_rows_.width();
      if (a_.z) std::memset(row_of(a_.z, p, width), 0, static_cast<size_t>(width * size_of(a_.z.dtype)));
      std::fill_n(y_ + order_[p] * H_, H_, 0.0f);
    };
    bool clears = a_.z || brought_;
    int64_t without_expert = clears ? T_ * top_k_ - up_grid_.rows() : 0;
    int64_t packs = up_grid_.tasks() > 0 ? T_ : 0;
    run_phases({pack_phase(a_.x, packs, x_), pack_phase(a_.x, packs_twice() ? packs : 0, up_x_),
                {up_grid_.tasks(), up}, {without_expert, clear}, {down_grid_.tasks(), down}, {T_, finish}},
               threads_);
  }

 private:
  bool packs_twice() const { return up_x_.format->pack != x_.format->pack; }

  void up(int64_t task, int64_t next) {
    Workspace ws;
    Cell c = up_grid_.cell(task);
    int64_t width = c.columns * (gated_ ? 2 : 1);
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = x_.row(order_[c.row + m] / top_k_);
    // Gates and ups in turns are read as they lie, and their results are taken apart.
    bool in_turns = z_rows_.interleaved;
    rows_of(a_.stacks.gate_up, c.expert, z_rows_.gate_column(c.column), in_turns ? width : c.columns, ws.w);
    if (gated_ && !in_turns) {
      const Weight& up = a_.stacks.up ? a_.stacks.up : a_.stacks.gate_up;
      rows_of(up, c.expert, a_.stacks.up ? c.column : z_rows_.up_column(c.column), c.columns, ws.w + c.columns);
    }
    Cell after = next < 0 ? c : up_grid_.cell(next);
    const char* ahead = nullptr;
    if (next >= 0) ahead = row_of(a_.stacks.gate_up, after.expert, z_rows_.gate_column(after.column));
    if (up_x_.format == x_.format) {
      x_.format->dots({ws.a, ws.w, c.rows, width, H_, ws.z, width, ahead});
    } else {
      x_.format->dots({ws.a, ws.w, c.rows, c.columns, H_, ws.z, width, ws.w[c.columns]});
      for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = up_x_.row(order_[c.row + m] / top_k_);
      up_x_.format->dots({ws.a, ws.w + c.columns, c.rows, c.columns, H_, ws.z + c.columns, width, ahead});
    }

    float biases[kMaxColumns], h[kMaxColumns];
    Tensor bias = a_.stacks.gate_up_bias;
    if (bias) {
      int64_t row = c.expert * z_rows_.width();
      for (int64_t n = 0; n < c.columns; ++n) {
        biases[n] = element(bias, row + z_rows_.gate_column(c.column + n));
        if (gated_) biases[c.columns + n] = element(bias, row + z_rows_.up_column(c.column + n));
      }
    }
    // The last columns of a row also write its padding.
    int64_t padded = c.column + c.columns == I_ ? hidden_.padded() - c.column : c.columns;
    for (int64_t m = 0; m < c.rows; ++m) {
      float* z = ws.z + m * width;
      float apart[kMaxColumns];
      if (in_turns) {
        for (int64_t n = 0; n < width; ++n) apart[n % 2 * c.columns + n / 2] = z[n];
        z = apart;
      }
      for (int64_t n = 0; bias && n < width; ++n) z[n] += biases[n];
      if (a_.z) z_rows_.encode(z, z + c.columns, a_.z, {}, c.row + m, c.column, c.columns);
      kernels().activate(a_.activation, z, gated_ ? z + c.columns : nullptr, h, c.columns);
      hidden_.format->pack(Dtype::f32, h, c.columns, padded, hidden_.row(c.row + m) + hidden_.offset(c.column));
    }
  }

  void down(int64_t task, int64_t next) {
    Workspace ws;
    Cell c = down_grid_.cell(task);
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = hidden_.row(c.row + m);
    rows_of(a_.stacks.down, c.expert, c.column, c.columns, ws.w);
    Cell after = next < 0 ? c : down_grid_.cell(next);
    const char* ahead = next < 0 ? nullptr : row_of(a_.stacks.down, after.expert, after.column);
    hidden_.format->dots({ws.a, ws.w, c.rows, c.columns, I_, ws.z, c.columns, ahead});

    float biases[kMaxColumns] = {};
    if (Tensor bias = a_.stacks.down_bias) {
      const char* from = row_of(bias, c.expert, H_) + c.column * size_of(bias.dtype);
      kernels().decode(bias.dtype, from, biases, c.columns);
    }
    for (int64_t m = 0; m < c.rows; ++m) {
      float* y = y_ + order_[c.row + m] * H_ + c.column;
      for (int64_t n = 0; n < c.columns; ++n) y[n] = ws.z[m * c.columns + n] + biases[n];
    }
  }

  void finish(int64_t t, float* acc) {
    std::fill_n(acc, H_, 0.0f);
    for (int64_t s = t * top_k_; s < (t + 1) * top_k_; ++s) {
      int64_t id = a_.ids[s];
      if (id < 0 || id >= E_) continue;
      kernels().axpy(element(a_.weights, s), Dtype::f32, y_ + s * H_, acc, H_);
    }
    finish_token(a_.tail, a_.outputs, t, H_, acc);
  }

  const Arguments& a_;
  int64_t T_, top_k_, E_, H_, I_;
  bool gated_;
  bool brought_;  // the caller brought the plan
  PlanOf own_;
  Indices order_;
  int threads_;
  GateUpRows z_rows_;
  Packed x_;
  Packed up_x_;
  Packed hidden_;
  Grid up_grid_;
  Grid down_grid_;
  float* y_ = nullptr;
  float* rows_ = nullptr;
};

}  // namespace

void experts(Tensor x, Ids ids, Tensor weights, const Stacks& stacks, const Plan& plan, const Activation& activation,
             const Tail& tail, const Outputs& outputs, Output z, int threads) {
  Arguments arguments{x, ids, weights, stacks, activation, tail, outputs, z};
  Layer(arguments, plan, threads).run();
  trim_scratch();
}

}  // namespace moefuse
