// The rank-one-update kernel of the backward products: no row has to lie along the sum, so no transposed weight.
#pragma once

#include "kernels.h"

namespace moefuse::MOEFUSE_ISA {

// Rows and vectors of a register tile: 12 sums of 16 registers, 24 of 32.
constexpr int kOuterRows = kLanes == 16 ? 12 : 6;
constexpr int kOuterVecs = 2;

template <int M>
inline void outer_tile(const float* g, int64_t ldg, const float* x, int64_t ldx, int64_t rows, float* acc,
                       int64_t lda, bool fresh) {
  Vec sums[M][kOuterVecs];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kOuterVecs; ++v) sums[m][v] = fresh ? zero() : load(acc + m * lda + v * kLanes);
  }
  for (int64_t p = 0; p < rows; ++p) {
    Vec in[kOuterVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kOuterVecs; ++v) in[v] = load(x + p * ldx + v * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Vec scale = splat(g[p * ldg + m]);
#pragma GCC unroll 4
      for (int v = 0; v < kOuterVecs; ++v) sums[m][v] = fma(scale, in[v], sums[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kOuterVecs; ++v) store(acc + m * lda + v * kLanes, sums[m][v]);
  }
}

template <int M = kOuterRows>
inline void outer_rows(int64_t m, const float* g, int64_t ldg, const float* x, int64_t ldx, int64_t rows, float* acc,
                       int64_t lda, bool fresh) {
  if (m == M) {
    outer_tile<M>(g, ldg, x, ldx, rows, acc, lda, fresh);
  } else if constexpr (M > 1) {
    outer_rows<M - 1>(m, g, ldg, x, ldx, rows, acc, lda, fresh);
  }
}

// Every sum runs over the rows in order, whatever the tile.
inline void outer(const float* g, int64_t ldg, const float* x, int64_t ldx, int64_t rows, int64_t n, int64_t k,
                  float* acc, int64_t lda, bool fresh) {
  int64_t tiles = (n + kOuterRows - 1) / kOuterRows;
  for (int64_t j = 0; j < k; j += kOuterVecs * kLanes) {
    for (int64_t i = 0; i < tiles; ++i) {
      int64_t first = n * i / tiles;
      outer_rows(n * (i + 1) / tiles - first, g + first, ldg, x + j, ldx, rows, acc + first * lda + j, lda,
                 fresh);
    }
  }
}

}  // namespace moefuse::MOEFUSE_ISA
