// f32 vectors for AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers; with VNNI byte vectors, too.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moefuse::MOEFUSE_ISA {

using Vec = __m512;
constexpr int kLanes = 16;

// A register tile is M rows by kTileColumns[M] weight rows: 24 sums, one activation, four weights, one mask.
constexpr int kTileRows = 6;
constexpr int kTileColumns[kTileRows + 1] = {0, 8, 6, 6, 5, 4, 4};

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// From here on some forms are zero-masked with a full mask: the plain ones make gcc 12 warn about its own header.

// The even and the odd elements of 32 bf16 values.
inline Vec load_bf16_even(const void* p) {
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_loadu_si512(p), 16));
}
inline Vec load_bf16_odd(const void* p) {
  __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask));
}

// The other way, of numbers that bf16 holds.
inline void store_bf16_pairs(void* p, Vec even, Vec odd) {
  __m512i high = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  __m512i low = _mm512_maskz_srli_epi32(0xffff, _mm512_castps_si512(even), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(low, high));
}

inline Vec load_f16(const void* p) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline void store_f16(void* p, Vec v) {
  __m256i half = _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(static_cast<__m256i*>(p), half);
}

// 64 bytes in e4m3, over 2**8: the even and the odd elements of the first 32, then those of the others. Not-a-number,
// where it comes out as 480, raises a byte of `most` to 0xfe.
using Most = __m512i;
inline bool has_nan(Most most) { return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(static_cast<char>(0xfe))) != 0; }

#ifdef __AVX512VBMI__
// Each code without its sign as a bf16 over 2**8, by bytes. Denormal numbers and not-a-number cost nothing more.
struct E4m3 {
  alignas(64) uint8_t high[128], low[128];
};
constexpr E4m3 all_e4m3() {
  E4m3 all{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> 3, mantissa = code & 7;
    // A denormal number's mantissa is moved up to where a leading one is left out.
    if (exponent == 0) {
      for (exponent = 1; mantissa > 0 && mantissa < 8; mantissa *= 2) --exponent;
    }
    // The exponent's bias goes from 7 to 127, less 8.
    int bits = code == 0 ? 0 : (exponent + 112) << 7 | (mantissa & 7) << 4;
    if (code == 127) bits = 0x7fc0;
    all.high[code] = static_cast<uint8_t>(bits >> 8);
    all.low[code] = static_cast<uint8_t>(bits & 0xff);
  }
  return all;
}
constexpr E4m3 kE4m3 = all_e4m3();

// 64 bytes in e4m3 as bf16 over 2**8: the first 32, then the others.
inline __attribute__((always_inline)) void load_e4m3_bf16(const void* p, __m512i (&out)[2]) {
  // In the order in which halves of 16 bytes are interleaved below.
  __m512i raw = _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(p));
  asm("" : "+v"(raw));  // or it would be loaded for each use
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.high), raw, _mm512_load_si512(kE4m3.high + 64));
  __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.low), raw, _mm512_load_si512(kE4m3.low + 64));
  high = _mm512_ternarylogic_epi32(high, raw, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // high | raw & sign
  out[0] = _mm512_maskz_unpacklo_epi8(~0ull, low, high);
  out[1] = _mm512_maskz_unpackhi_epi8(~0ull, low, high);
}
inline __attribute__((always_inline)) void load_e4m3(const void* p, Most&, Vec (&out)[4]) {
  __m512i pairs[2];
  load_e4m3_bf16(p, pairs);
  __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, pairs[i], 16));
    out[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(pairs[i], odd));
  }
}
#else
inline __attribute__((always_inline)) void load_any_e4m3(__m512i raw, Most& most, Vec (&out)[4]) {
  most = _mm512_max_epu8(most, _mm512_add_epi8(raw, raw));
  // As a float16: the sign on top, a zero bit, then exponent and mantissa.
  __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
  __m512i odd = _mm512_and_si512(_mm512_srai_epi16(raw, 1), mask);
  __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(raw, 8), 1), mask);
  out[0] = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xff, even, 0));
  out[1] = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xff, odd, 0));
  out[2] = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xff, even, 1));
  out[3] = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xff, odd, 1));
}
inline __attribute__((always_inline)) void load_e4m3(const void* p, Most& most, Vec (&out)[4]) {
  __m512i raw = _mm512_loadu_si512(p);
  asm("" : "+v"(raw));  // or it would be loaded for each use
  // Twice a byte, less 16: 238 or more is a denormal number, zero or none, of which weights have one in ten thousand.
  __m512i twice = _mm512_sub_epi8(_mm512_add_epi8(raw, raw), _mm512_set1_epi8(16));
  if (__builtin_expect(_mm512_cmpge_epu8_mask(twice, _mm512_set1_epi8(static_cast<char>(238))) != 0, false)) {
    return load_any_e4m3(raw, most, out);
  }
  // As a bf16: the sign on top, 112 in the exponent, whose low four bits are the byte's own, then its mantissa.
  __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0x87f0)), exponent = _mm512_set1_epi16(0x3800);
  __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  auto halves = static_cast<const __m256i*>(p);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(halves + i)), 4);
    wide = _mm512_ternarylogic_epi32(wide, mask, exponent, 0xea);  // wide & mask | exponent
    out[2 * i] = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, wide, 16));
    out[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(wide, high));
  }
}
#endif

