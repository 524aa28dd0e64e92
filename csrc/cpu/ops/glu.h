// Where gate and up stand in a row of pre-activations, together or apart, for the ops that read or write them.
#pragma once

#include "ops/rows.h"

namespace moefuse {

constexpr int64_t kGluStrip = 512;

// A row of I gates and I ups: in one row of 2 I in the layout, or in a row of each tensor; ungated, I gates alone.
struct GateUpRows {
  int64_t I;
  bool gated, together, interleaved;

  GateUpRows(int64_t I_, bool gated_, bool apart, Layout layout)
      : I(I_), gated(gated_), together(gated_ && !apart), interleaved(together && layout == Layout::interleaved) {}

  int64_t width() const { return together ? 2 * I : I; }  // of a row of gate_up
  int64_t gate_column(int64_t i) const { return interleaved ? 2 * i : i; }
  int64_t up_column(int64_t i) const { return interleaved ? 2 * i + 1 : I + i; }

  // Gates and ups [begin, begin + n) of one row, n at most kGluStrip.
  void decode(Tensor gate_up, Tensor up, int64_t row, int64_t begin, int64_t n, float* gates, float* ups) const {
    const Kernels& k = kernels();
    const char* from = row_of(gate_up, row, width());
    int64_t bytes = size_of(gate_up.dtype);
    if (interleaved) {
      float both[2 * kGluStrip];
      k.decode(gate_up.dtype, from + 2 * begin * bytes, both, 2 * n);
      for (int64_t i = 0; i < n; ++i) {
        gates[i] = both[2 * i];
        ups[i] = both[2 * i + 1];
      }
      return;
    }
    k.decode(gate_up.dtype, from + begin * bytes, gates, n);
    if (together) k.decode(gate_up.dtype, from + (I + begin) * bytes, ups, n);
    if (up) k.decode(up.dtype, row_of(up, row, I) + begin * size_of(up.dtype), ups, n);
  }

  // The way back.
  void encode(const float* gates, const float* ups, Output gate_up, Output up, int64_t row, int64_t begin,
              int64_t n) const {
    const Kernels& k = kernels();
    char* to = row_of(gate_up, row, width());
    int64_t bytes = size_of(gate_up.dtype);
    if (interleaved) {
      float both[2 * kGluStrip];
      for (int64_t i = 0; i < n; ++i) {
        both[2 * i] = gates[i];
        both[2 * i + 1] = ups[i];
      }
      k.encode(both, gate_up.dtype, to + 2 * begin * bytes, 2 * n);
      return;
    }
    k.encode(gates, gate_up.dtype, to + begin * bytes, n);
    if (together) k.encode(ups, gate_up.dtype, to + (I + begin) * bytes, n);
    if (gated && !together) k.encode(ups, up.dtype, row_of(up, row, I) + begin * size_of(up.dtype), n);
  }
};

}  // namespace moefuse
