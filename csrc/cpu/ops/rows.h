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

// `count` rows from `row` on. A call at T=1 has thousands.
inline void rows_of(const Weight& w, int64_t expert, int64_t row, int64_t count, const char** out) {
  for (int64_t n = 0; n < count;) {
    const char* at = row_of(w, expert, row + n);
    int64_t strip = w.interleaved ? kStripRows - (row + n) % kStripRows : count;
    int64_t stride = w.interleaved ? 0 : w.stride_n;
    for (int64_t end = n + strip < count ? n + strip : count; n < end; ++n, at += stride) out[n] = at;
  }
}

inline float element(Tensor x, int64_t i) {
  float value;
  kernels().decode(x.dtype, row_of(x, i, 1), &value, 1);
  return value;
}

}  // namespace moefuse
