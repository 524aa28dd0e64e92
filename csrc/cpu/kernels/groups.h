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

// Where the weight rows lie that come after `count` from n0 on: of this task or of the next. Where there are none, these
// are fetched again, which costs nothing.
inline const char* next_rows(const Dots& d, int64_t n0, int64_t count) {
  return n0 + count < d.N ? d.w[n0 + count] : d.next != nullptr ? d.next : d.w[n0];
}

// An address to fetch, which may lie outside of the tensor.
inline const char* behind(const char* p, int64_t bytes) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes));
}

// While a chunk is multiplied, its share of the blocks of the next `Rows` weight rows is fetched into L2, line by line:
// these lie behind each other, and no processor guesses that from the order in which fields are read.
template <class F, int64_t Rows, int Chunk>
inline __attribute__((always_inline)) void fetch(const char* ahead) {
  constexpr int64_t kLines = (Rows * F::kBytes + 63) / 64;
#pragma GCC unroll 64
  for (int64_t i = kLines * Chunk / F::kChunks; i < kLines * (Chunk + 1) / F::kChunks; ++i) {
    __builtin_prefetch(behind(ahead, 64 * i), 0, 2);
  }
}

}  // namespace moefuse::MOEFUSE_ISA
