// combine_backward and tail_backward: from the gradients of out and normed to those of all that was added up.
#include <cmath>

#include "ops/norm.h"
#include "ops/rows.h"
#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace moefuse {

void tail_backward(Tensor d_out, Tensor d_normed, Tensor total, const Tail& tail, const TailGradients& gradients,
                   int threads) {
  const Kernels& k = kernels();
  int64_t T = d_out.rows, H = d_out.columns;
  bool normed = static_cast<bool>(d_normed);
  threads = worth(threads, T * H * 8);
  float* rows = scratch_floats(Slot::rows, threads * 3 * H);
  float* inverse_rms = scratch_floats(Slot::logits, T + H);
  float* norm_weight = inverse_rms + T;
  if (normed) k.decode(tail.norm_weight.dtype, tail.norm_weight.data, norm_weight, H);

  auto run = [&](int64_t t, int64_t, int worker) {
    float* d = rows + worker * 3 * H;
    float* other = d + H;
    float* through = other + H;
    k.decode(d_out.dtype, row_of(d_out, t, H), d, H);
    if (normed) {
      k.decode(total.dtype, row_of(total, t, H), other, H);
      k.decode(d_normed.dtype, row_of(d_normed, t, H), through, H);
      inverse_rms[t] = inverse_rms_of(other, tail.eps, H);
      norm_backward(other, norm_weight, inverse_rms[t], H, through);
      for (int64_t h = 0; h < H; ++h) d[h] += through[h];
      k.encode(d, gradients.sum.dtype, row_of(gradients.sum, t, H), H);
    }
    if (!tail.shared) return;
    k.decode(tail.shared.dtype, row_of(tail.shared, t, H), other, H);
    float dot = k.dot(d, other, H);
    float factor = 1;
    if (tail.shared_gate) {
      factor = element(tail.shared_gate, t);
      k.encode(&dot, gradients.shared_gate.dtype, row_of(gradients.shared_gate, t, 1), 1);
    }
    if (tail.shared_logit) {
      factor = 1 / (1 + std::exp(-element(tail.shared_logit, t)));
      float d_logit = dot * factor * (1 - factor);
      k.encode(&d_logit, gradients.shared_logit.dtype, row_of(gradients.shared_logit, t, 1), 1);
    }
    for (int64_t h = 0; h < H; ++h) d[h] *= factor;
    k.encode(d, gradients.shared.dtype, row_of(gradients.shared, t, H), H);
  };
  auto sum = [&](int64_t task, int64_t, int) {
    sum_norm_weight(d_normed, total, inverse_rms, T, H, task * kNormStrip, gradients.norm_weight);
  };
  run_phases({{T, run}, {normed ? parts_of(H, kNormStrip) : 0, sum}}, threads);
  trim_scratch();
}

void combine_backward(Tensor d, Tensor y, Tensor weights, Indices inverse, Output d_y, Output d_weights, int threads) {
  int64_t T = weights.rows, top_k = weights.columns, H = y.columns;
  const Kernels& k = kernels();
  threads = worth(threads, T * top_k * H);
  float* rows = scratch_floats(Slot::rows, threads * 2 * H);

  auto run = [&](int64_t t, int64_t, int worker) {
    float* along = rows + worker * 2 * H;
    float* row = along + H;
    k.decode(d.dtype, row_of(d, t, H), along, H);
    for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      int64_t p = inverse ? inverse[s] : s;
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
