// glu: gate and up, together in one tensor or apart, to their activated product.
#include <algorithm>

#include "core.h"
#include "pool.h"
#include "products.h"

namespace moefuse {

void glu(Tensor gate, Tensor up, int64_t rows, int64_t I, const Activation& act, bool gated, bool interleaved,
         Output out, int threads) {
  constexpr int64_t kStrip = 512;
  const Kernels& k = kernels();
  int64_t strips = (I + kStrip - 1) / kStrip;
  bool together = gated && !up;

  auto run = [&](int64_t task, int64_t, int) {
    int64_t row = task / strips;
    int64_t begin = task % strips * kStrip;
    int64_t n = std::min(kStrip, I - begin);
    float both[2 * kStrip];
    float g[kStrip], u[kStrip], h[kStrip];
    const char* gates = row_of(gate, row, together ? 2 * I : I);
    int64_t bytes = size_of(gate.dtype);
    if (together && interleaved) {
      k.decode(gate.dtype, gates + 2 * begin * bytes, both, 2 * n);
      for (int64_t i = 0; i < n; ++i) {
        g[i] = both[2 * i];
        u[i] = both[2 * i + 1];
      }
    } else {
      k.decode(gate.dtype, gates + begin * bytes, g, n);
      if (together) k.decode(gate.dtype, gates + (I + begin) * bytes, u, n);
      if (up) k.decode(up.dtype, row_of(up, row, I) + begin * size_of(up.dtype), u, n);
    }
    k.activate(act, g, gated ? u : nullptr, h, n);
    k.encode(h, out.dtype, row_of(out, row, I) + begin * size_of(out.dtype), n);
  };
  run_phases({{rows * strips, run}}, worth(threads, rows * I * 8));
}

}  // namespace moefuse
