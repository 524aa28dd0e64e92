// glu: gate and up, together in one tensor or apart, to their activated product.
#include "ops/glu.h"

#include <algorithm>

#include "runtime/pool.h"

namespace moefuse {

void glu(Tensor gate_up, Tensor up, const Activation& activation, Layout layout, Output out, int threads) {
  int64_t T = out.rows, I = out.columns;
  int64_t strips = parts_of(I, kGluStrip);
  GateUpRows rows(I, activation.gated, static_cast<bool>(up), layout);

  auto run = [&](int64_t task, int64_t, int) {
    int64_t row = task / strips;
    int64_t begin = task % strips * kGluStrip;
    int64_t n = std::min(kGluStrip, I - begin);
    float g[kGluStrip], u[kGluStrip], h[kGluStrip];
    rows.decode(gate_up, up, row, begin, n, g, u);
    kernels().activate(activation, g, activation.gated ? u : nullptr, h, n);
    kernels().encode(h, out.dtype, row_of(out, row, I) + begin * size_of(out.dtype), n);
  };
  run_phases({{T * strips, run}}, worth(threads, T * I * 8));
}

}  // namespace moefuse
