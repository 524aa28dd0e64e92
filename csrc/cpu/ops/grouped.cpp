#include "ops/grouped.h"

#include <algorithm>

namespace moefuse {
namespace {

// Bytes of kDepth of a task's weights: they and the next, which are being prefetched, share a 512 KiB L2. Blocks are
// read once for all rows, and the longer the run the better: Q4_K at T=8 took 8% less time on a Zen 5.
constexpr int64_t kDepthBytes = 128 << 10, kBlockBytes = 512 << 10;

constexpr int64_t kPackRows = 8;

}  // namespace

Phase pack_phase(Tensor x, int64_t rows, const Packed& packed) {
  return {parts_of(rows, kPackRows), [=](int64_t task, int64_t, int) {
            int64_t end = std::min(rows, (task + 1) * kPackRows);
            for (int64_t i = task * kPackRows; i < end; ++i) {
              packed.format->pack(x.dtype, row_of(x, i, packed.columns), packed.columns, packed.padded(),
                                  packed.row(i));
            }
          }};
}

Phase router_phase(const Router& router, const Packed& packed, const Grid& grid, float* logits) {
  return {grid.tasks(), [&, logits](int64_t task, int64_t next, int) {
            int64_t E = router.weight.N;
            Workspace ws;
            Cell c = grid.cell(task);
            for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = packed.row(c.row + m);
            rows_of(router.weight, 0, c.column, c.columns, ws.w);
            const char* ahead = next < 0 ? nullptr : row_of(router.weight, 0, grid.cell(next).column);
            float* z = logits + c.row * E + c.column;
            packed.format->dots({ws.a, ws.w, c.rows, c.columns, packed.columns, z, E, ahead});
            for (int64_t n = 0; router.logit_bias && n < c.columns; ++n) {
              float b = element(router.logit_bias, c.column + n);
              for (int64_t m = 0; m < c.rows; ++m) z[m * E + n] += b;
            }
          }};
}

Grid::Grid(Indices offsets, int64_t N, int64_t weight_rows, int64_t K, const Format& format, int64_t unit, int threads)
    : N_(N) {
  int64_t row_tiles = 0;
  for (int64_t e = 0; e + 1 < offsets.size; ++e) {
    int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0) continue;
    int64_t tiles = parts_of(rows, kMaxRows);
    segments_.push_back({e, offsets[e], rows, tiles, 0});
    row_tiles += tiles;
    rows_ += rows;
  }
  // Numbers are multiplied over kDepth at a time, blocks over the whole of K.
  int64_t k = std::max<int64_t>(format.block, format.block == 1 ? std::min(K, kDepth) : K);
  int64_t column_bytes = weight_rows * k / format.block * format.block_bytes;
  width_ = std::clamp((format.block == 1 ? kDepthBytes : kBlockBytes) / column_bytes, unit, kMaxColumns / weight_rows);
  while (width_ > unit && row_tiles * (N / width_) < 8 * threads) width_ /= 2;
  width_ = std::max(unit, width_ / unit * unit);

  int64_t column_tiles = parts_of(N, width_);
  for (Segment& segment : segments_) {
    segment.first_task = tasks_;
    tasks_ += segment.tiles * column_tiles;
  }
}

Cell Grid::cell(int64_t task) const {
  auto after = std::upper_bound(segments_.begin(), segments_.end(), task,
                                [](int64_t t, const Segment& s) { return t < s.first_task; });
  const Segment& s = *(after - 1);
  // Row tiles vary fastest: they reuse the weights of their columns from cache.
  int64_t column = (task - s.first_task) / s.tiles * width_;
  int64_t tile = (task - s.first_task) % s.tiles;
  int64_t begin = s.rows * tile / s.tiles;
  int64_t end = s.rows * (tile + 1) / s.tiles;
  return {s.expert, s.row + begin, end - begin, column, std::min(width_, N_ - column)};
}

}  // namespace moefuse
