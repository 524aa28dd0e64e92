// Working memory of the calling thread, kept between calls. Slots are told apart by their use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moefuse {

enum class Slot { activations, up_activations, hidden, products, rows, logits, gradients, count };

// At least `bytes` bytes, 64-byte aligned, valid until this thread asks for the slot again; contents undefined.
// Throws std::bad_alloc.
char* scratch(Slot slot, int64_t bytes);

inline float* scratch_floats(Slot slot, int64_t floats) {
  return reinterpret_cast<float*>(scratch(slot, floats * static_cast<int64_t>(sizeof(float))));
}

// Call at the end of an op: gives back what is too large to keep.
void trim_scratch();

}  // namespace moefuse
