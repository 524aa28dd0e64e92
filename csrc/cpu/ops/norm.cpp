#include "ops/norm.h"

#include <algorithm>
#include <cmath>

#include "ops/rows.h"

namespace moefuse {

float inverse_rms_of(const float* x, float eps, int64_t H) {
  return 1 / std::sqrt(kernels().dot(x, x, H) / static_cast<float>(H) + eps);
}

void rms_norm(const float* x, Tensor weight, float eps, int64_t H, float* out) {
  constexpr int64_t kStrip = 256;
  const Kernels& k = kernels();
  float scale = inverse_rms_of(x, eps, H);
  for (int64_t i = 0; i < H; i += kStrip) {
    float w[kStrip];
    int64_t n = std::min(kStrip, H - i);
    k.decode(weight.dtype, static_cast<const char*>(weight.data) + i * size_of(weight.dtype), w, n);
    for (int64_t j = 0; j < n; ++j) out[i + j] = x[i + j] * scale * w[j];
  }
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

}  // namespace moefuse
