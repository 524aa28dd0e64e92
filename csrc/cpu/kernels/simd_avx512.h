// f32 vectors for AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers.
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

inline Vec load_f16(const void* p) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline void store_f16(void* p, Vec v) {
  __m256i half = _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(static_cast<__m256i*>(p), half);
}

// 64 bytes in e4m3, over 2**8: the even and the odd elements of the first 32, then those of the others. Not-a-number,
// which comes out as 480, raises a byte of `most` to 0xfe.
using Most = __m512i;
inline void load_e4m3(const void* p, Most& most, Vec (&out)[4]) {
  __m512i raw = _mm512_loadu_si512(p);
  asm("" : "+v"(raw));  // or it would be loaded for each use
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
inline bool has_nan(Most most) { return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(static_cast<char>(0xfe))) != 0; }

#ifdef __AVX512BF16__
// acc + the 16 two-element products of 32 bf16 pairs.
inline Vec dot_bf16(const void* a, const void* b, Vec acc) {
  auto x = reinterpret_cast<__m512bh>(_mm512_loadu_si512(a));
  auto y = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
  return _mm512_dpbf16_ps(acc, x, y);
}
#endif

inline __m256 fold(Vec v) {
  return _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, v, 0), _mm512_maskz_extractf32x8_ps(0xff, v, 1));
}

// out[i] = sum of v[i]; the same order of additions whatever i.
inline void sum4(const Vec* v, float* out) {
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(fold(v[0]), fold(v[1])), _mm256_hadd_ps(fold(v[2]), fold(v[3])));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

}  // namespace moefuse::MOEFUSE_ISA
