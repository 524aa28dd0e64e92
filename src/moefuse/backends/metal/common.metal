// What every kernel shares: bit tests, reductions over a threadgroup, activations and their slopes.
// Sources are put together by launch.py: macros first (element types), then this file, then the op's.
// Conservative on purpose: MSL 3.0, no C++ library, 64-bit offsets wherever rows or experts are multiplied.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

// NaN and infinity are told by their bits: a build with fast math may assume that neither occurs.
inline bool is_nan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }
inline bool is_positive_infinity(float x) { return as_type<uint>(x) == 0x7f800000u; }
inline bool is_negative_infinity(float x) { return as_type<uint>(x) == 0xff800000u; }
inline float negative_infinity() { return as_type<float>(0xff800000u); }

// Unlike min and max, these let a NaN through.
inline float at_least(float x, float low) { return x < low ? low : x; }
inline float at_most(float x, float high) { return x > high ? high : x; }

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// Through exp(-2|x|), which neither overflows nor cancels for large |x|.
inline float stable_tanh(float x) {
    float small = exp(-2.0f * fabs(x));
    float size = (1.0f - small) / (1.0f + small);
    return x < 0.0f ? -size : size;
}

// MSL has no erfc. Two fits, each within 2e-7 of the value: erf(z) / z in z*z up to 1, erfc(z) * exp(z*z) beyond.
inline float complementary_error(float x) {
    float z = fabs(x);
    if (z < 1.0f) {
        float s = z * z;
        float p = 7.882497448e-05f;
        p = p * s - 8.018855006e-04f;
        p = p * s + 5.189312156e-03f;
        p = p * s - 2.685432881e-02f;
        p = p * s + 1.128359735e-01f;
        p = p * s - 3.761262596e-01f;
        p = p * s + 1.128379107f;
        return 1.0f - x * p;
    }
    float t = 2.0f / (2.0f + z);
    float p = 9.318373352e-02f;
    p = p * t - 2.254232764e-01f;
    p = p * t + 8.152657747e-02f;
    p = p * t + 6.154584512e-02f;
    p = p * t + 1.786055416e-01f;
    p = p * t + 2.469942868e-01f;
    p = p * t + 2.820370495e-01f;
    p = p * t + 2.820984721e-01f;
    float tail = p * t * exp(-z * z);
    return x < 0.0f ? 2.0f - tail : tail;
}

// The kinds, in the order of moefuse.types.ACTIVATION_KINDS.
enum Kind { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU2 = 4, SWIGLU_OAI = 5, SWIGLU_CLAMP = 6, NO_ACTIVATION = 7 };

constant float SQRT_2_OVER_PI = 0.7978845608028654f;
// Below this every smooth kind is zero; the clamp keeps -inf * 0 from becoming NaN.
constant float LOWEST = -1000.0f;

inline float gelu_tanh_argument(float g) { return SQRT_2_OVER_PI * (g + 0.044715f * g * g * g); }

// act(g), before it is multiplied by up.
inline float activation_value(int kind, float g, float alpha, float limit) {
    switch (kind) {
        case SILU:
            g = at_least(g, LOWEST);
            return g * sigmoid(g);
        case GELU_TANH:
            // 0.5 (1 + tanh(a)) is sigmoid(2a), which loses nothing in the negative tail.
            g = at_least(g, LOWEST);
            return g * sigmoid(2.0f * gelu_tanh_argument(g));
        case GELU:
            g = at_least(g, LOWEST);
            return 0.5f * g * complementary_error(-0.70710678f * g);
        case RELU:
            return at_least(g, 0.0f);
        case RELU2: {
            float r = at_least(g, 0.0f);
            return r * r;
        }
        case SWIGLU_OAI:
        case SWIGLU_CLAMP: {
            float a = kind == SWIGLU_OAI ? alpha : 1.0f;
            g = at_least(at_most(g, limit), LOWEST / a);
            return g * sigmoid(a * g);
        }
        default:
            return g;
    }
}

// What the activated gate is multiplied by.
inline float activation_factor(int kind, float u, float limit) {
    if (kind == SWIGLU_OAI) return at_least(at_most(u, limit), -limit) + 1.0f;
    if (kind == SWIGLU_CLAMP) return at_least(at_most(u, limit), -limit);
    return u;
}

inline float activate(int kind, bool gated, float g, float u, float alpha, float limit) {
    if (!gated) return activation_value(kind, g, alpha, limit);
    if (kind == RELU2) {
        // r * (r * u), so that a large gate and a zero up give 0, not inf * 0.
        float r = at_least(g, 0.0f);
        return r * (r * u);
    }
    return activation_value(kind, g, alpha, limit) * activation_factor(kind, u, limit);
}

inline float activation_slope(int kind, float g, float alpha, float limit) {
    switch (kind) {
        case SILU: {
            g = at_least(g, LOWEST);
            float s = sigmoid(g);
            return s * (1.0f + g * (1.0f - s));
        }
        case GELU_TANH: {
            g = at_most(at_least(g, LOWEST), -LOWEST);
            float t = stable_tanh(gelu_tanh_argument(g));
            return 0.5f * (1.0f + t) + 0.5f * g * (1.0f - t * t) * SQRT_2_OVER_PI * (1.0f + 0.134145f * g * g);
        }
        case GELU: {
            g = at_most(at_least(g, LOWEST), -LOWEST);
            return 0.5f * complementary_error(-0.70710678f * g) + g * exp(-0.5f * g * g) * 0.3989422804f;
        }
        case RELU:
            return g > 0.0f ? 1.0f : 0.0f;
        case RELU2:
            return 2.0f * at_least(g, 0.0f);
        case SWIGLU_OAI:
        case SWIGLU_CLAMP: {
            if (g > limit) return 0.0f;
            float a = kind == SWIGLU_OAI ? alpha : 1.0f;
            g = at_least(g, LOWEST / a);
            float s = sigmoid(a * g);
            return s * (1.0f + a * g * (1.0f - s));
        }
        default:
            return 1.0f;
    }
}

// The sum of value over a threadgroup of whole simdgroups, the same in every thread; scratch has one float for each
// simdgroup. Ends with a barrier, so that scratch may be used again at once.
inline float threadgroup_sum(float value, threadgroup float* scratch, uint lane, uint sg, uint simdgroups) {
    float part = simd_sum(value);
    if (lane == 0) scratch[sg] = part;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (uint i = 0; i < simdgroups; ++i) total += scratch[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return total;
}

// Four neighbours as float; ALIGNED says that their address is a multiple of the vector's size.
template <typename T, bool ALIGNED>
inline float4 load4(device const T* p) {
    if (ALIGNED) return float4(*(device const vec<T, 4>*)(p));
    return float4(float(p[0]), float(p[1]), float(p[2]), float(p[3]));
}

inline float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// This lane's share of a dot product of K elements that lie together: four at a time, then what is left.
template <typename A, typename B, bool ALIGNED>
inline float dot_share(device const A* a, device const B* b, long K, uint lane) {
    float4 sum = float4(0.0f);
    long whole = K / 4 * 4;
    for (long k = 4 * long(lane); k < whole; k += 128) sum += load4<A, ALIGNED>(a + k) * load4<B, ALIGNED>(b + k);
    float total = sum4(sum);
    long k = whole + long(lane);
    if (k < K) total += float(a[k]) * float(b[k]);
    return total;
}
