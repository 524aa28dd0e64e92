// Integer products with blocks where an instruction adds four products of bytes to a lane.
#pragma once

#include "groups.h"

namespace moefuse::MOEFUSE_ISA {

// z[c][m] += the products of row m with the block at `at` of C times kLanes weight rows, whose first group of
// activations is `first`: as many slices as fill 16 registers are decoded and multiplied with every row.
template <class F, int C>
inline __attribute__((always_inline)) void multiply_block(const char* const (&w)[C][kLanes], int64_t at,
                                                          const char* const* rows, int64_t M, int64_t first,
                                                          float (*z)[kMaxRows][kLanes]) {
  constexpr int kGroups = F::kSize / F::kGroup, kParts = kGroup / F::kGroup, kSlices = F::kGroup / 16;
  constexpr int kVecs = 4 * ((F::kChunkSlices - 1) * F::kChunkStep + 1);
  constexpr int kHeld = 4 / C < F::kChunkSlices ? 4 / C : F::kChunkSlices;  // slices in registers
  // Signed weights are raised to be unsigned.
  constexpr int16_t kCentre = F::kSigned ? 128 : F::kCentre;
  const Shorts less = Shorts{} - kCentre;
  Vec factor[C][kGroups], offset[C][kGroups];
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    Vec d;
    Shorts scale[kGroups];
    Columns from{w[c]};
    F::head(from, at, {&d, scale, offset[c]});
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) factor[c][g] = F::kScales ? d * to_float(low_halves(scale[g])) : d;
  }

  each_chunk<F>([&]<int Chunk>() __attribute__((always_inline)) {
    Bytes q[C][kVecs];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      Columns from{w[c]};
      F::template chunk<Chunk>(from, at, q[c]);
#pragma GCC unroll 16
      for (int i = 0; F::kSigned && i < kVecs; ++i) q[c][i] ^= repeat(0x80);
    }
#pragma GCC unroll 4
    for (int held = 0; held < F::kChunkSlices; held += kHeld) {
      for (int64_t m = 0; m < M; ++m) {
        auto groups = reinterpret_cast<const Group*>(rows[m]) + first;
        Vec acc[C];
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) acc[c] = load(z[c][m]);
#pragma GCC unroll 4
        for (int s = held; s < held + kHeld; s += kSlices) {
          int group = (F::first_slice(Chunk) + s * F::kChunkStep) / kSlices, part = group % kParts;
          const Group& x = groups[group / kParts];
          Ints sums[C] = {};
          if constexpr (kCentre > 0) {
            Ints all = repeat4(x.sides[kParts == 1 ? 2 : part]);
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) sums[c] = add_products(sums[c], less, all);
          }
#pragma GCC unroll 8
          for (int i = 0; i < F::kGroup / 4; ++i) {
            Ints four = repeat4(x.q + 16 * part + 4 * i);
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) sums[c] = add_products(sums[c], q[c][4 * s * F::kChunkStep + i], four);
          }
#pragma GCC unroll 2
          for (int c = 0; c < C; ++c) {
            acc[c] = fma(to_float(sums[c]) * splat(x.scale), factor[c][group], acc[c]);
            if constexpr (F::kHasOffsets) {
              acc[c] = fma(splat(kParts == 1 ? x.sum : x.halves[part]), offset[c][group], acc[c]);
            }
          }
        }
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) store(z[c][m], acc[c]);
      }
    }
  });
}

// Rows n0 to n0 + C - 1 of kLanes runs of `run` rows each.
template <class F, int C>
void multiply_runs(const Dots& d, int64_t n0, int64_t run) {
  alignas(64) float z[C][kMaxRows][kLanes];
  const char* w[C][kLanes];
  for (int c = 0; c < C; ++c) {
    // Lanes past the end repeat the last row; their sums are dropped.
    for (int64_t l = 0; l < kLanes; ++l) w[c][l] = d.w[n0 + c + l * run < d.N ? n0 + c + l * run : d.N - 1];
    for (int64_t m = 0; m < d.M; ++m) store(z[c][m], zero());
  }
  for (int64_t b = 0; b < d.K / F::kSize; ++b) {
    multiply_block<F, C>(w, b * F::kBytes, d.a, d.M, b * F::kSize / kGroup, z);
  }
  for (int64_t m = 0; m < d.M; ++m) {
    for (int c = 0; c < C; ++c) {
      for (int64_t n = n0 + c, l = 0; l < kLanes && n < d.N; ++l, n += run) d.z[m * d.ldz + n] = z[c][m][l];
    }
  }
}

// Weights are read in kLanes streams, each a run of rows. Two rows of each run at a time halve the loads of activations,
// but are worse decoded: at 4 rows on an Ice Lake core 0.8 of the speed in Q4_K, 0.9 in Q6_K and Q8_0, at 32 rows 0.97,
// 1.14 and 1.06.
template <class F>
void register_dots(const Dots& d) {
  int64_t run = (d.N + kLanes - 1) / kLanes, n0 = 0;
  for (; d.M >= 16 && n0 + 1 < run; n0 += 2) multiply_runs<F, 2>(d, n0, run);
  for (; n0 < run; ++n0) multiply_runs<F, 1>(d, n0, run);
}

}  // namespace moefuse::MOEFUSE_ISA