#ifdef __AVX512BF16__
// acc + the 16 two-element products of 32 bf16 pairs.
inline Vec dot_bf16(const void* a, __m512i b, Vec acc) {
  auto x = reinterpret_cast<__m512bh>(_mm512_loadu_si512(a));
  return _mm512_dpbf16_ps(acc, x, reinterpret_cast<__m512bh>(b));
}
inline Vec dot_bf16(const void* a, const void* b, Vec acc) { return dot_bf16(a, _mm512_loadu_si512(b), acc); }
#endif

inline __m256 fold(Vec v) {
  return _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, v, 0), _mm512_maskz_extractf32x8_ps(0xff, v, 1));
}

// out[i] = sum of v[i]; the same order of additions whatever i.
inline void sum4(const Vec* v, float* out) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(fold(v[0]), fold(v[1])), _mm256_hadd_ps(fold(v[2]), fold(v[3])));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

// out[i] = sum of v[i] for i < 16, of which `count` are needed; the same order of additions whatever i. Half of the
// instructions of four times four.
constexpr int kSumsAtOnce = 16;
inline __attribute__((always_inline)) void add_lanes(const Vec (&v)[16], int count, float* out) {
  auto floats = [](__m512d x) { return _mm512_castpd_ps(x); };
  auto doubles = [](Vec x) { return _mm512_castps_pd(x); };
  // Of each 4 vectors their lanes of every 128 bits, then these.
  Vec quarter[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if (4 * i >= count) break;
    Vec pairs[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      Vec a = v[4 * i + 2 * j], b = v[4 * i + 2 * j + 1];
      pairs[j] = _mm512_maskz_unpacklo_ps(0xffff, a, b) + _mm512_maskz_unpackhi_ps(0xffff, a, b);
    }
    __m512d a = doubles(pairs[0]), b = doubles(pairs[1]);
    quarter[i] = floats(_mm512_maskz_unpacklo_pd(0xff, a, b)) + floats(_mm512_maskz_unpackhi_pd(0xff, a, b));
  }
  auto add_quarters = [](Vec a, Vec b) {
    return _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0x88) + _mm512_maskz_shuffle_f32x4(0xffff, a, b, 0xdd);
  };
  Vec low = add_quarters(quarter[0], quarter[count > 4 ? 1 : 0]);
  Vec high = count > 8 ? add_quarters(quarter[2], quarter[count > 12 ? 3 : 2]) : low;
  _mm512_storeu_ps(out, add_quarters(low, high));
}

#ifdef __AVX512VNNI__
// Four bytes in each lane, and the same bits as integers of other widths.
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

// Four bytes in every lane. The products could take them from memory, but one load for two products is faster: on Ice
// Lake a product takes 0.21 ns, one that repeats its operand 0.38.
inline Bytes repeat4(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return reinterpret_cast<Bytes>(Ints{} + x);
}

#define MOEFUSE_VNNI
constexpr bool kFourProducts = true;
// sum + the four products of bytes of each lane, w unsigned and x signed.
inline Ints add_products(Ints sum, Bytes w, Bytes x) {
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w),
                                                    reinterpret_cast<__m512i>(x)));
}

// The two shorts of each lane times those of `scale`, added up.
inline Ints widen_pairs(Shorts v, Shorts scale) {
  return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(scale)));
}

// The compiler would multiply everything first, spill it and add it up later; so it must not know what `v` is.
template <class V>
inline void keep(V& v) {
  asm("" : "+v"(v));
}

