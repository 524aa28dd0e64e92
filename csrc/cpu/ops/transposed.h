// Products with a transposed weight, numbers or blocks, read as it lies: y[m, n] = sum over k of a[m, k] * w[k, n].
#pragma once

#include <vector>

#include "ops/rows.h"

namespace moefuse {

// Rows and columns of a panel, and how much of the sum is decoded at a time: 188 KiB, inside a 512 KiB L2.
constexpr int64_t kPanelRows = 96;
constexpr int64_t kPanelColumns = 256;
constexpr int64_t kPanelDepth = 64;

// What one worker works in.
struct PanelBuffers {
  float panel[kPanelDepth * kPanelRows];     // rows of a, transposed
  float strip[kPanelDepth * kPanelColumns];  // rows of w
  float acc[kPanelRows * kPanelColumns];     // the result, rows of kPanelColumns
};

// `PanelBuffers` of every worker, in this thread's scratch.
PanelBuffers* panel_buffers(int threads);

// At most kPanelRows positions, all of one expert.
struct Panel {
  int64_t expert, row, rows;
};

std::vector<Panel> panels_of(Indices offsets);

// Where the rows of a panel begin; `row_at(p)` says it of position p.
struct PanelRows {
  const char* a[kPanelRows];
  Dtype dtype;
  int64_t count;

  template <class RowAt>
  PanelRows(Dtype dtype_, const Panel& panel, RowAt row_at) : dtype(dtype_), count(panel.rows) {
    for (int64_t m = 0; m < count; ++m) a[m] = row_at(panel.row + m);
  }
};

// The weight rows that a sum goes over, all of one expert: `count` of the first weight, then those of the second.
struct WeightRows {
  int64_t expert;
  const Weight& first;
  int64_t count;
  const Weight* second = nullptr;

  const Weight& of(int64_t row) const { return row < count ? first : *second; }
  const char* operator[](int64_t row) const { return row_of(of(row), expert, row < count ? row : row - count); }
};

// acc = rows times columns [column, column + width) of weight rows 0 to K. Blocks are decoded where they stand, so a
// column is a multiple of kPanelColumns, which every block divides.
void multiply_transposed(const PanelRows& rows, int64_t K, const WeightRows& weight, int64_t column, int64_t width,
                         PanelBuffers& buffers);

}  // namespace moefuse
