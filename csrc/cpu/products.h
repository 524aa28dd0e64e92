// What the ops built on the product kernel share: packed activation rows, and how a grouped product is cut into
// tasks of (expert, row block, column block).
#pragma once

#include <vector>

#include "core.h"
#include "pool.h"

namespace moefuse {

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

inline const char* row_of(Tensor x, int64_t row, int64_t columns) {
  return static_cast<const char*>(x.data) + row * columns * size_of(x.dtype);
}

inline char* row_of(Output x, int64_t row, int64_t columns) {
  return static_cast<char*>(x.data) + row * columns * size_of(x.dtype);
}

inline const char* row_of(const Weight& w, int64_t expert, int64_t row) {
  return static_cast<const char*>(w.data) + expert * w.stride_e + row * w.stride_n;
}

// The format for this weight when its activations come from a tensor of this dtype.
inline const Format& format_of(const Weight& w, Dtype activations) {
  int type = static_cast<int>(w.type);
  if (type < kPlainTypes) return kernels().formats[type][activations == Dtype::bf16 ? 1 : 0];
  const BlockFormat& blocks = kernels().blocks[type - kPlainTypes];
  return w.exact ? blocks.exact : blocks.rounded;
}

// Rows in the form a weight format wants them.
struct Packed {
  const Format* format;
  char* data;
  int64_t columns;

  int64_t padded() const { return round_up(columns, kChunk); }
  // One line more than needed: f32 weights at K=768, 4 rows, went from 58 to 84 GFLOP/s on a Zen 3 core; 16-bit
  // weights showed no clear change.
  int64_t pitch() const { return offset(padded()) + 64; }
  int64_t offset(int64_t column) const { return column / format->pack_unit * format->act_bytes; }
  char* row(int64_t i) const { return data + i * pitch(); }
};

// A phase that packs rows of x [rows, packed.columns].
Phase pack_phase(Tensor x, int64_t rows, const Packed& packed);

// One task: rows [row, row + rows) of expert-major positions against columns [column, column + columns).
struct Cell {
  int64_t expert;
  int64_t row, rows;
  int64_t column, columns;
};

class Grid {
 public:
  // N columns, each of `weight_rows` rows of K elements in `format`; they are cut at multiples of `unit`.
  Grid(const int32_t* offsets, int64_t E, int64_t N, int64_t weight_rows, int64_t K, const Format& format,
       int64_t unit, int threads);

  int64_t tasks() const { return tasks_; }
  int64_t rows() const { return rows_; }
  Cell cell(int64_t task) const;

 private:
  struct Segment {
    int64_t expert, row, rows, blocks, first_task;
  };
  std::vector<Segment> segments_;  // experts that have rows
  int64_t N_;
  int64_t width_ = 0;  // columns per block
  int64_t tasks_ = 0;
  int64_t rows_ = 0;
};

// What one task works in, on its own stack.
struct Workspace {
  const char* a[kMaxRows];
  const char* w[kMaxColumns];
  alignas(64) float z[kMaxRows * kMaxColumns];
};

// x * rsqrt(mean(x^2) + eps) * weight; out may be x.
void rms_norm(const float* x, Tensor weight, float eps, int64_t H, float* out);

// float(x[i]) for a tensor of any dtype.
float element(Tensor x, int64_t i);

}  // namespace moefuse
