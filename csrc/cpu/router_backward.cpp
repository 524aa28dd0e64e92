// route_backward and gate_backward: through the selected scores to the logits, and on to router weight, norm and x.
#include <algorithm>
#include <cmath>
#include <limits>

#include "mirror.h"
#include "norm_backward.h"
#include "pool.h"
#include "route.h"
#include "scratch.h"
#include "training.h"

namespace moefuse {
namespace {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 64;
constexpr float kInf = std::numeric_limits<float>::infinity();

// Gradient of values divided by their sum: `floor` (-inf: none) holds the sum up, and takes its gradient away.
void through_divisor(double* grad, const double* values, int64_t n, double floor) {
  double total = 0, along = 0;
  for (int64_t j = 0; j < n; ++j) {
    total += values[j];
    along += grad[j] * values[j];
  }
  bool held = total == 0 || !(total > floor);
  double divisor = !held ? total : floor > 0 ? floor : 1;
  for (int64_t j = 0; j < n; ++j) grad[j] = (grad[j] - (held ? 0 : along / divisor)) / divisor;
}

class RowBackward {
 public:
  RowBackward(Tensor per_expert_scale, int64_t E, const Routing& routing) : r_(routing), E_(E) {
    if (!per_expert_scale) return;
    scale_.resize(static_cast<size_t>(E));
    kernels().decode(per_expert_scale.dtype, per_expert_scale.data, scale_.data(), E);
  }

  // logits [E], ids and grad [top_k] -> d_logits [E]; d_scale [top_k] is each slot's part of its expert's scale.
  void row(const float* logits, const int32_t* ids, const float* grad, float* d_logits, float* d_scale) const {
    float capped[kMaxExperts], scores[kMaxExperts];
    for (int64_t e = 0; e < E_; ++e) {
      capped[e] = std::isfinite(logits[e]) ? logits[e] : -kInf;
      if (r_.softcap > 0 && capped[e] > -kInf) {
        capped[e] = static_cast<float>(r_.softcap * std::tanh(static_cast<double>(capped[e]) / r_.softcap));
      }
    }
    kernels().scores(r_.score, capped, scores, E_);
    ExactScores exact(r_.score, capped, scores, E_);

    // The slots that have an expert; the others take no part in any sum.
    int64_t slots[kMaxTopK], count = 0;
    double g[kMaxTopK], selected[kMaxTopK], shares[kMaxTopK], scaled[kMaxTopK], factor[kMaxTopK];
    for (int64_t j = 0; j < r_.top_k; ++j) {
      d_scale[j] = 0;
      if (ids[j] >= E_) continue;
      slots[count] = j;
      g[count] = grad[j];
      selected[count] = exact[ids[j]];
      factor[count] = r_.scale * (scale_.empty() ? 1.0 : static_cast<double>(scale_[static_cast<size_t>(ids[j])]));
      ++count;
    }
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += selected[i];
    double divisor = r_.renormalize ? std::max(total, static_cast<double>(r_.norm_floor)) : 1;
    if (divisor == 0) divisor = 1;
    for (int64_t i = 0; i < count; ++i) {
      shares[i] = selected[i] / divisor;
      scaled[i] = shares[i] * factor[i];
    }
    if (r_.renormalize_after_scale) through_divisor(g, scaled, count, -kInf);
    for (int64_t i = 0; i < count; ++i) {
      d_scale[slots[i]] = static_cast<float>(g[i] * shares[i] * r_.scale);
      g[i] *= factor[i];
    }
    if (r_.renormalize) through_divisor(g, selected, count, r_.norm_floor);

    double along = 0;
    for (int64_t i = 0; i < count; ++i) along += g[i] * selected[i];
    for (int64_t e = 0; e < E_; ++e) {
      d_logits[e] = r_.score == Score::softmax ? static_cast<float>(-along * scores[e]) : 0;
    }
    for (int64_t i = 0; i < count; ++i) {
      int64_t e = ids[slots[i]];
      double s = selected[i];
      if (r_.score == Score::softmax) d_logits[e] = static_cast<float>(d_logits[e] + s * g[i]);
      if (r_.score == Score::sigmoid) d_logits[e] = static_cast<float>(d_logits[e] + g[i] * s * (1 - s));
      // A score that underflowed to zero has no slope left.
      if (r_.score == Score::sqrtsoftplus && s > 0) {
        double slope = 1 / (1 + std::exp(-static_cast<double>(capped[e]))) / (2 * s);
        d_logits[e] = static_cast<float>(d_logits[e] + g[i] * slope);
      }
    }
    for (int64_t e = 0; e < E_; ++e) {
      if (!std::isfinite(logits[e])) {
        d_logits[e] = 0;
      } else if (r_.softcap > 0) {
        double t = std::tanh(static_cast<double>(logits[e]) / r_.softcap);
        d_logits[e] = static_cast<float>(d_logits[e] * (1 - t * t));
      }
    }
  }

