// Integer products with blocks in the file's order where an instruction adds four products of bytes to a lane.
#pragma once

#include "groups.h"

namespace moefuse::MOEFUSE_ISA {

// z[c][m] += the products of row m with the block at `at` of C times kLanes weight rows, whose first group of
// activations is `first`: as many slices as fill 16 registers are decoded and multiplied with every row. Meanwhile as
// many bytes are fetched from `ahead` on.
template <class F, int C>
inline __attribute__((always_inline)) void multiply_block(const Columns (&from)[C], int64_t at, const char* const* rows,
                                                          int64_t M, int64_t first, const char* ahead,
                                                          float (*z)[kMaxRows][kLanes]) {
  constexpr int kGroups = F::kSize / F::kGroup, kParts = kGroup / F::kGroup, kSlices = F::kGroup / 16;
  constexpr int kVecs = 4 * ((F::kChunkSlices - 1) * F::kChunkStep + 1);
  constexpr int kHeld = 4 / C < F::kChunkSlices ? 4 / C : F::kChunkSlices;  // slices in registers
  Vec factor[C][kGroups], offset[C][kGroups];
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    Vec d;
    Shorts scale[kGroups];
    F::head(from[c], at, {&d, scale, offset[c]});
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) factor[c][g] = F::kScales ? d * to_float(low_halves(scale[g])) : d;
  }

  each_chunk<F>([&]<int Chunk>() __attribute__((always_inline)) {
    fetch<F, C * kLanes, F::kChunks>(ahead, Chunk);
    Bytes q[C][kVecs];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      F::template chunk<Chunk>(from[c], at, q[c]);
#pragma GCC unroll 16
      for (int i = 0; i < kVecs; ++i) q[c][i] = raise<F>(q[c][i]);
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
          Sums sums[C];
#pragma GCC unroll 8
          for (int i = 0; i < F::kGroup / 4; ++i) {
            Bytes four = repeat4(x.q + 16 * part + 4 * i);
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) sums[c] = add_step<F>(sums[c], q[c][4 * s * F::kChunkStep + i], four, i == 0);
          }
#pragma GCC unroll 2
          for (int c = 0; c < C; ++c) {
            acc[c] = add_part<F>(off_centre<F>(sums[c], x, part), x, part, factor[c][group], offset[c][group], acc[c]);
          }
        }
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) store(z[c][m], acc[c]);
      }
    }
  });
}

// All of K: z[c][m] is row m with the weight rows of from[c]. `next` is where the weight rows of the next call lie.
template <class F, int C>
void multiply_rows(const Dots& d, const Columns (&from)[C], const char* next, float (*z)[kMaxRows][kLanes]) {
  for (int c = 0; c < C; ++c) {
    for (int64_t m = 0; m < d.M; ++m) store(z[c][m], zero());
  }
  for (int64_t b = 0; b < d.K / F::kSize; ++b) {
    const char* ahead = behind(next, b * C * kLanes * F::kBytes);
    multiply_block<F, C>(from, b * F::kBytes, d.a, d.M, b * F::kSize / kGroup, ahead, z);
  }
}

// C times kLanes rows from n0 on.
template <class F, int C>
void multiply_strips(const Dots& d, int64_t n0) {
  alignas(64) float z[C][kMaxRows][kLanes];
  const char* w[C][kLanes];
  Columns from[C];
  for (int c = 0; c < C; ++c) {
    // Lanes past the end repeat the last row; their sums are dropped.
    for (int64_t l = 0, n = n0 + c * kLanes; l < kLanes; ++l, ++n) w[c][l] = d.w[n < d.N ? n : d.N - 1];
    from[c] = Columns(w[c], 0, n0 + c * kLanes);
  }
  multiply_rows<F>(d, from, next_rows(d, n0, C * kLanes), z);
  for (int64_t m = 0; m < d.M; ++m) {
    for (int c = 0; c < C; ++c) {
      for (int64_t n = n0 + c * kLanes, l = 0; l < kLanes && n < d.N; ++l, ++n) d.z[m * d.ldz + n] = z[c][m][l];
    }
  }
}

// Two strips at a time halve the loads of activations, but are worse decoded: at 4 rows on an Ice Lake core 0.8 of the
// speed in Q4_K, 0.9 in Q6_K and Q8_0, at 32 rows 0.97, 1.14 and 1.06.
template <class F>
void register_dots(const Dots& d) {
  int64_t n0 = 0;
  for (; d.M >= 16 && n0 + kLanes < d.N; n0 += 2 * kLanes) multiply_strips<F, 2>(d, n0);
  for (; n0 < d.N; n0 += kLanes) multiply_strips<F, 1>(d, n0);
}

}  // namespace moefuse::MOEFUSE_ISA
