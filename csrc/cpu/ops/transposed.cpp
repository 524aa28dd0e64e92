#include "ops/transposed.h"

#include <algorithm>

#include "runtime/scratch.h"

namespace moefuse {
namespace {

bool is_blocks(const Weight& w) { return static_cast<int>(w.type) >= kPlainTypes; }

// Of so many elements of a row, whole blocks where it has such, and of its whole strip where rows are interleaved.
int64_t bytes_of(const Weight& w, int64_t columns) {
  if (!is_blocks(w)) return columns * size_of(w.dtype());
  const Format& form = block_format(w.type).exact;
  return columns / form.block * form.block_bytes * (w.interleaved ? kStripRows : 1);
}

// Columns [column, column + width) of weight rows [k0, k0 + depth) as numbers, zeros up to `padded`.
void decode_strip(const WeightRows& weight, int64_t k0, int64_t depth, int64_t column, int64_t width, int64_t padded,
                  float* strip) {
  int64_t end = k0 + depth;
  for (int64_t k = k0; k < end;) {
    const Weight& own = weight.of(k);
    int64_t stop = k < weight.count ? std::min(end, weight.count) : end;
    int64_t at = bytes_of(own, column);
    float* to = strip + (k - k0) * kPanelColumns;
    if (is_blocks(own)) {
      const char* rows[kPanelDepth];
      for (int64_t i = k; i < stop; ++i) rows[i - k] = weight[i] + at;
      block_format(own.type, own.interleaved).decode(rows, stop - k, width, to, kPanelColumns);
    } else {
      for (int64_t i = k; i < stop; ++i, to += kPanelColumns) {
        kernels().decode(own.dtype(), weight[i] + at, to, width);
        std::fill(to + width, to + padded, 0.0f);
      }
    }
    k = stop;
  }
}

}  // namespace

PanelBuffers* panel_buffers(int threads) {
  return reinterpret_cast<PanelBuffers*>(
      scratch(Slot::rows, threads * static_cast<int64_t>(sizeof(PanelBuffers))));
}

std::vector<Panel> panels_of(Indices offsets) {
  std::vector<Panel> panels;
  for (int64_t e = 0; e + 1 < offsets.size; ++e) {
    int64_t rows = offsets[e + 1] - offsets[e];
    int64_t count = parts_of(rows, kPanelRows);
    for (int64_t i = 0; i < count; ++i) {
      int64_t begin = rows * i / count;
      panels.push_back({e, offsets[e] + begin, rows * (i + 1) / count - begin});
    }
  }
  return panels;
}

void multiply_transposed(const PanelRows& rows, int64_t K, const WeightRows& weight, int64_t column, int64_t width,
                         PanelBuffers& buffers) {
  const Kernels& kern = kernels();
  int64_t padded = round_up(width, kChunk);
  for (int64_t m = 0; K == 0 && m < rows.count; ++m) {
    for (int64_t n = 0; n < padded; ++n) buffers.acc[m * kPanelColumns + n] = 0;
  }
  for (int64_t k0 = 0; k0 < K; k0 += kPanelDepth) {
    int64_t depth = std::min(kPanelDepth, K - k0);
    for (int64_t m = 0; m < rows.count; ++m) {
      float line[kPanelDepth];
      kern.decode(rows.dtype, rows.a[m] + k0 * size_of(rows.dtype), line, depth);
      for (int64_t k = 0; k < depth; ++k) buffers.panel[k * rows.count + m] = line[k];
    }
    const char* first = weight[k0];
    int64_t step = depth > 1 ? weight[k0 + 1] - first : 0;
    const float* strip = buffers.strip;
    int64_t pitch = kPanelColumns;
    bool numbers = weight.of(k0).type == WeightType::f32 && weight.of(k0 + depth - 1).type == WeightType::f32;
    if (numbers && padded == width && weight[k0 + depth - 1] == first + (depth - 1) * step) {
      strip = reinterpret_cast<const float*>(first) + column;
      pitch = step / 4;
    } else {
      decode_strip(weight, k0, depth, column, width, padded, buffers.strip);
    }
    // The next rows are fetched a few at a time between the products: a burst would stall on the line buffers.
    int64_t ahead = k0 + kPanelDepth;
    int64_t ahead_end = std::min(K, ahead + kPanelDepth);
    int64_t chunks = padded / kChunk;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t k = ahead + chunk; k < ahead_end; k += chunks) {
        const char* from = weight[k] + bytes_of(weight.of(k), column);
        int64_t bytes = bytes_of(weight.of(k), width);
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
      }
      kern.outer(buffers.panel, rows.count, strip + chunk * kChunk, pitch, depth, rows.count, kChunk,
                 buffers.acc + chunk * kChunk, kPanelColumns, k0 == 0);
    }
  }
}

}  // namespace moefuse
