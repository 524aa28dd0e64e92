// glu_backward: the gradients of gate and up, where those stand.
#include <algorithm>

#include "ops/glu.h"
#include "runtime/pool.h"

namespace moefuse {

void glu_backward(Tensor grad, Tensor gate_up, Tensor up, const Activation& activation, Layout layout,
                  Output d_gate_up, Output d_up, int threads) {
  constexpr int64_t kStrip = 256;
  int64_t T = grad.rows, I = grad.columns;
  int64_t strips = parts_of(I, kStrip);
  GateUpRows rows(I, activation.gated, static_cast<bool>(up), layout);

  auto run = [&](int64_t task, int64_t, int) {
    int64_t row = task / strips;
    int64_t begin = task % strips * kStrip;
    int64_t n = std::min(kStrip, I - begin);
    float d[kStrip], g[kStrip], u[kStrip], by_gate[kStrip], by_up[kStrip];
    kernels().decode(grad.dtype, row_of(grad, row, I) + begin * size_of(grad.dtype), d, n);
    rows.decode(gate_up, up, row, begin, n, g, u);
    kernels().derivatives(activation, g, activation.gated ? u : nullptr, by_gate, by_up, n);
    for (int64_t i = 0; i < n; ++i) by_gate[i] *= d[i];
    for (int64_t i = 0; activation.gated && i < n; ++i) by_up[i] *= d[i];
    rows.encode(by_gate, by_up, d_gate_up, d_up, row, begin, n);
  };
  run_phases({{T * strips, run}}, worth(threads, T * I * 16));
}

}  // namespace moefuse
