// The instruction set in use: the best this machine has, or the one asked for.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace moefuse {

const Kernels& kernels();

inline const BlockFormat& block_format(WeightType type, bool interleaved = false) {
  if (type == WeightType::fp8) return kernels().fp8;
  return (interleaved ? kernels().interleaved : kernels().blocks)[static_cast<int>(type) - kPlainTypes];
}

// The names of those that this machine has, best first.
std::vector<std::string> isas();

// Throws std::invalid_argument for one that this machine lacks.
void set_isa(const std::string& name);

}  // namespace moefuse
