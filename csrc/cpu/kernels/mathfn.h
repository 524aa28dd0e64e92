// Scalar functions written without branches, for loops that the compiler vectorises.
//
// The build sets -ffp-contract=off and `madd` asks for the fused form where it is native, so the vector body and
// the scalar tail of a loop give the same bits: equal inputs stay equal wherever they stand in a row.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace moefuse::MOEFUSE_ISA {

inline float madd(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

inline float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

// Comparisons are written so that a NaN comes through.
inline float at_least(float x, float low) { return x < low ? low : x; }
inline float at_most(float x, float high) { return x > high ? high : x; }

// e**x to about one ulp; 0 below -104, infinity from 88.73 on, NaN from NaN.
inline float exponential(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  x = at_most(at_least(x, -104.0f), 89.0f);
  float shifted = madd(x, 1.44269504f, kRound);
  float n = shifted - kRound;
  float r = madd(n, -0.693359375f, x);
  r = madd(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040;
  p = madd(p, r, 1.0f / 720);
  p = madd(p, r, 1.0f / 120);
  p = madd(p, r, 1.0f / 24);
  p = madd(p, r, 1.0f / 6);
  p = madd(p, r, 0.5f);
  p = madd(p, r * r, r) + 1.0f;
  // Two factors, since 2**n alone would leave the exponent range at both ends.
  uint32_t whole = bits_of(shifted) - bits_of(kRound);
  uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(whole) >> 1);
  return p * from_bits((half + 127) << 23) * from_bits((whole - half + 127) << 23);
}

// v * sigmoid(x), by the exponential that cannot overflow: right down to where the result itself underflows.
inline float times_sigmoid(float v, float x) {
  float e = exponential(-__builtin_fabsf(x));
  return (x < 0 ? v * e : v) / (1.0f + e);
}

inline float sigmoid(float x) { return times_sigmoid(1.0f, x); }

// The clamp turns -inf into -0 and not into NaN.
inline float silu(float x) {
  x = at_least(x, -1000.0f);
  return times_sigmoid(x, x);
}

// 0.5 x (1 + tanh u) is x * sigmoid(2u), which loses nothing in the negative tail.
inline float gelu_tanh(float x) {
  x = at_least(x, -1000.0f);
  return times_sigmoid(x, 1.5957691216f * madd(0.044715f * x, x * x, x));
}

inline float gelu(float x) {
  x = at_least(x, -1000.0f);
  return 0.5f * x * __builtin_erfcf(-0.70710678f * x);
}

inline float relu(float x) { return at_least(x, 0.0f); }

// softplus is e**x where 1 + e**x rounds to 1; its root is taken in the exponent, before it underflows.
inline float sqrt_softplus(float x) {
  float e = exponential(-__builtin_fabsf(x));
  float root = __builtin_sqrtf(at_least(x, 0.0f) + __builtin_log1pf(e));
  return x < -20.0f ? exponential(0.5f * x) : root;
}

template <class F>
void map(const float* gate, const float* up, float* __restrict out, int64_t n, F f) {
  if (up == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] = f(gate[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = f(gate[i]) * up[i];
  }
}

inline void activate(const Activation& act, const float* gate, const float* up, float* __restrict out, int64_t n) {
  const float alpha = act.alpha;
  const float limit = act.limit;
  switch (act.kind) {
    case Act::silu:
      return map(gate, up, out, n, [](float x) { return silu(x); });
    case Act::gelu_tanh:
      return map(gate, up, out, n, [](float x) { return gelu_tanh(x); });
    case Act::gelu:
      return map(gate, up, out, n, [](float x) { return gelu(x); });
    case Act::relu:
      return map(gate, up, out, n, [](float x) { return relu(x); });
    case Act::relu2:
      if (up == nullptr) return map(gate, up, out, n, [](float x) { return relu(x) * relu(x); });
      for (int64_t i = 0; i < n; ++i) out[i] = relu(gate[i]) * (relu(gate[i]) * up[i]);
      return;
    case Act::swiglu_oai: {
      const float lowest = -1000.0f / alpha;
      auto f = [=](float x) {
        float g = at_least(at_most(x, limit), lowest);
        return times_sigmoid(g, alpha * g);
      };
      if (up == nullptr) return map(gate, up, out, n, f);
      for (int64_t i = 0; i < n; ++i) out[i] = f(gate[i]) * (at_least(at_most(up[i], limit), -limit) + 1.0f);
      return;
    }
    case Act::swiglu_clamp: {
      auto f = [=](float x) { return silu(at_most(x, limit)); };
      if (up == nullptr) return map(gate, up, out, n, f);
      for (int64_t i = 0; i < n; ++i) out[i] = f(gate[i]) * at_least(at_most(up[i], limit), -limit);
      return;
    }
  }
}

inline void scores(Score score, const float* logits, float* __restrict out, int64_t n) {
  switch (score) {
    case Score::softmax: {
      float top = logits[0];
      for (int64_t i = 1; i < n; ++i) top = at_least(top, logits[i]);
      // A row masked whole has no finite maximum; any finite shift gives it zeros.
      top = at_least(top, -0x1.fffffep127f);
      for (int64_t i = 0; i < n; ++i) out[i] = exponential(logits[i] - top);
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += out[i];
      float scale = static_cast<float>(1 / sum);
      for (int64_t i = 0; i < n; ++i) out[i] *= scale;
      return;
    }
    case Score::sigmoid:
      for (int64_t i = 0; i < n; ++i) out[i] = sigmoid(logits[i]);
      return;
    case Score::sqrtsoftplus:
      for (int64_t i = 0; i < n; ++i) out[i] = sqrt_softplus(logits[i]);
      return;
  }
}

}  // namespace moefuse::MOEFUSE_ISA
