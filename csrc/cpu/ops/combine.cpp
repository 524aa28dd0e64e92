// combine: the weighted sum of a token's expert rows in slot order, then shared, residual and the next norm.
#include "ops/combine.h"

#include <algorithm>
#include <cmath>

#include "ops/norm.h"
#include "ops/rows.h"
#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace moefuse {

void finish_token(const Tail& tail, const Outputs& outputs, int64_t t, int64_t H, float* acc) {
  const Kernels& k = kernels();
  if (tail.shared) {
    float g = 1;
    if (tail.shared_gate) g = element(tail.shared_gate, t);
    if (tail.shared_logit) g = 1 / (1 + std::exp(-element(tail.shared_logit, t)));
    k.axpy(g, tail.shared.dtype, row_of(tail.shared, t, H), acc, H);
  }
  if (tail.residual) k.axpy(1, tail.residual.dtype, row_of(tail.residual, t, H), acc, H);
  // The residual has been read: `out` may be the same memory.
  k.encode(acc, outputs.out.dtype, row_of(outputs.out, t, H), H);
  if (tail.norm_weight) {
    rms_norm(acc, tail.norm_weight, tail.eps, H, acc);
    k.encode(acc, outputs.normed.dtype, row_of(outputs.normed, t, H), H);
  }
}

void combine(Tensor y, Tensor weights, Indices inverse, const Tail& tail, const Outputs& outputs, int threads) {
  int64_t T = weights.rows, top_k = weights.columns, H = y.columns;
  threads = worth(threads, T * (top_k + 3) * H);
  float* rows = scratch_floats(Slot::rows, threads * H);
  auto run = [&](int64_t t, int64_t, int worker) {
    float* acc = rows + worker * H;
    std::fill_n(acc, H, 0.0f);
    for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      int64_t row = inverse ? inverse[s] : s;
      if (row < 0 || row >= T * top_k) continue;
      kernels().axpy(element(weights, s), y.dtype, row_of(y, row, H), acc, H);
    }
    finish_token(tail, outputs, t, H, acc);
  };
  run_phases({{T, run}}, threads);
  trim_scratch();
}

}  // namespace moefuse
