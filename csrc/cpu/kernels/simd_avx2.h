// f32 and byte vectors for AVX2 with FMA and F16C, or AVX-VNNI besides: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moefuse::MOEFUSE_ISA {

using Vec = __m256;
constexpr int kLanes = 8;

// A register tile is M rows by kTileColumns[M] weight rows: 12 sums, three weights and one activation fill the
// registers. On a Zen 3 core, weights in L2, 4 x 3 ran at 0.7 (K=2048) to 0.9 (K=768) of the FMA peak. For one and two
// rows they are the streams in which weights are read: eight read bf16 1.1 times as fast as four on an Ice Lake core.
constexpr int kTileRows = 4;
constexpr int kTileColumns[kTileRows + 1] = {0, 8, 6, 3, 3};

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// The even and the odd elements of 16 bf16 values.
inline Vec load_bf16_even(const void* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)), 16));
}
inline Vec load_bf16_odd(const void* p) {
  __m256i raw = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// The other way, of numbers that bf16 holds.
inline void store_bf16_pairs(void* p, Vec even, Vec odd) {
  __m256i high = _mm256_and_si256(_mm256_castps_si256(odd), _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_or_si256(low, high));
}

inline Vec load_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline void store_f16(void* p, Vec v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

// 32 bytes in e4m3, over 2**8: the even and the odd elements of the first 16, then those of the others. Not-a-number,
// which comes out as 480, raises a byte of `most` to 0xfe.
using Most = __m256i;
inline void load_e4m3(const void* p, Most& most, Vec (&out)[4]) {
  __m256i raw = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  asm("" : "+x"(raw));  // or it would be loaded for each use
  most = _mm256_max_epu8(most, _mm256_add_epi8(raw, raw));
  // As a float16: the sign on top, a zero bit, then exponent and mantissa.
  __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  __m256i odd = _mm256_and_si256(_mm256_srai_epi16(raw, 1), mask);
  __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(raw, 8), 1), mask);
  // Through memory, because the conversion of a register takes a shuffle more.
  alignas(32) uint16_t halves[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(halves), even);
  _mm256_store_si256(reinterpret_cast<__m256i*>(halves + 16), odd);
  asm("" : "+m"(halves));
  out[0] = load_f16(halves);
  out[1] = load_f16(halves + 16);
  out[2] = load_f16(halves + 8);
  out[3] = load_f16(halves + 24);
}
inline bool has_nan(Most most) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(static_cast<char>(0xfe)))) != 0;
}

// out[i] = sum of v[i]; the same order of additions whatever i.
inline void sum4(const Vec* v, float* out) {
  Vec s = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
// The sums that a tile makes at once.
constexpr int kSumsAtOnce = 4;
inline void add_lanes(const Vec (&v)[4], int, float* out) { sum4(v, out); }

// Four bytes in each lane, and the same bits as integers of other widths.
typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

// Shorts may wrap around on the way to a sum that fits.
inline Shorts add(Shorts a, Shorts b) {
  typedef uint16_t Wrapping __attribute__((vector_size(32)));
  return reinterpret_cast<Shorts>(reinterpret_cast<Wrapping>(a) + reinterpret_cast<Wrapping>(b));
}
inline Ints add(Ints a, Ints b) { return a + b; }

// Up to how many rows of activations weights are better multiplied as they lie than transposed first, for groups of 32
// and of 16. On an Ice Lake core at 4 rows: Q8_0 1.22 times as fast, Q4_0 1.13, Q4_K the same, Q6_K 0.85.
constexpr int kMostSliceRows = 4;
constexpr int kMostSliceRows16 = 2;

inline Bytes repeat4(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return reinterpret_cast<Bytes>(_mm256_set1_epi32(x));
}

// w[2i] * x[2i] + w[2i + 1] * x[2i + 1] with x signed bytes; |w| <= 128 and |x| <= 127 when w is signed too.
template <bool Signed>
inline Shorts pair_sums(Bytes w, Bytes x) {
  auto weights = reinterpret_cast<__m256i>(w), inputs = reinterpret_cast<__m256i>(x);
  if constexpr (Signed) {
    inputs = _mm256_sign_epi8(inputs, weights);
    weights = _mm256_abs_epi8(weights);
  }
  return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(weights, inputs));
}

#ifdef __AVXVNNI__
#define MOEFUSE_VNNI
constexpr bool kFourProducts = true;
// sum + the four products of bytes of each lane, w unsigned and x signed.
inline Ints add_products(Ints sum, Bytes w, Bytes x) {
  return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(
      reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(w), reinterpret_cast<__m256i>(x)));
}
#else
constexpr bool kFourProducts = false;
#endif

// The compiler would multiply everything first, spill it and add it up later; so it must not know what `v` is.
template <class V>
inline void keep(V& v) {
  asm("" : "+x"(v));
}

// The two shorts of each lane times those of `scale`, added up.
inline Ints widen_pairs(Shorts v, Shorts scale) {
  return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(v), reinterpret_cast<__m256i>(scale)));
}
inline Ints widen_pairs(Shorts v) { return widen_pairs(v, Shorts{} + 1); }

