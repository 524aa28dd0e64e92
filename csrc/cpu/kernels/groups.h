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

}  // namespace moefuse::MOEFUSE_ISA
