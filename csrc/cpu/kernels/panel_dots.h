// Integer products with blocks decoded into panels, and of few rows as they lie, for 8 lanes or fewer.
#pragma once

#include "groups.h"

namespace moefuse::MOEFUSE_ISA {

// The products of a span: step by step for all rows and panels, widened at the end.
template <class F, int M, int C>
inline __attribute__((always_inline)) void long_span(const Panel* panels, int64_t q, const char* const* rows,
                                                     int64_t at, int part, Sums (&sums)[M][C]) {
#pragma GCC unroll 8
  for (int i = 0; i < kSpan<F>; ++i) {
    Bytes w[C];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) w[c] = panels[c].q[q + i];
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) {
      Bytes x = repeat4(rows[m] + at + 4 * (q % (kGroup / 4) + i));
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) {
        sums[m][c] = add_step<F>(sums[m][c], w[c], x, i == 0);
        keep(sums[m][c]);
      }
    }
  }
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
    const Group& group = *reinterpret_cast<const Group*>(rows[m] + at);
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) sums[m][c] = off_centre<F>(sums[m][c], group, part);
  }
}

// The products of one group of activations of each row, in whole numbers.
template <class F, int M, int C>
inline __attribute__((always_inline)) void group_sums(const Panel* panels, int64_t g, const char* const* rows,
                                                      Ints (&total)[M][C]) {
  constexpr int kParts = kGroup / F::kGroup;
  constexpr int kSteps = F::kGroup / 4;
  static_assert(kCentre<F> <= 0 || kSpan<F> == kSteps, "a centre is taken off where the whole group adds up");
  int64_t at = g * static_cast<int64_t>(sizeof(Group));
  auto add = [&](int m, int c, int part, bool first, Sums sums) {
    Ints wide = widen<F>(sums, panels[c].scale[g * kParts + part]);
    total[m][c] = first ? wide : total[m][c] + wide;
  };
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; step += kSpan<F>) {
      bool first = part == 0 && step == 0;
      int64_t q = g * (kGroup / 4) + part * kSteps + step;
      if constexpr (kSpan<F> == 1) {
        // Row by row, so that only the sums stay in registers.
#pragma GCC unroll 3
        for (int m = 0; m < M; ++m) {
          Bytes x = repeat4(rows[m] + at + 4 * (part * kSteps + step));
#pragma GCC unroll 3
          for (int c = 0; c < C; ++c) {
            add(m, c, part, first, add_step<F>(Sums{}, panels[c].q[q], x, true));
            keep(total[m][c]);
          }
        }
      } else {
        Sums sums[M][C];
        long_span<F, M, C>(panels, q, rows, at, part, sums);
#pragma GCC unroll 3
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
          for (int c = 0; c < C; ++c) add(m, c, part, first, sums[m][c]);
        }
      }
    }
  }
}

// z[m] += the products of M rows of groups with C panels, over `groups` groups. Inlined it spills more: 4% at M=60.
template <class F, int M, int C>
__attribute__((noinline)) void multiply(const Panel* panels, const char* const* rows, int64_t groups,
                                        float (*z)[kWidth]) {
  Vec acc[M][C];
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) acc[m][c] = kFactorLast<F> ? zero() : load(z[m] + c * kLanes);
  }
  for (int64_t g = 0; g < groups; ++g) {
    Ints sums[M][C];
    group_sums<F, M, C>(panels, g, rows, sums);
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) {
      const Group& group = reinterpret_cast<const Group*>(rows[m])[g];
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) {
        acc[m][c] = add_group<F>(sums[m][c], group, g, panels[c].d, panels[c].offset, acc[m][c]);
      }
    }
  }
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) {
      if constexpr (kFactorLast<F>) acc[m][c] = fma(acc[m][c], panels[c].d[0], load(z[m] + c * kLanes));
      store(z[m] + c * kLanes, acc[m][c]);
    }
  }
}

// The products of one group of activations with kLanes rows in slices, added up to a lane per row.
template <class F>
inline Ints slice_sums(const Bytes* q, const Group& group, int part, Shorts scale) {
  constexpr int kSlices = F::kGroup / 16;
#ifdef MOEFUSE_VNNI
  Ints wide[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 2
    for (int s = 0; s < kSlices; ++s) {
      Bytes x = repeat16(reinterpret_cast<const char*>(group.q) + 16 * (part + s));
      wide[j] = add_step<F>(wide[j], raise<F>(q[4 * s + j]), x, s == 0);
    }
  }
  Ints sums = fold_words(fold_longs(wide[0], wide[1]), fold_longs(wide[2], wide[3]));
  return widen<F>(off_centre<F>(sums, group, part), scale);
#else
  constexpr bool kAtOnce = F::kSpan == 1, kInShorts = 2 * F::kSpan >= F::kGroup / 2;
  Shorts pairs[kSlices][4];
#pragma GCC unroll 2
  for (int s = 0; s < kSlices; ++s) {
    Bytes x = repeat16(reinterpret_cast<const char*>(group.q) + 16 * (part + s));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) pairs[s][j] = pair_sums<F::kSigned>(q[4 * s + j], x);
  }
  if constexpr (kAtOnce) {
    Ints wide[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      wide[j] = widen_pairs(pairs[0][j]);
      if constexpr (kSlices == 2) wide[j] += widen_pairs(pairs[1][j]);
    }
    Ints sums = fold_words(fold_longs(wide[0], wide[1]), fold_longs(wide[2], wide[3]));
    return F::kScales ? sums * low_halves(scale) : sums;
  } else {
    if constexpr (kSlices == 2) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) pairs[0][j] = add(pairs[0][j], pairs[1][j]);
    }
    Shorts low = fold_longs(pairs[0][0], pairs[0][1]), high = fold_longs(pairs[0][2], pairs[0][3]);
    if constexpr (kInShorts) {
      Shorts both = fold_words(low, high);
      return widen<F>(off_centre<F>(both, group, part), scale);
    } else {
      Ints sums = fold_words(widen_pairs(low), widen_pairs(high));
      return F::kScales ? sums * low_halves(scale) : sums;
    }
  }
