// Integer products with few rows of activations where rows of blocks lie interleaved: four elements of each weight row
// are decoded at a time, into a register, and multiplied with every row of activations at once.
#pragma once

#include "groups.h"

namespace moefuse::MOEFUSE_ISA {

// Rows of activations at a time: their sums, one register of weights and one of activations are all that is held.
constexpr int kTile = kLanes == 16 ? 8 : 4;

// Vectors of weight rows at a time, which share a load of activations. Where parts of a group are widened apart there
// are too few registers for that.
template <class F>
constexpr int kAbreast = kLanes == 8 && F::kSpan != 4 ? 2 : 1;

// Up to how many rows this is better than panels, which decode a weight once for all. On a Zen 5 core with AVX2 at 32
// rows they take 0.9 of the time in Q4_K and 0.7 in Q6_K, at 8 rows 1.1 and 0.8; in Q8_0 1.2. AVX-VNNI: 0.75 in Q6_K.
template <class F>
constexpr int64_t kMostTiledRows =
    kLanes == 4 ? 0 : kLanes == 16 ? kMaxRows : F::kGroup == 16 ? 4 : kFourProducts || F::kSpan == 1 ? kMaxRows : 16;

// How far ahead blocks are fetched. Into L1: on a Zen 5, one core with two threads, a layer in Q4_K took 430 us at T=1 so,
// 452 at twice the distance, 590 into L2. Into L2: on two Zen 4 cores 528 us, 545 at 8 KiB, 700 into L1; Q6_K 820 and 1960.
constexpr int64_t kAheadInL1 = 4 << 10, kAheadInL2 = 6 << 10;

// In the file's order AVX-512 multiplies a block part by part of its groups, and so it does here, for the same bits.
constexpr bool kByParts = kLanes == 16;

// acc += the products of M rows of groups with a block of C times kLanes rows.
template <class F, int M, int C>
inline __attribute__((always_inline)) void multiply_steps(const Interleaved (&from)[C], const char* const (&a)[M],
                                                          const char* ahead, Vec (&acc)[C][M]) {
  constexpr int kGroups = F::kSize / F::kGroup, kParts = kGroup / F::kGroup, kSteps = F::kGroup / 4;
  constexpr int kWhole = F::kSize / kGroup / F::kRepeats;
  Vec d[C], factor[C][kGroups], offset[C][kGroups], last[C][M];
  Shorts scale[C][kGroups];
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    F::head(from[c], 0, {d + c, scale[c], offset[c]});
#pragma GCC unroll 16
    for (int g = 0; kByParts && g < kGroups; ++g) {
      factor[c][g] = F::kScales ? d[c] * to_float(low_halves(scale[c][g])) : d[c];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) last[c][m] = zero();
  }
  each_repeat<F>([&](int64_t repeat) __attribute__((always_inline)) {
    if (kFetchIntoL2) {
      fetch<F, C * kLanes, F::kRepeats>(ahead, repeat);
    } else {
      fetch<F, C * kLanes, F::kRepeats, 3>(ahead, repeat);
    }
    // The products of `Count` steps from `First` on of group G.
    auto multiply = [&]<int G, int First, int Count>(Sums (&sums)[C][M]) __attribute__((always_inline)) {
      each<Count>([&]<int I>() __attribute__((always_inline)) {
        Bytes x[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          x[m] = repeat4(a[m] + (kWhole * repeat + G) * static_cast<int64_t>(sizeof(Group)) + 4 * (First + I));
        }
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          Bytes q = raise<F>(F::template step<kGroup / 4 * G + First + I>(from[c], 0, repeat));
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            sums[c][m] = add_step<F>(sums[c][m], q, x[m], I == 0);
            keep(sums[c][m]);
          }
        }
      });
    };
    auto group = [&](int m, int g) -> const Group& {
      return reinterpret_cast<const Group*>(a[m])[kWhole * repeat + g];
    };
    if constexpr (kByParts) {
      each<kParts>([&]<int P>() __attribute__((always_inline)) {
        each<kWhole>([&]<int G>() __attribute__((always_inline)) {
          Sums sums[C][M];
          multiply.template operator()<G, P * kSteps, kSteps>(sums);
          const int64_t g = (kWhole * repeat + G) * kParts + P;
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) {
              const Group& x = group(m, G);
              acc[c][m] = add_part<F>(off_centre<F>(sums[c][m], x, P), x, P, factor[c][g], offset[c][g], acc[c][m]);
            }
          }
        });
      });
    } else {
      each<kWhole>([&]<int G>() __attribute__((always_inline)) {
        const int64_t g = kWhole * repeat + G;
        Ints total[C][M];
        each<kGroup / 4 / kSpan<F>>([&]<int S>() __attribute__((always_inline)) {
          constexpr int kPart = S * kSpan<F> / kSteps;
          Sums sums[C][M];
          multiply.template operator()<G, S * kSpan<F>, kSpan<F>>(sums);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) {
              Ints wide = widen<F>(off_centre<F>(sums[c][m], group(m, G), kPart), scale[c][g * kParts + kPart]);
              total[c][m] = S == 0 ? wide : total[c][m] + wide;
              keep(total[c][m]);
            }
          }
        });
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
          for (int c = 0; c < C; ++c) {
            Vec& to = kFactorLast<F> ? last[c][m] : acc[c][m];
            to = add_group<F>(total[c][m], group(m, G), g, d + c, offset[c], to);
          }
        }
      });
    }
  });
