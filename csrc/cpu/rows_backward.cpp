// The backward ops that work row by row: glu_backward, tail_backward, combine_backward.
#include <algorithm>
#include <cmath>

#include "norm_backward.h"
#include "pool.h"
#include "products.h"
#include "scratch.h"
#include "training.h"

namespace moefuse {

void glu_backward(Tensor grad, Tensor gate, Tensor up, int64_t rows, int64_t I, const Activation& act, bool gated,
                  bool interleaved, Output d_gate, Output d_up, int threads) {
  constexpr int64_t kStrip = 256;
  const Kernels& k = kernels();
  int64_t strips = (I + kStrip - 1) / kStrip;
  bool together = gated && !up;
  int64_t pitch = together ? 2 * I : I;

  auto run = [&](int64_t task, int64_t, int) {
    int64_t row = task / strips;
    int64_t begin = task % strips * kStrip;
    int64_t n = std::min(kStrip, I - begin);
    int64_t bytes = size_of(gate.dtype);
    float both[2 * kStrip], d[kStrip], g[kStrip], u[kStrip], by_gate[kStrip], by_up[kStrip];
    k.decode(grad.dtype, row_of(grad, row, I) + begin * size_of(grad.dtype), d, n);
    const char* gates = row_of(gate, row, pitch);
    if (together && interleaved) {
      k.decode(gate.dtype, gates + 2 * begin * bytes, both, 2 * n);
      for (int64_t i = 0; i < n; ++i) {
        g[i] = both[2 * i];
        u[i] = both[2 * i + 1];
      }
    } else {
      k.decode(gate.dtype, gates + begin * bytes, g, n);
      if (together) k.decode(gate.dtype, gates + (I + begin) * bytes, u, n);
      if (up) k.decode(up.dtype, row_of(up, row, I) + begin * bytes, u, n);
    }
    k.slopes(act, g, gated ? u : nullptr, by_gate, by_up, n);
    for (int64_t i = 0; i < n; ++i) by_gate[i] *= d[i];
    for (int64_t i = 0; gated && i < n; ++i) by_up[i] *= d[i];
    char* to = row_of(d_gate, row, pitch);
    if (together && interleaved) {
      for (int64_t i = 0; i < n; ++i) {
        both[2 * i] = by_gate[i];
        both[2 * i + 1] = by_up[i];
      }
      k.encode(both, d_gate.dtype, to + 2 * begin * bytes, 2 * n);
      return;
    }
    k.encode(by_gate, d_gate.dtype, to + begin * bytes, n);
    if (together) k.encode(by_up, d_gate.dtype, to + (I + begin) * bytes, n);
    if (up) k.encode(by_up, d_up.dtype, row_of(d_up, row, I) + begin * bytes, n);
  };
  run_phases({{rows * strips, run}}, worth(threads, rows * I * 16));
}

void norm_backward(const float* x, const float* weight, float inverse_rms, int64_t H, float* d) {
  double along = 0;
  for (int64_t h = 0; h < H; ++h) along += static_cast<double>(d[h]) * weight[h] * x[h];
  // d_unit minus its part along unit, where unit = x * inverse_rms; see the formula in moefuse.ops.gate.
  auto part = static_cast<float>(along / static_cast<double>(H)) * inverse_rms * inverse_rms;
  for (int64_t h = 0; h < H; ++h) d[h] = inverse_rms * (d[h] * weight[h] - x[h] * part);
}

void sum_norm_weight(Tensor d_normed, Tensor x, const float* inverse_rms, int64_t T, int64_t H, int64_t begin,
                     Output out) {
  const Kernels& k = kernels();
  int64_t n = std::min(kNormStrip, H - begin);
  double total[kNormStrip] = {};
  float d[kNormStrip], in[kNormStrip], sums[kNormStrip];
  for (int64_t t = 0; t < T; ++t) {
    k.decode(d_normed.dtype, row_of(d_normed, t, H) + begin * size_of(d_normed.dtype), d, n);
    k.decode(x.dtype, row_of(x, t, H) + begin * size_of(x.dtype), in, n);
    for (int64_t i = 0; i < n; ++i) total[i] += d[i] * (in[i] * inverse_rms[t]);
  }
  for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<float>(total[i]);
  k.encode(sums, out.dtype, row_of(out, 0, H) + begin * size_of(out.dtype), n);
}

void tail_backward(const TailBackwardArgs& a, int threads) {
  const Kernels& k = kernels();
  int64_t T = a.T, H = a.H;
  bool normed = static_cast<bool>(a.d_normed);
  threads = worth(threads, T * H * 8);
  float* rows = scratch_floats(Slot::rows, threads * 3 * H);
  float* inverse_rms = scratch_floats(Slot::logits, T + H);
  float* norm_weight = inverse_rms + T;
  if (normed) k.decode(a.norm_weight.dtype, a.norm_weight.data, norm_weight, H);

  auto run = [&](int64_t t, int64_t, int worker) {
    float* d = rows + worker * 3 * H;
    float* other = d + H;
    float* through = other + H;
    k.decode(a.d_out.dtype, row_of(a.d_out, t, H), d, H);
    if (normed) {
      k.decode(a.total.dtype, row_of(a.total, t, H), other, H);
      k.decode(a.d_normed.dtype, row_of(a.d_normed, t, H), through, H);
      inverse_rms[t] = 1 / std::sqrt(k.sum_squares(other, H) / static_cast<float>(H) + a.eps);
      norm_backward(other, norm_weight, inverse_rms[t], H, through);
      for (int64_t h = 0; h < H; ++h) d[h] += through[h];
      k.encode(d, a.d_sum.dtype, row_of(a.d_sum, t, H), H);
    }
    if (!a.shared) return;
    k.decode(a.shared.dtype, row_of(a.shared, t, H), other, H);
    float dot = k.dot(d, other, H);
    float factor = 1;
    if (a.shared_gate) {
      factor = element(a.shared_gate, t);
      k.encode(&dot, a.d_gate.dtype, row_of(a.d_gate, t, 1), 1);
    }
    if (a.shared_logit) {
      factor = 1 / (1 + std::exp(-element(a.shared_logit, t)));
      float d_logit = dot * factor * (1 - factor);
      k.encode(&d_logit, a.d_logit.dtype, row_of(a.d_logit, t, 1), 1);
    }
    for (int64_t h = 0; h < H; ++h) d[h] *= factor;
    k.encode(d, a.d_shared.dtype, row_of(a.d_shared, t, H), H);
  };
  auto sum = [&](int64_t task, int64_t, int) {
    sum_norm_weight(a.d_normed, a.total, inverse_rms, T, H, task * kNormStrip, a.d_norm_weight);
  };
  run_phases({{T, run}, {normed ? (H + kNormStrip - 1) / kNormStrip : 0, sum}}, threads);
  trim_scratch();
}

void combine_backward(Tensor d, Tensor y, Tensor weights, const int32_t* inverse, int64_t T, int64_t top_k, int64_t H,
                      Output d_y, Output d_weights, int threads) {
  const Kernels& k = kernels();
  threads = worth(threads, T * top_k * H);
  float* rows = scratch_floats(Slot::rows, threads * 2 * H);

  auto run = [&](int64_t t, int64_t, int worker) {
    float* along = rows + worker * 2 * H;
    float* row = along + H;
    k.decode(d.dtype, row_of(d, t, H), along, H);
    for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      int64_t p = inverse == nullptr ? s : inverse[s];
      bool inside = p >= 0 && p < T * top_k;
      if (inside) k.decode(y.dtype, row_of(y, p, H), row, H);
      float dot = inside ? k.dot(row, along, H) : 0;
      k.encode(&dot, d_weights.dtype, row_of(d_weights, s, 1), 1);
      if (!inside) continue;
      float w = element(weights, s);
      for (int64_t h = 0; h < H; ++h) row[h] = w * along[h];
      k.encode(row, d_y.dtype, row_of(d_y, p, H), H);
    }
  };
  run_phases({{T, run}}, threads);
  trim_scratch();
}

}  // namespace moefuse