#endif
}

// What `multiply` needs of a format, so that formats alike in it share the code.
template <class F>
using Alike = Block<0, 0, F::kGroup, F::kSpan, F::kCentre, F::kScales>;

// Integer products: groups of quantised activations.
template <class F>
struct Integer {
  static constexpr int64_t kUnitBytes = kUnit / kGroup * static_cast<int64_t>(sizeof(Group));
  static constexpr bool kRaises = kRaised<F>;

  template <int C>
  void prepare(const Panel*, int64_t) {}

  template <int M, int C>
  void tile(const Panel* panels, const char* const* rows, int64_t k, float (*z)[kWidth]) const {
    multiply<Alike<F>, M, C>(panels, rows, k / kGroup, z);
  }
};

// acc[m] += the products of M rows of groups with the block at `at` of kLanes rows; the same bits as `multiply`.
template <class F, int M>
inline void multiply_block(Slices from, int64_t at, const char* const (&rows)[M], const char* ahead, Vec (&acc)[M]) {
  constexpr int kGroups = F::kSize / F::kGroup, kParts = kGroup / F::kGroup, kSlices = F::kGroup / 16;
  Vec d, offset[kGroups];
  Shorts scale[kGroups];
  F::head(from, at, {&d, scale, offset});
  Ints sums[M][F::kSize / kGroup];
  each_chunk<F>([&]<int C>() __attribute__((always_inline)) {
    fetch<F, kLanes, F::kChunks>(ahead, C);
    Bytes q[4 * ((F::kChunkSlices - 1) * F::kChunkStep + 1)];
    F::template chunk<C>(from, at, q);
#pragma GCC unroll 4
    for (int s = 0; s < F::kChunkSlices; s += kSlices) {
      int group = (F::first_slice(C) + s * F::kChunkStep) / kSlices, part = group % kParts;
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const Group& x = reinterpret_cast<const Group*>(rows[m])[group / kParts];
        Ints products = slice_sums<F>(q + 4 * s * F::kChunkStep, x, part, scale[group]);
        Ints& sum = sums[m][group / kParts];
        sum = part == 0 ? products : sum + products;
      }
    }
  });
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    auto groups = reinterpret_cast<const Group*>(rows[m]);
    Vec sum = kFactorLast<F> ? zero() : acc[m];
#pragma GCC unroll 8
    for (int g = 0; g < F::kSize / kGroup; ++g) sum = add_group<F>(sums[m][g], groups[g], g, &d, offset, sum);
    acc[m] = kFactorLast<F> ? fma(sum, d, acc[m]) : sum;
  }
}

template <class F>
constexpr int kMostRows = F::kGroup == 16 ? kMostSliceRows16 : kMostSliceRows;

// Few rows: weights are multiplied as they lie, kLanes rows at a time.
template <class F, int M = kMostRows<F>>
void slice_dots(const Dots& d) {
  if constexpr (M > 1) {
    if (d.M < M) return slice_dots<F, M - 1>(d);
  }
  for (int64_t n0 = 0; n0 < d.N; n0 += kLanes) {
    const char* w[kLanes];
    // Lanes past the end repeat the last row; their sums are dropped.
    for (int64_t l = 0; l < kLanes; ++l) w[l] = d.w[n0 + l < d.N ? n0 + l : d.N - 1];
    const char* next = next_rows(d, n0, kLanes);
    const char* a[M];
    Vec acc[M];
    for (int m = 0; m < M; ++m) {
      a[m] = d.a[m];
      acc[m] = zero();
    }
    for (int64_t b = 0; b < d.K / F::kSize; ++b) {
      multiply_block<F, M>({w, 0, n0}, b * F::kBytes, a, behind(next, b * kLanes * F::kBytes), acc);
      for (int m = 0; m < M; ++m) a[m] += F::kSize / kGroup * static_cast<int64_t>(sizeof(Group));
    }
    for (int m = 0; m < M; ++m) {
      for (int64_t l = 0; l < kLanes && n0 + l < d.N; ++l) d.z[m * d.ldz + n0 + l] = acc[m][l];
    }
  }
}

}  // namespace moefuse::MOEFUSE_ISA
