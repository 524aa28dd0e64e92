// Products whose weight rows lie across the sum: y[m, n] = sum over k of a[m, k] * w[k, n], w read as it lies.
#pragma once

#include "core.h"
#include "products.h"

namespace moefuse {

// Rows and columns of a block, and how much of the sum is decoded at a time: 188 KiB, inside a 512 KiB L2.
constexpr int64_t kMirrorRows = 96;
constexpr int64_t kMirrorColumns = 256;
constexpr int64_t kMirrorDepth = 64;

// What one worker needs.
struct MirrorBuffers {
  float panel[kMirrorDepth * kMirrorRows];     // rows of a, turned
  float strip[kMirrorDepth * kMirrorColumns];  // rows of w
  float acc[kMirrorRows * kMirrorColumns];     // the result, rows of kMirrorColumns
};

// `MirrorBuffers` of every worker, in this thread's scratch.
MirrorBuffers* mirror_buffers(int threads);

struct MirrorRows {
  const char* a[kMirrorRows];
  Dtype dtype;
  int64_t count;
};

// acc = rows times columns [column, column + width) of weight rows 0 to K; `weight_row(k)` is where row k begins.
template <class WeightRow>
void mirror(const MirrorRows& rows, int64_t K, WeightRow weight_row, Dtype weight_dtype, int64_t column,
            int64_t width, MirrorBuffers& buffers) {
  const Kernels& kern = kernels();
  int64_t padded = round_up(width, kChunk);
  int64_t bytes = size_of(weight_dtype);
  for (int64_t m = 0; K == 0 && m < rows.count; ++m) {
    for (int64_t n = 0; n < padded; ++n) buffers.acc[m * kMirrorColumns + n] = 0;
  }
  for (int64_t k0 = 0; k0 < K; k0 += kMirrorDepth) {
    int64_t depth = K - k0 < kMirrorDepth ? K - k0 : kMirrorDepth;
    for (int64_t m = 0; m < rows.count; ++m) {
      float line[kMirrorDepth];
      kern.decode(rows.dtype, rows.a[m] + k0 * size_of(rows.dtype), line, depth);
      for (int64_t k = 0; k < depth; ++k) buffers.panel[k * rows.count + m] = line[k];
    }
    const char* first = weight_row(k0);
    int64_t step = depth > 1 ? weight_row(k0 + 1) - first : 0;
    const float* strip = buffers.strip;
    int64_t pitch = kMirrorColumns;
    if (weight_dtype == Dtype::f32 && padded == width && weight_row(k0 + depth - 1) == first + (depth - 1) * step) {
      strip = reinterpret_cast<const float*>(first) + column;
      pitch = step / 4;
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        float* to = buffers.strip + k * kMirrorColumns;
        kern.decode(weight_dtype, weight_row(k0 + k) + column * bytes, to, width);
        for (int64_t n = width; n < padded; ++n) to[n] = 0;
      }
    }
    // The next rows are fetched a few at a time between the products: a burst would stall on the line buffers.
    int64_t ahead = k0 + kMirrorDepth;
    int64_t ahead_end = K - ahead < kMirrorDepth ? K : ahead + kMirrorDepth;
    int64_t turns = padded / kChunk;
    for (int64_t turn = 0; turn < turns; ++turn) {
      for (int64_t k = ahead + turn; k < ahead_end; k += turns) {
        const char* from = weight_row(k) + column * bytes;
        for (int64_t at = 0; at < width * bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
      }
      kern.outer(buffers.panel, rows.count, strip + turn * kChunk, pitch, depth, rows.count, kChunk,
                 buffers.acc + turn * kChunk, kMirrorColumns, k0 == 0);
    }
  }
}

// Blocks of at most kMirrorRows positions, each inside one expert.
struct RowBlock {
  int64_t expert, row, rows;
};

std::vector<RowBlock> row_blocks(const int32_t* offsets, int64_t E);

}  // namespace moefuse
