// What every kernel shares: bit tests, exponentials, reductions over a threadgroup.
// launch.py puts sources together: macros first, then this file, then the op's.
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

// tanh, whose 1 - exp(-2|x|) would cancel for small x.
inline float stable_tanh(float x) {
    float a = fabs(x);
    float s = a * a;
    float small = number(exp_parts(at_least(-2.0f * a, -400.0f), 0.0f));
    float near = a * (1.0f - s * (1.0f / 3.0f - s * (2.0f / 15.0f - s * (17.0f / 315.0f - s * (62.0f / 2835.0f)))));
    float size = a < 0.25f ? near : (1.0f - small) / (1.0f + small);
    return x < 0.0f ? -size : size;
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
