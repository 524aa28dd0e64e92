// Activations as the integer products with blocks take them.
#pragma once

#include "blocks.h"

namespace moefuse::MOEFUSE_ISA {

// Activations of the integer products: 32 at a time, with the sums that offsets are multiplied with.
struct Group {
  int8_t q[32];
  float scale;
  float halves[2];  // scale * the sum of q over 16
  float sum;
  int16_t sides[3][2];  // of each 16 and of all: the sum of the first two of every four, and of the other two
};
constexpr int64_t kGroup = 32;

// What the products of some steps of four elements add up in before they are widened, and how many steps that may be.
#ifdef MOEFUSE_VNNI
using Sums = Ints;
template <class F>
constexpr int kSpan = F::kGroup / 4;
#else
using Sums = Shorts;
template <class F>
constexpr int kSpan = F::kSpan;
#endif

// Where products take unsigned weights alone, signed ones are raised to be such.
template <class F>
constexpr bool kRaised = kFourProducts && F::kSigned;
template <class F>
constexpr int16_t kCentre = kRaised<F> ? 128 : F::kCentre;

template <class F>
inline Bytes raise(Bytes q) {
  return kRaised<F> ? q ^ repeat(0x80) : q;
}

template <class F>
inline __attribute__((always_inline)) Sums add_step(Sums sums, Bytes w, Bytes x, bool first) {
#ifdef MOEFUSE_VNNI
  return add_products(first ? Ints{} : sums, w, x);
#else
  Shorts product = pair_sums<F::kSigned>(w, x);
  return first ? product : add(sums, product);
#endif
}

// Sums of products less the centre of every weight times its activation.
template <class F>
inline Sums off_centre(Sums sums, const Group& group, int part) {
  if constexpr (kCentre<F> <= 0) return sums;
  const int16_t* sides = group.sides[F::kGroup == kGroup ? 2 : part];
  auto both = reinterpret_cast<Shorts>(repeat4(sides));
#ifdef MOEFUSE_VNNI
  return sums - widen_pairs(both, Shorts{} + kCentre<F>);
#else
  return add(sums, both * static_cast<int16_t>(-kCentre<F>));
#endif
}

// The sums of a lane, times its integer scale.
template <class F>
inline Ints widen(Sums sums, Shorts scale) {
#ifdef MOEFUSE_VNNI
  return F::kScales ? sums * low_halves(scale) : sums;
#else
  return F::kScales ? widen_pairs(sums, scale) : widen_pairs(sums);
#endif
}

// Blocks with integer scales have one factor d: where there are no offsets, it is multiplied with the groups' sum.
template <class F>
constexpr bool kFactorLast = F::kScales && !F::kHasOffsets;

// acc + what the sums of group g add to a row, but for a factor that comes last.
template <class F>
inline Vec add_group(Ints sums, const Group& group, int64_t g, const Vec* d, const Vec* offset, Vec acc) {
  constexpr int kParts = kGroup / F::kGroup;
  Vec scale = splat(group.scale);
  if constexpr (kFactorLast<F>) return fma(to_float(sums), scale, acc);
  acc = fma(to_float(sums) * scale, d[F::kScales ? 0 : g], acc);
#pragma GCC unroll 2
  for (int part = 0; F::kHasOffsets && part < kParts; ++part) {
    acc = fma(splat(kParts == 1 ? group.sum : group.halves[part]), offset[g * kParts + part], acc);
  }
  return acc;
}

// Where every part of a group is a number of its own: acc + what its sums add to a row.
template <class F>
inline Vec add_part(Ints sums, const Group& group, int part, Vec factor, Vec offset, Vec acc) {
  acc = fma(to_float(sums) * splat(group.scale), factor, acc);
  return F::kHasOffsets ? fma(splat(F::kGroup == kGroup ? group.sum : group.halves[part]), offset, acc) : acc;
}

// Where the weight rows lie that come after `count` from n0 on: of this task or of the next. Where there are none, these
// are fetched again, which costs nothing.
inline const char* next_rows(const Dots& d, int64_t n0, int64_t count) {
  return n0 + count < d.N ? d.w[n0 + count] : d.next != nullptr ? d.next : d.w[n0];
}

// An address to fetch, which may lie outside of the tensor.
inline const char* behind(const char* p, int64_t bytes) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes));
}

// While a part of a block is multiplied, its share of blocks of `Rows` weight rows that come later is fetched line by
// line, into L2 unless they come soon: no processor guesses from the order in which fields are read that they lie behind
// each other.
template <class F, int64_t Rows, int Parts, int Level = 2>
inline __attribute__((always_inline)) void fetch(const char* ahead, int64_t part) {
  constexpr int64_t kLines = ((Rows * F::kBytes + 63) / 64 + Parts - 1) / Parts;
#pragma GCC unroll 64
  for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(behind(ahead, 64 * (part * kLines + i)), 0, Level);
}

}  // namespace moefuse::MOEFUSE_ISA
