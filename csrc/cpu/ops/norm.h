// RMSNorm and its gradients, for the ops that have one.
#pragma once

#include "core.h"

namespace moefuse {

// rsqrt(mean(x^2) + eps).
float inverse_rms_of(const float* x, float eps, int64_t H);

// x * rsqrt(mean(x^2) + eps) * weight; out may be x.
void rms_norm(const float* x, Tensor weight, float eps, int64_t H, float* out);

// d [H] holds the gradient of the normed row and gets that of x.
void norm_backward(const float* x, const float* weight, float inverse_rms, int64_t H, float* d);

constexpr int64_t kNormStrip = 256;

// The gradient of the norm weight, columns [begin, begin + kNormStrip): sum over t in order of d_normed * x * rms^-1.
void sum_norm_weight(Tensor d_normed, Tensor x, const float* inverse_rms, int64_t T, int64_t H, int64_t begin,
                     Output out);

}  // namespace moefuse
