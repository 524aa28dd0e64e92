#include "mirror.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "training.h"

namespace moefuse {

MirrorBuffers* mirror_buffers(int threads) {
  return reinterpret_cast<MirrorBuffers*>(
      scratch(Slot::rows, threads * static_cast<int64_t>(sizeof(MirrorBuffers))));
}

std::vector<RowBlock> row_blocks(const int32_t* offsets, int64_t E) {
  std::vector<RowBlock> blocks;
  for (int64_t e = 0; e < E; ++e) {
    int64_t rows = offsets[e + 1] - offsets[e];
    int64_t count = (rows + kMirrorRows - 1) / kMirrorRows;
    for (int64_t i = 0; i < count; ++i) {
      int64_t begin = rows * i / count;
      blocks.push_back({e, offsets[e] + begin, rows * (i + 1) / count - begin});
    }
  }
  return blocks;
}

void grouped_linear_mirrored(Tensor x, int64_t x_rows, Weight weight, Tensor bias, Buckets buckets, int64_t S,
                             int64_t E, int64_t N, int64_t K, bool gather, bool scatter, Output y, int threads) {
  const Kernels& k = kernels();
  threads = worth(threads, S * N * K);
  int64_t per_x_row = x_rows > 0 ? std::max<int64_t>(1, S / x_rows) : 1;
  std::vector<RowBlock> blocks = row_blocks(buckets.offsets, E);
  int64_t columns = (N + kMirrorColumns - 1) / kMirrorColumns;
  int64_t live = buckets.offsets[E];
  MirrorBuffers* all = mirror_buffers(threads);

  auto run = [&](int64_t task, int64_t, int worker) {
    const RowBlock& block = blocks[static_cast<size_t>(task / columns)];
    int64_t column = task % columns * kMirrorColumns;
    int64_t width = std::min(kMirrorColumns, N - column);
    MirrorRows rows;
    rows.dtype = x.dtype;
    rows.count = block.rows;
    for (int64_t m = 0; m < block.rows; ++m) {
      int64_t p = block.row + m;
      rows.a[m] = row_of(x, gather ? buckets.order[p] / per_x_row : p, K);
    }
    MirrorBuffers& own = all[worker];
    mirror(rows, K, [&](int64_t row) { return row_of(weight, block.expert, row); }, weight.dtype(), column, width, own);
    if (bias) {
      float line[kMirrorColumns];
      k.decode(bias.dtype, row_of(bias, block.expert, N) + column * size_of(bias.dtype), line, width);
      for (int64_t m = 0; m < block.rows; ++m) {
        for (int64_t n = 0; n < width; ++n) own.acc[m * kMirrorColumns + n] += line[n];
      }
    }
    for (int64_t m = 0; m < block.rows; ++m) {
      int64_t p = block.row + m;
      char* to = row_of(y, scatter ? buckets.order[p] : p, N) + column * size_of(y.dtype);
      k.encode(own.acc + m * kMirrorColumns, y.dtype, to, width);
    }
  };
  auto clear = [&](int64_t task, int64_t, int) {
    int64_t p = live + task;
    std::memset(row_of(y, scatter ? buckets.order[p] : p, N), 0, static_cast<size_t>(N * size_of(y.dtype)));
  };
  run_phases({{static_cast<int64_t>(blocks.size()) * columns, run}, {S - live, clear}}, threads);
  trim_scratch();
}

}  // namespace moefuse
