// The derivatives of each activation by gate and by up; see mathfn.h for how these loops are written.
#pragma once

#include "mathfn.h"

namespace moefuse::MOEFUSE_ISA {

struct Point {
  float value;       // act(x)
  float derivative;  // act'(x)
};

inline Point sigmoid_unit(float x, float alpha) {
  float s = sigmoid(alpha * x);
  return {x * s, s * madd(alpha * x, 1.0f - s, 1.0f)};
}

inline Point silu_point(float x) { return sigmoid_unit(at_least(x, -1000.0f), 1.0f); }

inline Point gelu_tanh_point(float x) {
  x = at_most(at_least(x, -1000.0f), 1000.0f);
  float s = sigmoid(1.5957691216f * madd(0.044715f * x, x * x, x));
  float inner = 1.5957691216f * madd(0.134145f * x, x, 1.0f);
  return {x * s, madd(x * s * (1.0f - s), inner, s)};
}

inline Point gelu_point(float x) {
  x = at_most(at_least(x, -1000.0f), 1000.0f);
  float cdf = 0.5f * __builtin_erfcf(-0.70710678f * x);
  return {x * cdf, madd(x, 0.39894228f * exponential(-0.5f * x * x), cdf)};
}

inline Point relu_point(float x) { return {relu(x), x > 0 ? 1.0f : 0.0f}; }

inline Point relu2_point(float x) { return {relu(x) * relu(x), 2 * relu(x)}; }

template <class F>
void map_derivatives(const float* gate, const float* up, float* __restrict by_gate, float* __restrict by_up, int64_t n,
                     F f) {
  if (up == nullptr) {
    for (int64_t i = 0; i < n; ++i) by_gate[i] = f(gate[i]).derivative;
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    Point at = f(gate[i]);
    by_gate[i] = at.derivative * up[i];
    by_up[i] = at.value;
  }
}

// gate and up of the clamped kinds; `offset` is what is added to up.
inline void clamped_derivatives(const Activation& act, float alpha, float offset, const float* gate, const float* up,
                                float* __restrict by_gate, float* __restrict by_up, int64_t n) {
  const float limit = act.limit;
  const float lowest = -1000.0f / alpha;
  for (int64_t i = 0; i < n; ++i) {
    Point at = sigmoid_unit(at_least(at_most(gate[i], limit), lowest), alpha);
    by_gate[i] = gate[i] > limit ? 0.0f : at.derivative;
    if (up == nullptr) continue;
    by_gate[i] *= at_least(at_most(up[i], limit), -limit) + offset;
    by_up[i] = up[i] > limit || up[i] < -limit ? 0.0f : at.value;
  }
}

inline void derivatives(const Activation& act, const float* gate, const float* up, float* by_gate, float* by_up,
                        int64_t n) {
  switch (act.kind) {
    case Act::silu:
      return map_derivatives(gate, up, by_gate, by_up, n, [](float x) { return silu_point(x); });
    case Act::gelu_tanh:
      return map_derivatives(gate, up, by_gate, by_up, n, [](float x) { return gelu_tanh_point(x); });
    case Act::gelu:
      return map_derivatives(gate, up, by_gate, by_up, n, [](float x) { return gelu_point(x); });
    case Act::relu:
      return map_derivatives(gate, up, by_gate, by_up, n, [](float x) { return relu_point(x); });
    case Act::relu2:
      return map_derivatives(gate, up, by_gate, by_up, n, [](float x) { return relu2_point(x); });
    case Act::swiglu_oai:
      return clamped_derivatives(act, act.alpha, 1.0f, gate, up, by_gate, by_up, n);
    case Act::swiglu_clamp:
      return clamped_derivatives(act, 1.0f, 0.0f, gate, up, by_gate, by_up, n);
  }
}

}  // namespace moefuse::MOEFUSE_ISA
