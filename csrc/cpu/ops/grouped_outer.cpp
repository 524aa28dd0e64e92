// grouped_outer: the gradient of an expert's weight.
#include <algorithm>

#include "ops/grouped.h"
#include "runtime/scratch.h"

namespace moefuse {

void grouped_outer(Tensor grad, Tensor x, const Plan& plan, bool gather, bool scatter, Output out, int threads) {
  constexpr int64_t kN = 32;
  constexpr int64_t kK = 256;
  constexpr int64_t kPositions = 64;  // whose strips of x stay in L2 while the rows of a tile go over them
  const Kernels& k = kernels();
  int64_t E = plan.E(), N = grad.columns, K = x.columns, live = plan.live();
  threads = worth(threads, (plan.S() + E) * N * K);
  Positions positions(plan, x.rows, gather, scatter);
  int64_t ldg = round_up(N, 4);
  int64_t ldx = round_up(K, kChunk);
  float* grads = scratch_floats(Slot::gradients, live * ldg);
  float* inputs = scratch_floats(Slot::activations, live * ldx);

  auto widen = [&](int64_t p, int64_t, int) {
    k.decode(grad.dtype, row_of(grad, positions.y(p), N), grads + p * ldg, N);
    std::fill(grads + p * ldg + N, grads + (p + 1) * ldg, 0.0f);
    k.decode(x.dtype, row_of(x, positions.x(p), K), inputs + p * ldx, K);
    std::fill(inputs + p * ldx + K, inputs + (p + 1) * ldx, 0.0f);
  };

  int64_t n_tiles = parts_of(N, kN);
  int64_t k_tiles = parts_of(K, kK);
  auto run = [&](int64_t task, int64_t, int) {
    int64_t e = task / (n_tiles * k_tiles);
    int64_t n0 = task / k_tiles % n_tiles * kN;
    int64_t k0 = task % k_tiles * kK;
    int64_t n = std::min(kN, N - n0);
    int64_t width = std::min(kK, K - k0);
    alignas(64) float acc[kN * kK];
    std::fill_n(acc, kN * kK, 0.0f);
    for (int64_t p = plan.offsets[e]; p < plan.offsets[e + 1]; p += kPositions) {
      int64_t count = std::min<int64_t>(kPositions, plan.offsets[e + 1] - p);
      k.outer(grads + p * ldg + n0, ldg, inputs + p * ldx + k0, ldx, count, round_up(n, 4), round_up(width, kChunk),
              acc, kK, false);
    }
    for (int64_t i = 0; i < n; ++i) {
      k.encode(acc + i * kK, out.dtype, row_of(out, e * N + n0 + i, K) + k0 * size_of(out.dtype), width);
    }
  };
  run_phases({{live, widen}, {E * n_tiles * k_tiles, run}}, threads);
  trim_scratch();
}

}  // namespace moefuse
