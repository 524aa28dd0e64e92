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
inline float not_a_number() { return as_type<float>(0x7fc00000u); }

// Unlike min and max, these let a NaN through.
inline float at_least(float x, float low) { return x < low ? low : x; }
inline float at_most(float x, float high) { return x > high ? high : x; }

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// A number far from the ends of float times 2**k, with one rounding.
inline float times_power(float x, int k) {
    int within = min(max(k, -250), 250);
    int half_of_it = within >> 1;
    return x * as_type<float>(uint(half_of_it + 127) << 23) * as_type<float>(uint(within - half_of_it + 127) << 23);
}

// p * 2**k, for numbers that float cannot hold or would hold with fewer digits.
struct Parts {
    float p;
    int k;
};

inline float number(Parts parts) { return times_power(parts.p, parts.k); }

// e**(x + low), p near 1; x is from -2000 to 2000, low a correction far smaller than 1. exp alone is off by many ulp
// for large arguments.
inline Parts exp_parts(float x, float low) {
    float n = is_nan(x) ? 0.0f : floor(x * 1.44269504f + 0.5f);
    float r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x)) + low;
    return Parts{exp(r), int(n)};
}

// What a * b lacks when it is rounded to p.
inline float product_rest(float a, float b, float p) { return fma(a, b, -p); }

// sigmoid(x + low), and one minus it.
struct SigmoidParts {
    Parts value;
    Parts other;
};

inline SigmoidParts sigmoid_parts(float x, float low) {
    bool below = x < 0.0f;
    Parts t = exp_parts(at_least(-fabs(x), -200.0f), below ? low : -low);
    Parts large = {1.0f / (1.0f + number(t)), 0};
    Parts small = {t.p * large.p, t.k};
    SigmoidParts found = {below ? small : large, below ? large : small};
    return found;
}

struct ValueAndSlope {
    float value;
    float slope;
};

// g * sigmoid(y + low) and its slope by g; bend is g times the slope of y.
inline ValueAndSlope sigmoid_unit(float g, float y, float low, float bend) {
    SigmoidParts s = sigmoid_parts(y, low);
    ValueAndSlope found = {times_power(g * s.value.p, s.value.k),
                           times_power(s.value.p * (1.0f + number(s.other) * bend), s.value.k)};
    return found;
}

// 0.5 (1 + tanh(u)) is sigmoid(2u), which loses nothing in the negative tail; 2u comes in two parts. Of its
// coefficients 2 sqrt(2 / pi) and 0.044715 times that, each is a float and a remainder.
inline ValueAndSlope gelu_tanh(float g) {
    float c = at_most(g, 1000.0f);
    float square = c * c;
    float scaled = 0.07135481387376785f * square;
    float total = 1.5957691669464111f + scaled;
    float back = total - 1.5957691669464111f;
    float lacking = (1.5957691669464111f - (total - back)) + (scaled - back);
    lacking += product_rest(0.07135481387376785f, square, scaled) + 0.07135481387376785f * product_rest(c, c, square);
    lacking += 2.39883e-09f * square - 4.53406803e-08f;
    float y = c * total;
    float low = product_rest(c, total, y) + c * lacking;
    return sigmoid_unit(g, y, low, 1.5957691216f * c * (1.0f + 0.134145f * square));
}

// The chance q of a normal number beyond a >= 0, over exp(-a*a/2) which is p * 2**k. MSL has no erfc; the fit in
// 1 / (1 + a/4) is within 3e-7.
inline float normal_tail(float a) {
    float t = 1.0f / (1.0f + 0.25f * a);
    float q = 0.0160714734f * t - 0.0602258529f;
    q = q * t + 0.0461199372f;
    q = q * t + 0.0350751543f;
    q = q * t + 0.00786620334f;
    q = q * t + 0.0888593596f;
    q = q * t + 0.0713885712f;
    q = q * t + 0.0956115754f;
    q = q * t + 0.0994855684f;
    q = q * t + 0.0997480127f;
    return q * t;
}

inline ValueAndSlope gelu(float g) {
    float a = at_most(fabs(g), 20.0f);
    float square = a * a;
    Parts density = exp_parts(-0.5f * square, -0.5f * product_rest(a, a, square));
    float q = normal_tail(a);
    float bent = times_power(density.p * (q - 0.3989422804f * a), density.k);
    ValueAndSlope found;
    if (g < 0.0f) {
        found.value = times_power(at_least(g, -1000.0f) * (q * density.p), density.k);
        found.slope = bent;
    } else {
        found.value = g * (1.0f - times_power(q * density.p, density.k));
        found.slope = 1.0f - bent;
    }
    return found;
}

// tanh, whose 1 - exp(-2|x|) would cancel for small x.
inline float stable_tanh(float x) {
    float a = fabs(x);
    float s = a * a;
    float small = number(exp_parts(at_least(-2.0f * a, -400.0f), 0.0f));
    float near = a * (1.0f - s * (1.0f / 3.0f - s * (2.0f / 15.0f - s * (17.0f / 315.0f - s * (62.0f / 2835.0f)))));
    float size = a < 0.25f ? near : (1.0f - small) / (1.0f + small);
    return x < 0.0f ? -size : size;
}

// Below this every smooth kind is zero; the clamp keeps -inf * 0 from becoming NaN.
constant float LOWEST = -1000.0f;

// act(g), before it is multiplied by up, and its derivative. A kind that is not here gives NaN.
inline ValueAndSlope value_and_slope(int kind, float g, float alpha, float limit) {
    ValueAndSlope found = {not_a_number(), not_a_number()};
    switch (kind) {
        case NO_ACTIVATION:
            found.value = g;
            found.slope = 1.0f;
            break;
        case SILU:
            g = at_least(g, LOWEST);
            found = sigmoid_unit(g, g, 0.0f, g);
            break;
        case GELU_TANH:
            found = gelu_tanh(at_least(g, LOWEST));
            break;
        case GELU:
            found = gelu(g);
            break;
        case RELU:
            found.value = at_least(g, 0.0f);
            found.slope = g > 0.0f ? 1.0f : 0.0f;
            break;
        case RELU2: {
            float r = at_least(g, 0.0f);
            found.value = r * r;
            found.slope = 2.0f * r;
            break;
        }
        case SWIGLU_OAI:
        case SWIGLU_CLAMP: {
            float a = kind == SWIGLU_OAI ? alpha : 1.0f;
            float c = at_least(at_most(g, limit), LOWEST / a);
            float y = a * c;
            found = sigmoid_unit(c, y, product_rest(a, c, y), y);
            if (g > limit) found.slope = 0.0f;
            break;
        }
    }
    return found;
}

// What the activated gate is multiplied by.
inline float activation_factor(int kind, float u, float limit) {
    if (kind == SWIGLU_OAI) return at_least(at_most(u, limit), -limit) + 1.0f;
    if (kind == SWIGLU_CLAMP) return at_least(at_most(u, limit), -limit);
    return u;
}

inline float activate(int kind, bool gated, float g, float u, float alpha, float limit) {
    if (!gated) return value_and_slope(kind, g, alpha, limit).value;
    if (kind == RELU2) {
        // r * (r * u), so that a large gate and a zero up give 0, not inf * 0.
        float r = at_least(g, 0.0f);
        return r * (r * u);
    }
    return value_and_slope(kind, g, alpha, limit).value * activation_factor(kind, u, limit);
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