// Byte i of each lane in both halves of the lane.
inline Shorts byte_in_halves(Words v, int i) {
  const Words lanes = {0, 0x00040004, 0x00080008, 0x000c000c, 0, 0x00040004, 0x00080008, 0x000c000c,
                       0, 0x00040004, 0x00080008, 0x000c000c, 0, 0x00040004, 0x00080008, 0x000c000c};
  Words from = lanes | (0x80008000u | static_cast<uint32_t>(i << 16 | i));
  return reinterpret_cast<Shorts>(_mm512_shuffle_epi8(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(from)));
}
inline Shorts signed_byte_in_halves(Words v, int i) { return (byte_in_halves(v, i) << 8) >> 8; }

// out[j]: the 16 bytes at rows[j] + at, then those at rows[j + 4], rows[j + 8] and rows[j + 12] + at.
template <class V>
inline __attribute__((always_inline)) void load_slices(const char* const* rows, int64_t at, V* out) {
  auto slice = [&](int l) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[l] + at)); };
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512i v = _mm512_zextsi128_si512(slice(j));
    v = _mm512_maskz_inserti32x4(0xffff, v, slice(j + 4), 1);
    v = _mm512_maskz_inserti32x4(0xffff, v, slice(j + 8), 2);
    out[j] = reinterpret_cast<V>(_mm512_maskz_inserti32x4(0xffff, v, slice(j + 12), 3));
  }
}

// From slices to columns, and back.
inline __attribute__((always_inline)) void transpose4(Bytes* out) {
  __m512i v[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) v[j] = reinterpret_cast<__m512i>(out[j]);
  __m512i a = _mm512_maskz_unpacklo_epi32(0xffff, v[0], v[1]), b = _mm512_maskz_unpacklo_epi32(0xffff, v[2], v[3]);
  __m512i c = _mm512_maskz_unpackhi_epi32(0xffff, v[0], v[1]), d = _mm512_maskz_unpackhi_epi32(0xffff, v[2], v[3]);
  out[0] = reinterpret_cast<Bytes>(_mm512_maskz_unpacklo_epi64(0xff, a, b));
  out[1] = reinterpret_cast<Bytes>(_mm512_maskz_unpackhi_epi64(0xff, a, b));
  out[2] = reinterpret_cast<Bytes>(_mm512_maskz_unpacklo_epi64(0xff, c, d));
  out[3] = reinterpret_cast<Bytes>(_mm512_maskz_unpackhi_epi64(0xff, c, d));
}

// out[j]: bytes 4j to 4j + 3 of the 16 at rows[l] + at, in lane l.
inline __attribute__((always_inline)) void load_columns(const char* const* rows, int64_t at, Bytes* out) {
  load_slices(rows, at, out);
  transpose4(out);
}

// out[4s + j]: 0xff for each set bit among bits 16 s to 16 s + 15 of the 32 at rows[j] + at, then of rows[j + 4] etc.
inline void load_bits(const char* const* rows, int64_t at, Bytes* out) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    uint64_t mask = 0;
    for (int part = 0; part < 4; ++part) {
      uint16_t bits;
      __builtin_memcpy(&bits, rows[i % 4 + 4 * part] + at + i / 4 * 2, 2);
      mask |= static_cast<uint64_t>(bits) << (16 * part);
    }
    out[i] = reinterpret_cast<Bytes>(_mm512_movm_epi8(mask));
  }
}

// table[i] for each byte i below 16.
inline Bytes look_up(const uint8_t* table, Bytes i) {
  __m512i all = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<Bytes>(_mm512_shuffle_epi8(all, reinterpret_cast<__m512i>(i)));
}

// Row l of `load_slices`: its 16 bytes, signed or not, as numbers. v is out[l % 4].
template <bool Signed>
inline void widen_slice(Bytes v, int l, Vec* out) {
  uint8_t bytes[64];
  __builtin_memcpy(bytes, &v, 64);
  __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + l / 4 * 16));
  __m512i wide = Signed ? _mm512_maskz_cvtepi8_epi32(0xffff, row) : _mm512_maskz_cvtepu8_epi32(0xffff, row);
  out[0] = _mm512_maskz_cvtepi32_ps(0xffff, wide);
}

// The f16 at rows[l] + at in lane l.
inline Vec load_halves(const char* const* rows, int64_t at) {
  typedef int16_t Halves __attribute__((vector_size(16)));
  Halves v[2];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l) {
    int16_t half;
    __builtin_memcpy(&half, rows[l] + at, 2);
    v[l / 8][l % 8] = half;
  }
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_set_m128i(reinterpret_cast<__m128i>(v[1]), reinterpret_cast<__m128i>(v[0])));
}

// The f16 in the low half of each lane.
inline Vec from_f16(Words w) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(w)));
}
#endif

}  // namespace moefuse::MOEFUSE_ISA
