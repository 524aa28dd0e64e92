// Products with a transposed weight, read as it lies: y[m, n] = sum over k of a[m, k] * w[k, n].
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

// acc = rows times columns [column, column + width) of weight rows 0 to K; `weight_row(k)` is where row k begins.
template <class WeightRow>
void multiply_transposed(const PanelRows& rows, int64_t K, WeightRow weight_row, Dtype weight_dtype, int64_t column,
                         int64_t width, PanelBuffers& buffers) {
  const Kernels& kern = kernels();
  int64_t padded = round_up(width, kChunk);
  int64_t bytes = size_of(weight_dtype);
  for (int64_t m = 0; K == 0 && m < rows.count; ++m) {
    for (int64_t n = 0; n < padded; ++n) buffers.acc[m * kPanelColumns + n] = 0;
  }
  for (int64_t k0 = 0; k0 < K; k0 += kPanelDepth) {
    int64_t depth = K - k0 < kPanelDepth ? K - k0 : kPanelDepth;
    for (int64_t m = 0; m < rows.count; ++m) {
      float line[kPanelDepth];
      kern.decode(rows.dtype, rows.a[m] + k0 * size_of(rows.dtype), line, depth);
      for (int64_t k = 0; k < depth; ++k) buffers.panel[k * rows.count + m] = line[k];
    }
    const char* first = weight_row(k0);
    int64_t step = depth > 1 ? weight_row(k0 + 1) - first : 0;
    const float* strip = buffers.strip;
    int64_t pitch = kPanelColumns;
    if (weight_dtype == Dtype::f32 && padded == width && weight_row(k0 + depth - 1) == first + (depth - 1) * step) {
      strip = reinterpret_cast<const float*>(first) + column;
      pitch = step / 4;
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        float* to = buffers.strip + k * kPanelColumns;
        kern.decode(weight_dtype, weight_row(k0 + k) + column * bytes, to, width);
        for (int64_t n = width; n < padded; ++n) to[n] = 0;
      }
    }
    // The next rows are fetched a few at a time between the products: a burst would stall on the line buffers.
    int64_t ahead = k0 + kPanelDepth;
    int64_t ahead_end = K - ahead < kPanelDepth ? K : ahead + kPanelDepth;
    int64_t chunks = padded / kChunk;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t k = ahead + chunk; k < ahead_end; k += chunks) {
        const char* from = weight_row(k) + column * bytes;
        for (int64_t at = 0; at < width * bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
      }
      kern.outer(buffers.panel, rows.count, strip + chunk * kChunk, pitch, depth, rows.count, kChunk,
                 buffers.acc + chunk * kChunk, kPanelColumns, k0 == 0);
    }
  }
}

}  // namespace moefuse
