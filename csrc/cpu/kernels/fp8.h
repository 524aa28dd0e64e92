// Weights in FP8: blocks of a float scale and 128 numbers in e4m3. They are no integers, so activations stay f32.
//
// A sum runs over a block without its scale, which is multiplied in after that. Few rows of activations: blocks are
// decoded in registers. More than a tile has: once into L1, for all of them, with the same sums in the same order.
#pragma once

#include <cstring>

#include "dots.h"

namespace moefuse::MOEFUSE_ISA {

constexpr int64_t kFp8Block = 128;
constexpr int64_t kFp8Bytes = 132;
constexpr int64_t kFp8Vecs = kFp8Block / kLanes;
// What `load_e4m3` leaves out of its numbers, and sums with it.
constexpr float kFp8Unit = 256;

struct Fp8Weights {
  static constexpr int64_t kActBytes = 4;
  static constexpr float kUnit = kFp8Unit;
  static constexpr int64_t kStep = kFp8Block;
  static constexpr int64_t kStepBytes = kFp8Bytes;
};

// A block as `load_e4m3` gives it, and its scale, which is not a number where one of the 128 is none.
struct Fp8Decoded {
  static constexpr int64_t kActBytes = 4;
  static constexpr float kUnit = kFp8Unit;
  static constexpr int64_t kStep = kFp8Block;
  static constexpr int64_t kStepBytes = 64 + kFp8Block * 4;
};

// Sums, the four weights that are decoded together, a mask and a few more fill the registers. Four rows were 10% to 20%
// faster than eight on an Ice Lake.
template <int M>
constexpr int kColumns<Fp8Weights, M> = M <= 2 || kLanes == 16 ? 4 : 2;

inline float fp8_scale(const char* block, bool nan) {
  float scale;
  std::memcpy(&scale, block, sizeof scale);
  return nan ? __builtin_nanf("") : scale;
}

template <>
struct Multiply<Fp8Weights> {
  template <int M, int N>
  static inline __attribute__((always_inline)) void step(const char* const (&a)[M], int64_t a_at,
                                                         const char* (&w)[N], int64_t w_at, Vec (&acc)[M][N]) {
    Vec sums[M][N];
    Most most{};
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = zero();
    }
#pragma GCC unroll 1
    for (int v = 0; v < kFp8Vecs; v += 4) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        Vec weights[4];
        load_e4m3(w[n] + w_at + 4 + v * kLanes, most, weights);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          auto x = reinterpret_cast<const float*>(a[m] + a_at) + v * kLanes;
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sums[m][n] = fma(load(x + i * kLanes), weights[i], sums[m][n]);
        }
      }
    }
    bool nans[N] = {};
    if (__builtin_expect(has_nan(most), false)) {
      for (int n = 0; n < N; ++n) nans[n] = any_nan(w[n] + w_at + 4);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      Vec scale = splat(fp8_scale(w[n] + w_at, nans[n]));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][n] = fma(sums[m][n], scale, acc[m][n]);
    }
  }

  static __attribute__((noinline)) bool any_nan(const char* q) {
    Most most{};
    for (int64_t i = 0; i < kFp8Block; i += 4 * kLanes) {
      Vec numbers[4];
      load_e4m3(q + i, most, numbers);
    }
    return has_nan(most);
  }
};

template <>
struct Multiply<Fp8Decoded> {
  template <int M, int N>
  static inline __attribute__((always_inline)) void step(const char* const (&a)[M], int64_t a_at,
                                                         const char* (&w)[N], int64_t w_at, Vec (&acc)[M][N]) {
    Vec sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = zero();
    }
#pragma GCC unroll 2
    for (int v = 0; v < kFp8Vecs; ++v) {
      Vec weights[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) weights[n] = load(reinterpret_cast<const float*>(w[n] + w_at + 64) + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        Vec x = load(reinterpret_cast<const float*>(a[m] + a_at) + v * kLanes);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[m][n] = fma(x, weights[n], sums[m][n]);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      Vec scale = splat(fp8_scale(w[n] + w_at, false));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][n] = fma(sums[m][n], scale, acc[m][n]);
    }
  }
};

inline void decode_fp8_block(const char* block, char* out) {
  Most most{};
  auto to = reinterpret_cast<float*>(out + 64);
  for (int64_t v = 0; v < kFp8Vecs; v += 4) {
    Vec numbers[4];
    load_e4m3(block + 4 + v * kLanes, most, numbers);
    for (int i = 0; i < 4; ++i) store(to + (v + i) * kLanes, numbers[i]);
  }
  float scale = fp8_scale(block, has_nan(most));
  std::memcpy(out, &scale, sizeof scale);
}

