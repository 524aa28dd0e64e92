// The product kernel: dot products between packed activation rows and weight rows as they lie.
//
// Every sum runs over K in one order: lane by lane over kDepth of K, then the lanes are added up; and so on. Tile
// shape, row count and threads do not show in the result.
#pragma once

#include <cstring>

#include "kernels.h"

namespace moefuse::MOEFUSE_ISA {

// Activations that stay in a 32 KiB L1 while weight rows stream past them.
constexpr int64_t kResident = 16 << 10;

// A weight format: elements and bytes of a step, which adds them to every sum of a tile, and the unit of the sums.
struct F32Weights {
  static constexpr int64_t kActBytes = 4;
  static constexpr float kUnit = 1;
  static constexpr int64_t kStep = kChunk;
  static constexpr int64_t kStepBytes = kChunk * 4;
  static constexpr int kVecs = kChunk / kLanes;
  static Vec weight(const char* w, int v) { return load(reinterpret_cast<const float*>(w) + v * kLanes); }
};

struct F16Weights {
  static constexpr int64_t kActBytes = 4;
  static constexpr float kUnit = 1;
  static constexpr int64_t kStep = kChunk;
  static constexpr int64_t kStepBytes = kChunk * 2;
  static constexpr int kVecs = kChunk / kLanes;
  static Vec weight(const char* w, int v) { return load_f16(w + v * kLanes * 2); }
};

// Vectors come out as the even, then the odd elements of each pair of registers; `pack_even_odd` matches.
struct BF16Weights {
  static constexpr int64_t kActBytes = 4;
  static constexpr float kUnit = 1;
  static constexpr int64_t kStep = kChunk;
  static constexpr int64_t kStepBytes = kChunk * 2;
  static constexpr int kVecs = kChunk / kLanes;
  static Vec weight(const char* w, int v) {
    const char* pair = w + (v / 2) * kLanes * 4;
    return v % 2 == 0 ? load_bf16_even(pair) : load_bf16_odd(pair);
  }
};

template <class W>
struct Multiply {
  template <int M, int N>
  static inline __attribute__((always_inline)) void step(const char* const (&a)[M], int64_t a_at,
                                                         const char* (&w)[N], int64_t w_at, Vec (&acc)[M][N]) {
#pragma GCC unroll 8
    for (int v = 0; v < W::kVecs; ++v) {
      if constexpr (M > 1) {
        // The compiler would keep raw weights for the next vector in registers and spill sums; so it must not know
        // that it has loaded them before.
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) asm("" : "+r"(w[n]));
      }
      Vec weights[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) weights[n] = W::weight(w[n] + w_at, v);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        Vec x = load(reinterpret_cast<const float*>(a[m] + a_at) + v * kLanes);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[m][n] = fma(x, weights[n], acc[m][n]);
      }
    }
  }
};

#ifdef __AVX512BF16__
struct BF16Dot {
  static constexpr int64_t kActBytes = 2;
  static constexpr float kUnit = 1;
  static constexpr int64_t kStep = kChunk;
  static constexpr int64_t kStepBytes = kChunk * 2;
};

template <>
struct Multiply<BF16Dot> {
  template <int M, int N>
  static inline __attribute__((always_inline)) void step(const char* const (&a)[M], int64_t a_at,
                                                         const char* (&w)[N], int64_t w_at, Vec (&acc)[M][N]) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = dot_bf16(a[m] + a_at, w[n] + w_at, acc[m][n]);
    }
  }
};
#endif

// What a tile prefetches while it works: for its row n and step c, the step's bytes at base + n * row + c * step.
// An address, not a pointer: it may lie outside the tensor, which a prefetch allows. Or, with `far`, the step that lies
// so many bytes behind each row's own.
struct Ahead {
  uintptr_t base = 0;
  int64_t row = 0;
  int64_t step = 0;
  int64_t far = 0;
};

// How far ahead weights are fetched, into L2, in each stream of the only row tile, 0 where the processor does it by itself.
// On a Zen 4 bf16 went from 41 to 47 GB/s at T=1, and from 28.1 to 25.3 ms at 32.
constexpr int64_t kFar = 1536;
template <class W>
int64_t far_ahead() {
  return kFetchIntoL2 ? kFar : 0;
}

// Weight rows of a register tile of M rows.
template <class W, int M>
constexpr int kColumns = kTileColumns[M];

inline uintptr_t address_of(const char* p) { return reinterpret_cast<uintptr_t>(p); }

// One register tile over kDepth of K: weight rows n0, n0 + apart and so on. Those that lie apart are streams that the
// processor fetches ahead by itself.
template <class W, int M, int N>
void tile(const Dots& d, int64_t m0, int64_t n0, int64_t apart, int64_t k0, Ahead ahead) {
  const char* a[M];
  const char* w[N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) a[m] = d.a[m0 + m] + k0 * W::kActBytes;
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) w[n] = d.w[n0 + n * apart] + k0 / W::kStep * W::kStepBytes;
  int64_t k = d.K - k0 < kDepth ? d.K - k0 : kDepth;
  int64_t steps = k / W::kStep;

  Vec acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = zero();
  }
  for (int64_t c = 0; c < steps; ++c) {
    if (ahead.step != 0) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
        for (int64_t line = 0; line < W::kStepBytes; line += 64) {
          uintptr_t at = ahead.base + static_cast<uintptr_t>(n * ahead.row + c * ahead.step + line);
          __builtin_prefetch(reinterpret_cast<const char*>(at), 0, 2);
        }
      }
    }
    if (ahead.far != 0) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
        for (int64_t line = 0; line + 64 <= W::kStepBytes; line += 64) {
          uintptr_t at = address_of(w[n]) + static_cast<uintptr_t>(c * W::kStepBytes + ahead.far + line);
          __builtin_prefetch(reinterpret_cast<const char*>(at), 0, 2);
        }
      }
    }
    Multiply<W>::template step<M, N>(a, c * W::kStep * W::kActBytes, w, c * W::kStepBytes, acc);
  }
  // Rows in blocks have no tail.
  if (int64_t tail = k - steps * W::kStep; W::kStep == kChunk && tail > 0) {
    alignas(64) char padded[N][W::kStepBytes] = {};
    const char* last[N];
    for (int n = 0; n < N; ++n) {
      std::memcpy(padded[n], w[n] + steps * W::kStepBytes, tail * (W::kStepBytes / W::kStep));
      last[n] = padded[n];
    }
    Multiply<W>::template step<M, N>(a, steps * W::kStep * W::kActBytes, last, 0, acc);
  }

  float sums[kSumsAtOnce * ((M * N + kSumsAtOnce - 1) / kSumsAtOnce)];
