// f32 vectors for AVX2 with FMA and F16C: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moefuse::MOEFUSE_ISA {

using Vec = __m256;
constexpr int kLanes = 8;

// A register tile is M rows by kTileColumns[M] weight rows: 12 sums, three weights and one activation fill the
// registers. On a Zen 3 core, weights in L2, 4 x 3 ran at 0.7 (K=2048) to 0.9 (K=768) of the FMA peak.
constexpr int kTileRows = 4;
constexpr int kTileColumns[kTileRows + 1] = {0, 4, 4, 3, 3};

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

inline Vec load_f16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline void store_f16(void* p, Vec v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

// out[i] = sum of v[i]; the same order of additions whatever i.
inline void sum4(const Vec* v, float* out) {
  Vec s = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

}  // namespace moefuse::MOEFUSE_ISA
