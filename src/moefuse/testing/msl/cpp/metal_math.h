// Math on scalars and, component by component, on vectors. Precise everywhere: torch compiles shaders without fast math.
#pragma once

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-07f
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define HALF_EPSILON half(0.0009765625f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define CHAR_BIT 8
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f

namespace metal {

// Halves are computed in float and rounded once. Metal has none of these for bfloat: shaders convert to float first.
#define MSL_UNARY(NAME, EXPRESSION)                                              \
  inline float NAME(float x) { return EXPRESSION; }                              \
  inline half NAME(half h) {                                                     \
    const float x = h;                                                           \
    return half(EXPRESSION);                                                     \
  }                                                                              \
  bfloat NAME(bfloat) = delete;                                                  \
  template <class T, uint N>                                                     \
  inline vec<T, N> NAME(vec<T, N> v) {                                           \
    for (uint i = 0; i < N; ++i) v.at[i] = NAME(v.at[i]);                        \
    return v;                                                                    \
  }
#define MSL_BINARY(NAME, EXPRESSION)                                             \
  inline float NAME(float x, float y) { return EXPRESSION; }                     \
  inline half NAME(half h, half k) {                                             \
    const float x = h, y = k;                                                    \
    return half(EXPRESSION);                                                     \
  }                                                                              \
  bfloat NAME(bfloat, bfloat) = delete;                                          \
  template <class T, uint N>                                                     \
  inline vec<T, N> NAME(vec<T, N> v, vec<T, N> w) {                              \
    for (uint i = 0; i < N; ++i) v.at[i] = NAME(v.at[i], w.at[i]);               \
    return v;                                                                    \
  }
// The functions that also stand in precise:: and fast::.
#define MSL_FLOAT_FUNCTIONS                                                      \
  MSL_UNARY(acos, __builtin_acosf(x))                                            \
  MSL_UNARY(acosh, __builtin_acoshf(x))                                          \
  MSL_UNARY(asin, __builtin_asinf(x))                                            \
  MSL_UNARY(asinh, __builtin_asinhf(x))                                          \
  MSL_UNARY(atan, __builtin_atanf(x))                                            \
  MSL_UNARY(atanh, __builtin_atanhf(x))                                          \
  MSL_UNARY(ceil, __builtin_ceilf(x))                                            \
  MSL_UNARY(cos, __builtin_cosf(x))                                              \
  MSL_UNARY(cosh, __builtin_coshf(x))                                            \
  MSL_UNARY(exp, __builtin_expf(x))                                              \
  MSL_UNARY(exp2, __builtin_exp2f(x))                                            \
  MSL_UNARY(exp10, __builtin_powf(10.0f, x))                                     \
  MSL_UNARY(fabs, __builtin_fabsf(x))                                            \
  MSL_UNARY(floor, __builtin_floorf(x))                                          \
  MSL_UNARY(fract, x - __builtin_floorf(x))                                      \
  MSL_UNARY(log, __builtin_logf(x))                                              \
  MSL_UNARY(log2, __builtin_log2f(x))                                            \
  MSL_UNARY(log10, __builtin_log10f(x))                                          \
  MSL_UNARY(rint, __builtin_rintf(x))                                            \
  MSL_UNARY(round, __builtin_roundf(x))                                          \
  MSL_UNARY(rsqrt, float(1.0 / __builtin_sqrt(double(x))))                       \
  MSL_UNARY(sin, __builtin_sinf(x))                                              \
  MSL_UNARY(sinh, __builtin_sinhf(x))                                            \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))                                            \
  MSL_UNARY(tan, __builtin_tanf(x))                                              \
  MSL_UNARY(tanh, __builtin_tanhf(x))                                            \
  MSL_UNARY(trunc, __builtin_truncf(x))                                          \
  MSL_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))           \
  MSL_BINARY(atan2, __builtin_atan2f(x, y))                                      \
  MSL_BINARY(divide, x / y)                                                      \
  MSL_BINARY(fmin, __builtin_fminf(x, y))                                        \
  MSL_BINARY(fmax, __builtin_fmaxf(x, y))                                        \
  MSL_BINARY(fmod, __builtin_fmodf(x, y))                                        \
  MSL_BINARY(pow, __builtin_powf(x, y))                                          \
  MSL_BINARY(powr, __builtin_powf(x, y))

