// Rows and single elements of tensors of any type.
#pragma once

#include "core.h"

namespace moefuse {

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

inline const char* row_of(Tensor x, int64_t row, int64_t columns) {
  return static_cast<const char*>(x.data) + row * columns * size_of(x.dtype);
}

inline char* row_of(Output x, int64_t row, int64_t columns) {
  return static_cast<char*>(x.data) + row * columns * size_of(x.dtype);
}

// Of an interleaved row, where its strip begins.
inline const char* row_of(const Weight& w, int64_t expert, int64_t row) {
  if (w.interleaved) row -= row % kStripRows;
  return static_cast<const char*>(w.data) + expert * w.stride_e + row * w.stride_n;
}

inline float element(Tensor x, int64_t i) {
  float value;
  kernels().decode(x.dtype, row_of(x, i, 1), &value, 1);
  return value;
}

}  // namespace moefuse
