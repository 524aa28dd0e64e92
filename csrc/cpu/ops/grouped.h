// A grouped product of packed rows, cut into tasks of (expert, rows, columns): what the ops with such a product share.
#pragma once

#include <vector>

#include "ops/rows.h"
#include "runtime/pool.h"

namespace moefuse {

// The format for this weight when its activations come from a tensor of this dtype.
inline const Format& format_of(const Weight& w, Dtype activations) {
  int type = static_cast<int>(w.type);
  if (type < kPlainTypes) return kernels().formats[type][activations == Dtype::bf16 ? 1 : 0];
  const BlockFormat& blocks = block_format(w.type, w.interleaved);
  bool exact = w.exact || (w.type == WeightType::fp8 && activations != Dtype::bf16);
  return exact ? blocks.exact : blocks.rounded;
}

// Which rows of x and of the result (or its gradient) a position stands for.
struct Positions {
  Indices order;
  int64_t per_x_row;  // assignments that read one row of x
  bool gather, scatter;

  Positions(const Plan& plan, int64_t x_rows, bool gather_, bool scatter_)
      : order(plan.order), per_x_row(x_rows > 0 && plan.S() > x_rows ? plan.S() / x_rows : 1), gather(gather_),
        scatter(scatter_) {}

  int64_t x(int64_t p) const { return gather ? order[p] / per_x_row : p; }
  int64_t y(int64_t p) const { return scatter ? order[p] : p; }
};

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
  Grid(Indices offsets, int64_t N, int64_t weight_rows, int64_t K, const Format& format, int64_t unit, int threads);

  int64_t tasks() const { return tasks_; }
  int64_t rows() const { return rows_; }
  Cell cell(int64_t task) const;

 private:
  struct Segment {
    int64_t expert, row, rows, tiles, first_task;
  };
  std::vector<Segment> segments_;  // experts that have rows
  int64_t N_;
  int64_t width_ = 0;  // columns of a task
  int64_t tasks_ = 0;
  int64_t rows_ = 0;
};

// A phase that makes logits [T, E] of packed rows [T, H], which `grid` cuts into tasks.
Phase router_phase(const Router& router, const Packed& packed, const Grid& grid, float* logits);

// What one task works in, on its own stack.
struct Workspace {
  const char* a[kMaxRows];
  const char* w[kMaxColumns];
  alignas(64) float z[kMaxRows * kMaxColumns];
};

}  // namespace moefuse