 private:
  Routing r_;
  int64_t E_;
  std::vector<float> scale_;
};

// out [E] = the sum of each expert's slots, in the order of tokens.
void sum_scales(const float* parts, const int32_t* ids, int64_t S, int64_t E, Output out) {
  std::vector<double> total(static_cast<size_t>(E));
  for (int64_t s = 0; s < S; ++s) {
    if (ids[s] < E) total[static_cast<size_t>(ids[s])] += parts[s];
  }
  std::vector<float> sums(total.begin(), total.end());
  kernels().encode(sums.data(), out.dtype, out.data, E);
}

}  // namespace

void route_backward(Tensor grad, Tensor logits, const int32_t* ids, Tensor per_expert_scale, int64_t T, int64_t E,
                    const Routing& routing, Output d_logits, Output d_scale, int threads) {
  const Kernels& k = kernels();
  RowBackward rows(per_expert_scale, E, routing);
  int64_t top_k = routing.top_k;
  float* parts = scratch_floats(Slot::rows, T * top_k);
  auto run = [&](int64_t t, int64_t, int) {
    float in[kMaxExperts], out[kMaxExperts], g[kMaxTopK];
    k.decode(logits.dtype, row_of(logits, t, E), in, E);
    k.decode(grad.dtype, row_of(grad, t, top_k), g, top_k);
    rows.row(in, ids + t * top_k, g, out, parts + t * top_k);
    k.encode(out, d_logits.dtype, row_of(d_logits, t, E), E);
  };
  run_phases({{T, run}}, worth(threads, T * E * 16));
  if (d_scale) sum_scales(parts, ids, T * top_k, E, d_scale);
  trim_scratch();
}

void gate_backward(const GateBackwardArgs& a, int threads) {
  const Kernels& k = kernels();
  int64_t T = a.T, H = a.H, E = a.E, top_k = a.routing.top_k;
  threads = worth(threads, T * E * H);
  RowBackward through(a.per_expert_scale, E, a.routing);
  int64_t pitch = round_up(H, kChunk);
  // Rows of normed x, zero-padded; later the gradients of those rows.
  float* normed = scratch_floats(Slot::hidden, T * pitch);
  float* d_normed = scratch_floats(Slot::products, a.d_x ? T * H : 0);
  float* logits = scratch_floats(Slot::logits, 2 * T * E);
  float* d_logits = logits + T * E;
  float* small = scratch_floats(Slot::gradients, T + H + T * top_k);
  float* inverse_rms = small;
  float* norm_weight = small + T;
  float* parts = norm_weight + H;
  MirrorBuffers* buffers = mirror_buffers(threads);
  Packed packed{&format_of(a.weight, Dtype::f32), nullptr, H};
  packed.data = scratch(Slot::activations, T * packed.pitch());
  if (a.norm_weight) k.decode(a.norm_weight.dtype, a.norm_weight.data, norm_weight, H);

  auto norm = [&](int64_t t, int64_t, int) {
    float* row = normed + t * pitch;
    k.decode(a.x.dtype, row_of(a.x, t, H), row, H);
    std::fill(row + H, row + pitch, 0.0f);
    if (a.norm_weight) {
      inverse_rms[t] = 1 / std::sqrt(k.sum_squares(row, H) / static_cast<float>(H) + a.eps);
      for (int64_t h = 0; h < H; ++h) row[h] = row[h] * inverse_rms[t] * norm_weight[h];
    }
    packed.format->pack(Dtype::f32, row, H, packed.padded(), packed.row(t));
  };

  const int32_t offsets[2] = {0, static_cast<int32_t>(T)};
  Grid grid(offsets, 1, E, 1, H, *packed.format, packed.format->pack_unit, threads);
  auto product = [&](int64_t task, int64_t, int) {
    Workspace ws;
    Cell c = grid.cell(task);
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = packed.row(c.row + m);
    for (int64_t n = 0; n < c.columns; ++n) ws.w[n] = row_of(a.weight, 0, c.column + n);
    float* z = logits + c.row * E + c.column;
    packed.format->dots({ws.a, ws.w, c.rows, c.columns, H, z, E, nullptr});
    for (int64_t n = 0; a.logit_bias && n < c.columns; ++n) {
      float b = element(a.logit_bias, c.column + n);
      for (int64_t m = 0; m < c.rows; ++m) z[m * E + n] += b;
    }
  };

  auto route = [&](int64_t t, int64_t, int) {
    float g[kMaxTopK];
    k.decode(a.d_weights.dtype, row_of(a.d_weights, t, top_k), g, top_k);
    through.row(logits + t * E, a.ids + t * top_k, g, d_logits + t * E, parts + t * top_k);
  };

  constexpr int64_t kTile = 64;
  int64_t strips = (H + kMirrorColumns - 1) / kMirrorColumns;
  int64_t tiles = (E + kTile - 1) / kTile;
  auto router = [&](int64_t task, int64_t, int worker) {
    int64_t first = task / strips * kTile;
    int64_t column = task % strips * kMirrorColumns;
    int64_t n = std::min(kTile, E - first);
    int64_t width = std::min(kMirrorColumns, H - column);
    float* acc = buffers[worker].acc;
    if (T == 0) std::fill_n(acc, n * kMirrorColumns, 0.0f);
    for (int64_t t = 0; t < T; t += kTile) {
      k.outer(d_logits + t * E + first, E, normed + t * pitch + column, pitch, std::min(kTile, T - t), n,
              round_up(width, kChunk), acc, kMirrorColumns, t == 0);
    }
    for (int64_t i = 0; i < n; ++i) {
      char* to = row_of(a.d_weight, first + i, H) + column * size_of(a.d_weight.dtype);
      k.encode(acc + i * kMirrorColumns, a.d_weight.dtype, to, width);
    }
  };

  std::vector<RowBlock> blocks = row_blocks(offsets, 1);
  auto input = [&](int64_t task, int64_t, int worker) {
    const RowBlock& block = blocks[static_cast<size_t>(task / strips)];
    int64_t column = task % strips * kMirrorColumns;
    int64_t width = std::min(kMirrorColumns, H - column);
    MirrorRows rows;
    rows.dtype = Dtype::f32;
    rows.count = block.rows;
    for (int64_t m = 0; m < block.rows; ++m) {
      rows.a[m] = reinterpret_cast<const char*>(d_logits + (block.row + m) * E);
    }
    mirror(rows, E, [&](int64_t e) { return row_of(a.weight, 0, e); }, a.weight.dtype(), column, width, buffers[worker]);
    for (int64_t m = 0; m < block.rows; ++m) {
      std::copy_n(buffers[worker].acc + m * kMirrorColumns, width, d_normed + (block.row + m) * H + column);
    }
  };

  // The rows of `normed` have served: they take x, which the norm's gradient needs beside d_normed.
  auto finish = [&](int64_t t, int64_t, int) {
    float* d = d_normed + t * H;
    if (a.d_normed) k.axpy(1, a.d_normed.dtype, row_of(a.d_normed, t, H), d, H);
    if (!a.norm_weight) {
      k.encode(d, a.d_x.dtype, row_of(a.d_x, t, H), H);
      return;
    }
    float* x = normed + t * pitch;
    float* out = reinterpret_cast<float*>(packed.row(t));
    k.decode(a.x.dtype, row_of(a.x, t, H), x, H);
    std::copy_n(d, H, out);
    norm_backward(x, norm_weight, inverse_rms[t], H, out);
    k.encode(out, a.d_x.dtype, row_of(a.d_x, t, H), H);
  };
  auto norm_sum = [&](int64_t task, int64_t, int) {
    sum_norm_weight({d_normed, Dtype::f32}, a.x, inverse_rms, T, H, task * kNormStrip, a.d_norm_weight);
  };

  bool wants_norm = a.d_x && a.norm_weight;
  run_phases({{T, norm},
              {grid.tasks(), product},
              {T, route},
              {a.d_weight ? tiles * strips : 0, router},
              {a.d_x ? static_cast<int64_t>(blocks.size()) * strips : 0, input},
              {a.d_x ? T : 0, finish},
              {wants_norm ? (H + kNormStrip - 1) / kNormStrip : 0, norm_sum}},
             threads);
  if (a.d_logit_bias) {
    std::vector<double> total(static_cast<size_t>(E));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t e = 0; e < E; ++e) total[static_cast<size_t>(e)] += d_logits[t * E + e];
    }
    std::vector<float> sums(total.begin(), total.end());
    k.encode(sums.data(), a.d_logit_bias.dtype, a.d_logit_bias.data, E);
  }
  if (a.d_scale) sum_scales(parts, a.ids, T * top_k, E, a.d_scale);
  trim_scratch();
}

}  // namespace moefuse