// Byte i of each lane in both halves of the lane.
inline Shorts byte_in_halves(Words v, int i) {
  __m256i lanes = _mm256_setr_epi32(0, 0x00040004, 0x00080008, 0x000c000c, 0, 0x00040004, 0x00080008, 0x000c000c);
  __m256i from = _mm256_or_si256(lanes, _mm256_set1_epi32(static_cast<int>(0x80008000u) | i << 16 | i));
  return reinterpret_cast<Shorts>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(v), from));
}
inline Shorts signed_byte_in_halves(Words v, int i) {
  // The byte goes to the top of each half, and is shifted down with its sign.
  __m256i lanes = _mm256_setr_epi32(0, 0x04000400, 0x08000800, 0x0c000c00, 0, 0x04000400, 0x08000800, 0x0c000c00);
  __m256i from = _mm256_or_si256(lanes, _mm256_set1_epi32(0x00800080 | i << 24 | i << 8));
  return reinterpret_cast<Shorts>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(v), from)) >> 8;
}

// out[j]: the 16 bytes at rows[j] + at and the 16 at rows[j + 4] + at.
template <class V>
inline void load_slices(const char* const* rows, int64_t at, V* out) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[j] + at));
    __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[j + 4] + at));
    out[j] = reinterpret_cast<V>(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
  }
}

// From slices to columns, and back.
inline void transpose4(Bytes* out) {
  __m256i v[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) v[j] = reinterpret_cast<__m256i>(out[j]);
  __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
  __m256i c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
  out[0] = reinterpret_cast<Bytes>(_mm256_unpacklo_epi64(a, b));
  out[1] = reinterpret_cast<Bytes>(_mm256_unpackhi_epi64(a, b));
  out[2] = reinterpret_cast<Bytes>(_mm256_unpacklo_epi64(c, d));
  out[3] = reinterpret_cast<Bytes>(_mm256_unpackhi_epi64(c, d));
}

// out[j]: bytes 4j to 4j + 3 of the 16 at rows[l] + at, in lane l.
inline void load_columns(const char* const* rows, int64_t at, Bytes* out) {
  load_slices(rows, at, out);
  transpose4(out);
}

// out[4s + j]: 0xff for each set bit among bits 16 s to 16 s + 15 of the 32 at rows[j] + at, then at rows[j + 4] + at.
inline void load_bits(const char* const* rows, int64_t at, Bytes* out) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    int32_t low, high;
    __builtin_memcpy(&low, rows[i % 4] + at, 4);
    __builtin_memcpy(&high, rows[i % 4 + 4] + at, 4);
    __m256i both = _mm256_set_m128i(_mm_set1_epi32(high), _mm_set1_epi32(low));
    __m256i byte = _mm256_set1_epi64x(i < 4 ? 0 : 0x0202020202020202);
    byte = _mm256_add_epi8(byte, _mm256_setr_epi64x(0, 0x0101010101010101, 0, 0x0101010101010101));
    __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    both = _mm256_and_si256(_mm256_shuffle_epi8(both, byte), bit);
    out[i] = reinterpret_cast<Bytes>(_mm256_cmpeq_epi8(both, bit));
  }
}

// 16 bytes behind each other as often as a vector holds them.
inline Bytes repeat16(const char* p) {
  return reinterpret_cast<Bytes>(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Of vectors that hold 16 bytes per row: those of a, then of b, each half as long, its halves added.
template <class V>
inline V fold_longs(V a, V b) {
  auto x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
  return add(reinterpret_cast<V>(_mm256_unpacklo_epi64(x, y)), reinterpret_cast<V>(_mm256_unpackhi_epi64(x, y)));
}
// The same for 8 bytes: a lane per row.
template <class V>
inline V fold_words(V a, V b) {
  auto x = reinterpret_cast<__m256>(a), y = reinterpret_cast<__m256>(b);
  return add(reinterpret_cast<V>(_mm256_shuffle_ps(x, y, 0x88)), reinterpret_cast<V>(_mm256_shuffle_ps(x, y, 0xdd)));
}

// table[i] for each byte i below 16.
inline Bytes look_up(const uint8_t* table, Bytes i) {
  __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(both, reinterpret_cast<__m256i>(i)));
}

// Row l of `load_slices`: its 16 bytes, signed or not, as numbers. v is out[l % 4].
template <bool Signed>
inline void widen_slice(Bytes v, int l, Vec* out) {
  auto both = reinterpret_cast<__m256i>(v);
  __m128i row = l < 4 ? _mm256_castsi256_si128(both) : _mm256_extracti128_si256(both, 1);
  __m128i rest = _mm_srli_si128(row, 8);
  out[0] = _mm256_cvtepi32_ps(Signed ? _mm256_cvtepi8_epi32(row) : _mm256_cvtepu8_epi32(row));
  out[1] = _mm256_cvtepi32_ps(Signed ? _mm256_cvtepi8_epi32(rest) : _mm256_cvtepu8_epi32(rest));
}

// The f16 at rows[l] + at in lane l.
inline Vec load_halves(const char* const* rows, int64_t at) {
  typedef int16_t Halves __attribute__((vector_size(16)));
  Halves v;
#pragma GCC unroll 8
  for (int l = 0; l < kLanes; ++l) {
    int16_t half;
    __builtin_memcpy(&half, rows[l] + at, 2);
    v[l] = half;
  }
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(v));
}

// The f16 in the low half of each lane.
inline Vec from_f16(Words w) {
  __m256i low = _mm256_and_si256(reinterpret_cast<__m256i>(w), _mm256_set1_epi32(0xffff));
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

}  // namespace moefuse::MOEFUSE_ISA