#pragma GCC unroll 8
  for (int i = 0; i < M * N; i += kSumsAtOnce) {
    Vec group[kSumsAtOnce];
#pragma GCC unroll 16
    for (int j = 0; j < kSumsAtOnce; ++j) group[j] = i + j < M * N ? acc[(i + j) / N][(i + j) % N] : zero();
    add_lanes(group, M * N - i, sums + i);
  }
  // Neighbouring columns are written at once.
  auto write = [&](int64_t step, bool first) __attribute__((always_inline)) {
    for (int m = 0; m < M; ++m) {
      float* z = d.z + (m0 + m) * d.ldz + n0;
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        float sum = sums[m * N + n] * W::kUnit;
        z[n * step] = first ? sum : z[n * step] + sum;
      }
    }
  };
  apart == 1 && k0 == 0 ? write(1, true) : write(apart, k0 == 0);
}

// tile<W, M, n> for an n known at run time, at most kColumns<W, M>.
template <class W, int M, int N = kColumns<W, M>>
void tile_columns(const Dots& d, int64_t columns, int64_t m0, int64_t n0, int64_t apart, int64_t k0, Ahead ahead) {
  if (columns == N) {
    tile<W, M, N>(d, m0, n0, apart, k0, ahead);
  } else if constexpr (N > 1) {
    tile_columns<W, M, N - 1>(d, columns, m0, n0, apart, k0, ahead);
  }
}

// Row tile `r` of `row_tiles`, across all columns and kDepth of K. `next` is where the first weight row of the next
// kDepth lies, 0 for none.
template <class W, int M = kTileRows>
void row_tile(const Dots& d, int64_t rows, int64_t m0, int64_t k0, int64_t r, int64_t row_tiles, uintptr_t next) {
  if (rows == M) {
    constexpr int64_t kStep = kColumns<W, M>;
    int64_t turn = 0;
    for (int64_t n0 = 0; n0 < d.N; n0 += kStep) {
      int64_t columns = d.N - n0 < kStep ? d.N - n0 : kStep;
      // Row tiles take turns, so that each weight row of the next kDepth is prefetched once.
      Ahead ahead;
      if (next != 0 && turn == r) {
        ahead.base = next + (address_of(d.w[n0]) - address_of(d.w[0]));
        ahead.row = columns > 1 ? static_cast<int64_t>(address_of(d.w[n0 + 1]) - address_of(d.w[n0])) : 0;
        ahead.step = W::kStepBytes;
      }
      tile_columns<W, M>(d, columns, m0, n0, 1, k0, ahead);
      turn = turn + 1 == row_tiles ? 0 : turn + 1;
    }
  } else if constexpr (M > 1) {
    row_tile<W, M - 1>(d, rows, m0, k0, r, row_tiles, next);
  }
}

// All columns of the only row tile, each over the whole of K: weights are read in as many streams as a tile has columns,
// each a run of consecutive rows.
template <class W, int M = kTileRows>
void single_row_tile(const Dots& d) {
  if (d.M == M) {
    constexpr int64_t kStreams = kColumns<W, M>;
    int64_t run = (d.N + kStreams - 1) / kStreams;
    for (int64_t n0 = 0; n0 < run; ++n0) {
      int64_t columns = (d.N - n0 + run - 1) / run;
      int64_t k0 = 0;
      do {
        tile_columns<W, M>(d, columns, 0, n0, run, k0, {.far = far_ahead<W>()});
        k0 += kDepth;
      } while (k0 < d.K);
    }
  } else if constexpr (M > 1) {
    single_row_tile<W, M - 1>(d);
  }
}

template <class W>
void dots(const Dots& d) {
  if (d.M <= kTileRows && d.M * d.K * W::kActBytes <= kResident) {
    single_row_tile<W>(d);
    return;
  }
  constexpr int64_t kDepthBytes = kDepth / W::kStep * W::kStepBytes;
  int64_t row_tiles = (d.M + kTileRows - 1) / kTileRows;
  int64_t k0 = 0;
  do {
    uintptr_t next = address_of(d.w[0]) + static_cast<uintptr_t>((k0 / kDepth + 1) * kDepthBytes);
    if (k0 + kDepth >= d.K) next = address_of(d.next);
    for (int64_t r = 0; r < row_tiles; ++r) {
      int64_t m0 = d.M * r / row_tiles;
      row_tile<W>(d, d.M * (r + 1) / row_tiles - m0, m0, k0, r, row_tiles, next);
    }
    k0 += kDepth;
  } while (k0 < d.K);
}

}  // namespace moefuse::MOEFUSE_ISA