#pragma GCC unroll 8
  for (int m = 0; !kByParts && kFactorLast<F> && m < M; ++m) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) acc[c][m] = fma(last[c][m], d[c], acc[c][m]);
  }
}

// Rows from m0 on.
template <class F, int M>
void group_tile(const Dots& d, int64_t m0) {
  constexpr int64_t kBlock = kStripRows * F::kBytes;
  constexpr int kVecs = kStripRows / kLanes, C = kAbreast<F>;
  const int64_t blocks = d.K / F::kSize, distance = (kFetchIntoL2 ? kAheadInL2 : kAheadInL1) / kBlock + 1;
  for (int64_t n0 = 0; n0 < d.N; n0 += kStripRows) {
    const char* next = next_rows(d, n0, kStripRows);
    const char* a[M];
    Vec acc[kVecs / C][C][M];
    for (int m = 0; m < M; ++m) {
      a[m] = d.a[m0 + m];
      for (int h = 0; h < kVecs; ++h) acc[h / C][h % C][m] = zero();
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const char* at = d.w[n0] + b * kBlock;
      const char* ahead = b + distance < blocks ? at + distance * kBlock : behind(next, (b + distance - blocks) * kBlock);
      for (int h = 0; h < kVecs; h += C) {
        Interleaved from[C];
        for (int c = 0; c < C; ++c) from[c] = Interleaved(&at, 0, (h + c) * kLanes);
        multiply_steps<F, M, C>(from, a, behind(ahead, h * kLanes * F::kBytes), acc[h / C]);
      }
      for (int m = 0; m < M; ++m) a[m] += F::kSize / kGroup * static_cast<int64_t>(sizeof(Group));
    }
    for (int m = 0; m < M; ++m) {
      for (int h = 0; h < kVecs; ++h) store(d.z + (m0 + m) * d.ldz + n0 + h * kLanes, acc[h / C][h % C][m]);
    }
  }
}

template <class F>
void group_dots(const Dots& d) {
  int64_t m = 0;
  for (; d.M - m >= kTile; m += kTile) group_tile<F, kTile>(d, m);
  for (; d.M - m >= 4; m += 4) group_tile<F, 4>(d, m);
  if (d.M - m == 3) group_tile<F, 3>(d, m);
  if (d.M - m == 2) group_tile<F, 2>(d, m);
  if (d.M - m == 1) group_tile<F, 1>(d, m);
}

}  // namespace moefuse::MOEFUSE_ISA