// More rows than one tile has: weights are decoded once for all of them, kWide rows and kDepth of K at a time.
void many_fp8_dots(const Dots& d) {
  constexpr int64_t kWide = kTileColumns[kTileRows], kBlocks = kDepth / kFp8Block;
  alignas(64) char rows[kWide][kBlocks * Fp8Decoded::kStepBytes];
  alignas(64) float z[kMaxRows * kWide];
  const char *a[kMaxRows], *w[kWide];
  for (int64_t n = 0; n < kWide; ++n) w[n] = rows[n];
  int64_t row_tiles = (d.M + kTileRows - 1) / kTileRows;
  for (int64_t n0 = 0; n0 < d.N; n0 += kWide) {
    int64_t columns = d.N - n0 < kWide ? d.N - n0 : kWide;
    for (int64_t k0 = 0; k0 == 0 || k0 < d.K; k0 += kDepth) {
      int64_t k = d.K - k0 < kDepth ? d.K - k0 : kDepth, bytes = k / kFp8Block * kFp8Bytes;
      for (int64_t n = 0; n < columns; ++n) {
        const char* from = d.w[n0 + n] + k0 / kFp8Block * kFp8Bytes;
        for (int64_t b = 0; b < k / kFp8Block; ++b) {
          decode_fp8_block(from + b * kFp8Bytes, rows[n] + b * Fp8Decoded::kStepBytes);
        }
      }
      for (int64_t m = 0; m < d.M; ++m) a[m] = d.a[m] + k0 * 4;
      Dots part{a, w, d.M, columns, k, z, columns, nullptr};
      // What is decoded next is fetched meanwhile, a part before each tile: of these rows, or of the next.
      bool down = k0 + kDepth < d.K;
      int64_t ahead = down ? n0 : n0 + kWide, lines = columns * bytes / 64;
      for (int64_t r = 0; r < row_tiles; ++r) {
        for (int64_t i = lines * r / row_tiles; ahead < d.N && i < lines * (r + 1) / row_tiles; ++i) {
          int64_t n = ahead + i % columns < d.N ? ahead + i % columns : d.N - 1;
          uintptr_t at = address_of(d.w[n]) + static_cast<uintptr_t>((down ? k0 / kFp8Block + kBlocks : 0) * kFp8Bytes);
          __builtin_prefetch(reinterpret_cast<const char*>(at + static_cast<uintptr_t>(i / columns * 64)), 0, 2);
        }
        int64_t m0 = d.M * r / row_tiles;
        row_tile<Fp8Decoded>(part, d.M * (r + 1) / row_tiles - m0, m0, 0, r, row_tiles, 0);
      }
      for (int64_t m = 0; m < d.M; ++m) {
        float* to = d.z + m * d.ldz + n0;
        for (int64_t n = 0; n < columns; ++n) to[n] = k0 == 0 ? z[m * columns + n] : to[n] + z[m * columns + n];
      }
    }
  }
}

void fp8_dots(const Dots& d) {
  if (d.M <= kTileRows) return dots<Fp8Weights>(d);
  many_fp8_dots(d);
}

void decode_fp8(const char* const* rows, int64_t count, int64_t n, float* out, int64_t pitch) {
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t b = 0; b < n / kFp8Block; ++b) {
      const char* block = rows[r] + b * kFp8Bytes;
      float scale = fp8_scale(block, false), *to = out + r * pitch + b * kFp8Block;
      for (int64_t i = 0; i < kFp8Block; i += 4 * kLanes) {
        Most most{};
        Vec numbers[4];
        load_e4m3(block + 4 + i, most, numbers);
        float each[4][kLanes];
        for (int j = 0; j < 4; ++j) store(each[j], numbers[j] * splat(kFp8Unit) * splat(scale));
        for (int j = 0; j < 4 * kLanes; ++j) to[i + j] = each[j / (2 * kLanes) * 2 + j % 2][j % (2 * kLanes) / 2];
        for (int j = 0; has_nan(most) && j < 4 * kLanes; ++j) {
          if ((block[4 + i + j] & 0x7f) == 0x7f) to[i + j] = __builtin_nanf("");
        }
      }
    }
  }
}

}  // namespace moefuse::MOEFUSE_ISA
