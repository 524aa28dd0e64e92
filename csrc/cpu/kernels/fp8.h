// Weights in FP8: blocks of a float scale and 128 numbers in e4m3. They are no integers, so activations stay f32, or
// bf16 where they are that and an instruction multiplies it.
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

#ifdef __AVX512BF16__
struct Fp8Dot {
  static constexpr int64_t kActBytes = 2;
  static constexpr float kUnit = kFp8Unit;
  static constexpr int64_t kStep = kFp8Block;
  static constexpr int64_t kStepBytes = kFp8Bytes;
};
#endif

// A block's scale, which is not a number where one of the 128 is none, and what `load_e4m3` gives, in bf16, which holds
// it: half the room, and an order that `load_e4m3` shares. It is multiplied as bf16 weights are in W.
template <class W>
struct Fp8Decoded {
  static constexpr int64_t kActBytes = W::kActBytes;
  static constexpr float kUnit = kFp8Unit;
  static constexpr int64_t kStep = kFp8Block;
  static constexpr int64_t kHead = 64;
  static constexpr int64_t kStepBytes = kHead + kFp8Block * 2;
};

// What waits for decoding gains nothing.
template <>
inline int64_t far_ahead<Fp8Weights>() {
  return 0;
}

// Sums, the four weights that are decoded together, a mask and a few more fill the registers. Four rows were 10% to 20%
// faster than eight on an Ice Lake.
template <int M>
constexpr int kColumns<Fp8Weights, M> = M <= 2 || kLanes == 16 ? 4 : 2;
#ifdef __AVX512BF16__
template <int M>
constexpr int kColumns<Fp8Dot, M> = M == 1 ? 8 : 4;

// A block is no multiple of a line, and blocks are read slower than numbers. On a Zen 4, two cores, one row: 47 GB/s so
// at K=2048 and 37 at K=768, 40 and 31 without it, in four streams 39 and 28.
template <>
inline int64_t far_ahead<Fp8Dot>() {
  return kFar;
}
#endif

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

#ifdef __AVX512BF16__
template <>
struct Multiply<Fp8Dot> {
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
    for (int64_t k = 0; k < kFp8Block; k += 2 * kChunk) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        __m512i pairs[2];
        load_e4m3_bf16(w[n] + w_at + 4 + k, pairs);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          sums[m][n] = dot_bf16(a[m] + a_at + k * 2, pairs[0], sums[m][n]);
          sums[m][n] = dot_bf16(a[m] + a_at + (k + kChunk) * 2, pairs[1], sums[m][n]);
        }
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
#endif

template <class W>
struct Multiply<Fp8Decoded<W>> {
  template <int M, int N>
  static inline __attribute__((always_inline)) void step(const char* const (&a)[M], int64_t a_at,
                                                         const char* (&w)[N], int64_t w_at, Vec (&acc)[M][N]) {
    Vec sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = zero();
    }
    for (int64_t k = 0; k < kFp8Block; k += kChunk) {
      Multiply<W>::template step<M, N>(a, a_at + k * W::kActBytes, w, w_at + Fp8Decoded<W>::kHead + k * 2, sums);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      Vec scale = splat(fp8_scale(w[n] + w_at, false));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][n] = fma(sums[m][n], scale, acc[m][n]);
    }
  }
};

template <class W>
void decode_fp8_block(const char* block, char* out) {
  Most most{};
  for (int64_t v = 0; v < kFp8Vecs; v += 4) {
    Vec numbers[4];
    load_e4m3(block + 4 + v * kLanes, most, numbers);
    for (int i = 0; i < 4; i += 2) {
      store_bf16_pairs(out + Fp8Decoded<W>::kHead + (v + i) * kLanes * 2, numbers[i], numbers[i + 1]);
    }
  }
  float scale = fp8_scale(block, has_nan(most));
  std::memcpy(out, &scale, sizeof scale);
}

// More rows than one tile has: weights are decoded once for all of them, kWide rows and kDepth of K at a time.
template <class W>
void many_fp8_dots(const Dots& d) {
  constexpr int64_t kWide = 2 * kTileColumns[kTileRows], kBlocks = kDepth / kFp8Block;
  alignas(64) char rows[kWide][kBlocks * Fp8Decoded<W>::kStepBytes];
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
          decode_fp8_block<W>(from + b * kFp8Bytes, rows[n] + b * Fp8Decoded<W>::kStepBytes);
        }
      }
      for (int64_t m = 0; m < d.M; ++m) a[m] = d.a[m] + k0 * W::kActBytes;
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
        row_tile<Fp8Decoded<W>>(part, d.M * (r + 1) / row_tiles - m0, m0, 0, r, row_tiles, 0);
      }
      for (int64_t m = 0; m < d.M; ++m) {
        float* to = d.z + m * d.ldz + n0;
        for (int64_t n = 0; n < columns; ++n) to[n] = k0 == 0 ? z[m * columns + n] : to[n] + z[m * columns + n];
      }
    }
  }
}

// Few and Many: how weights are multiplied that are decoded in registers, and in memory.
template <class Few, class Many>
void fp8_dots(const Dots& d) {
  if (d.M <= kTileRows) return dots<Few>(d);
  many_fp8_dots<Many>(d);
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