MSL_FLOAT_FUNCTIONS
MSL_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
MSL_BINARY(copysign, __builtin_copysignf(x, y))
MSL_BINARY(fdim, __builtin_fdimf(x, y))
MSL_BINARY(step, y < x ? 0.0f : 1.0f)
namespace precise {
MSL_FLOAT_FUNCTIONS
}
namespace fast {
MSL_FLOAT_FUNCTIONS
}
#undef MSL_FLOAT_FUNCTIONS
#undef MSL_UNARY
#undef MSL_BINARY

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(float(double(a) * double(b) + double(c))); }
template <class T, uint N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (uint i = 0; i < N; ++i) a.at[i] = fma(a.at[i], b.at[i], c.at[i]);
  return a;
}
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }

// Both arguments have one type, as in Metal, where a mix is ambiguous. Of a NaN and a number the number is taken.
template <class T>
inline enable_if_t<is_scalar_v<T>, T> min(T a, T b) {
  if constexpr (is_floating_point_v<T>)
    return fmin(a, b);
  else
    return b < a ? b : a;
}
template <class T>
inline enable_if_t<is_scalar_v<T>, T> max(T a, T b) {
  if constexpr (is_floating_point_v<T>)
    return fmax(a, b);
  else
    return a < b ? b : a;
}
template <class T>
inline enable_if_t<is_scalar_v<T>, T> clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
inline enable_if_t<is_scalar_v<T>, T> abs(T x) {
  if constexpr (is_floating_point_v<T>)
    return fabs(x);
  else
    return x < T(0) ? T(-x) : x;
}
template <class T, uint N>
inline vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (uint i = 0; i < N; ++i) a.at[i] = min(a.at[i], b.at[i]);
  return a;
}
template <class T, uint N>
inline vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (uint i = 0; i < N; ++i) a.at[i] = max(a.at[i], b.at[i]);
  return a;
}
template <class T, uint N>
inline vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <class T, uint N>
inline vec<T, N> abs(vec<T, N> x) {
  for (uint i = 0; i < N; ++i) x.at[i] = abs(x.at[i]);
  return x;
}
template <class T>
inline T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <class T>
inline enable_if_t<is_scalar_v<T>, T> select(T no, T yes, bool which) {
  return which ? yes : no;
}
template <class T, uint N>
inline vec<T, N> select(vec<T, N> no, vec<T, N> yes, vec<bool, N> which) {
  for (uint i = 0; i < N; ++i) no.at[i] = which.at[i] ? yes.at[i] : no.at[i];
  return no;
}
template <class T, uint N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a.at[0] * b.at[0];
  for (uint i = 1; i < N; ++i) sum = sum + a.at[i] * b.at[i];
  return sum;
}
template <class T, uint N>
inline T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <uint N>
inline bool any(vec<bool, N> a) {
  bool found = false;
  for (uint i = 0; i < N; ++i) found |= a.at[i];
  return found;
}
template <uint N>
inline bool all(vec<bool, N> a) {
  bool every = true;
  for (uint i = 0; i < N; ++i) every &= a.at[i];
  return every;
}

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
inline bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
inline bool signbit(float x) { return msl::float_bits(x) >> 31; }
#define MSL_TEST(NAME)                                             \
  template <class T, uint N>                                       \
  inline vec<bool, N> NAME(vec<T, N> v) {                          \
    vec<bool, N> r;                                                \
    for (uint i = 0; i < N; ++i) r.at[i] = NAME(float(v.at[i]));   \
    return r;                                                      \
  }
MSL_TEST(isnan)
MSL_TEST(isinf)
MSL_TEST(isfinite)
MSL_TEST(signbit)
#undef MSL_TEST

template <class T>
inline enable_if_t<is_integral_v<T>, T> popcount(T x) {
  return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T)))));
}
template <class T>
inline enable_if_t<is_integral_v<T>, T> clz(T x) {
  const ulong bits = ulong(x) & (~0ul >> (64 - 8 * sizeof(T)));
  return T(bits ? __builtin_clzl(bits) - (64 - 8 * int(sizeof(T))) : 8 * int(sizeof(T)));
}
template <class T>
inline enable_if_t<is_integral_v<T>, T> ctz(T x) {
  return T(x ? __builtin_ctzl(ulong(x)) : 8 * int(sizeof(T)));
}
inline uint reverse_bits(uint x) {
  uint r = 0;
  for (uint i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline uint rotate(uint x, uint by) { return x << (by & 31) | x >> ((32 - by) & 31); }
inline uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }
inline int mulhi(int a, int b) { return int(long(a) * b >> 32); }
inline uint extract_bits(uint x, uint offset, uint bits) { return bits ? x >> offset & (~0u >> (32 - bits)) : 0; }
inline float4 unpack_unorm4x8_to_float(uint x) {
  return float4(x & 255, x >> 8 & 255, x >> 16 & 255, x >> 24) / 255.0f;
}

}  // namespace metal
