#include "products.h"

#include <algorithm>
#include <cmath>

namespace moefuse {
namespace {

// Bytes of one K block of a task's weights: it and the next, which is being prefetched, share a 512 KiB L2.
constexpr int64_t kBlockBytes = 128 << 10;

constexpr int64_t kPackRows = 8;

}  // namespace

Phase pack_phase(Tensor x, int64_t rows, const Packed& packed) {
  return {(rows + kPackRows - 1) / kPackRows, [=](int64_t task, int64_t, int) {
            int64_t end = std::min(rows, (task + 1) * kPackRows);
            for (int64_t i = task * kPackRows; i < end; ++i) {
              packed.format->pack(x.dtype, row_of(x, i, packed.columns), packed.columns, packed.padded(),
                                  packed.row(i));
            }
          }};
}

Grid::Grid(const int32_t* offsets, int64_t E, int64_t N, int64_t weight_rows, int64_t K, const Format& format,
           int64_t unit, int threads)
    : N_(N) {
  int64_t row_blocks = 0;
  for (int64_t e = 0; e < E; ++e) {
    int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0) continue;
    int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
    segments_.push_back({e, offsets[e], rows, blocks, 0});
    row_blocks += blocks;
    rows_ += rows;
  }
  // Plain weights are multiplied in blocks of kBlockK, those in blocks over the whole of K.
  int64_t k = std::max<int64_t>(format.block, format.block == 1 ? std::min(K, kBlockK) : K);
  int64_t column_bytes = weight_rows * k / format.block * format.block_bytes;
  width_ = std::clamp(kBlockBytes / column_bytes, unit, kMaxColumns / weight_rows);
  while (width_ > unit && row_blocks * (N / width_) < 8 * threads) width_ /= 2;
  width_ = std::max(unit, width_ / unit * unit);

  int64_t column_blocks = (N + width_ - 1) / width_;
  for (Segment& segment : segments_) {
    segment.first_task = tasks_;
    tasks_ += segment.blocks * column_blocks;
  }
}

Cell Grid::cell(int64_t task) const {
  auto after = std::upper_bound(segments_.begin(), segments_.end(), task,
                                [](int64_t t, const Segment& s) { return t < s.first_task; });
  const Segment& s = *(after - 1);
  // Row blocks vary fastest: they reuse the weights of their columns from cache.
  int64_t column = (task - s.first_task) / s.blocks * width_;
  int64_t block = (task - s.first_task) % s.blocks;
  int64_t begin = s.rows * block / s.blocks;
  int64_t end = s.rows * (block + 1) / s.blocks;
  return {s.expert, s.row + begin, end - begin, column, std::min(width_, N_ - column)};
}

void rms_norm(const float* x, Tensor weight, float eps, int64_t H, float* out) {
  constexpr int64_t kStrip = 256;
  const Kernels& k = kernels();
  float scale = 1 / std::sqrt(k.sum_squares(x, H) / static_cast<float>(H) + eps);
  for (int64_t i = 0; i < H; i += kStrip) {
    float w[kStrip];
    int64_t n = std::min(kStrip, H - i);
    k.decode(weight.dtype, static_cast<const char*>(weight.data) + i * size_of(weight.dtype), w, n);
    for (int64_t j = 0; j < n; ++j) out[i + j] = x[i + j] * scale * w[j];
  }
}

float element(Tensor x, int64_t i) {
  float value;
  kernels().decode(x.dtype, static_cast<const char*>(x.data) + i * size_of(x.dtype), &value, 1);
  return value;
}

}  // namespace moefuse
