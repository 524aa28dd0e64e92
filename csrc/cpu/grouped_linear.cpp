// grouped_linear and grouped_outer: an expert's weight times its rows, and the gradient of that weight.
#include <algorithm>
#include <cstring>

#include "core.h"
#include "pool.h"
#include "products.h"
#include "scratch.h"

namespace moefuse {
namespace {

// Which rows of x and of the result (or its gradient) a position stands for.
struct Rows {
  const int32_t* order;
  int64_t per_x_row;  // assignments that read one row of x
  bool gather, scatter;

  Rows(Buckets buckets, int64_t S, int64_t x_rows, bool gather_, bool scatter_)
      : order(buckets.order), per_x_row(x_rows > 0 ? std::max<int64_t>(1, S / x_rows) : 1), gather(gather_),
        scatter(scatter_) {}

  int64_t x(int64_t p) const { return gather ? order[p] / per_x_row : p; }
  int64_t y(int64_t p) const { return scatter ? order[p] : p; }
};

}  // namespace

void grouped_linear(Tensor x, int64_t x_rows, Weight weight, Tensor bias, Buckets buckets, int64_t S, int64_t E,
                    int64_t N, int64_t K, bool gather, bool scatter, Output y, int threads) {
  const Kernels& k = kernels();
  threads = worth(threads, S * N * K);
  Rows rows(buckets, S, x_rows, gather, scatter);
  Packed packed{&format_of(weight, x.dtype), nullptr, K};
  packed.data = scratch(Slot::activations, x_rows * packed.pitch());
  Grid grid(buckets.offsets, E, N, 1, K, *packed.format, packed.format->pack_unit, threads);

  auto run = [&](int64_t task, int64_t next, int) {
    Workspace ws;
    Cell c = grid.cell(task);
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = packed.row(rows.x(c.row + m));
    for (int64_t n = 0; n < c.columns; ++n) ws.w[n] = row_of(weight, c.expert, c.column + n);
    Cell after = next < 0 ? c : grid.cell(next);
    const char* ahead = next < 0 ? nullptr : row_of(weight, after.expert, after.column);
    packed.format->dots({ws.a, ws.w, c.rows, c.columns, K, ws.z, c.columns, ahead});
    float biases[kMaxColumns];
    if (bias) {
      k.decode(bias.dtype, row_of(bias, c.expert, N) + c.column * size_of(bias.dtype), biases, c.columns);
    }
    for (int64_t m = 0; m < c.rows; ++m) {
      float* z = ws.z + m * c.columns;
      for (int64_t n = 0; bias && n < c.columns; ++n) z[n] += biases[n];
      k.encode(z, y.dtype, row_of(y, rows.y(c.row + m), N) + c.column * size_of(y.dtype), c.columns);
    }
  };
  // Assignments without an expert stand last.
  auto clear = [&](int64_t task, int64_t, int) {
    std::memset(row_of(y, rows.y(grid.rows() + task), N), 0, static_cast<size_t>(N * size_of(y.dtype)));
  };
  run_phases({pack_phase(x, x_rows, packed), {grid.tasks(), run}, {S - grid.rows(), clear}}, threads);
  trim_scratch();
}

void grouped_outer(Tensor grad, Tensor x, int64_t x_rows, Buckets buckets, int64_t S, int64_t E, int64_t N, int64_t K,
                   bool gather, bool scatter, Output out, int threads) {
  constexpr int64_t kN = 32;
  constexpr int64_t kK = 256;
  constexpr int64_t kPositions = 64;  // whose strips of x stay in L2 while the rows of a block go over them
  const Kernels& k = kernels();
  threads = worth(threads, (S + E) * N * K);
  Rows rows(buckets, S, x_rows, gather, scatter);
  int64_t live = buckets.offsets[E];
  int64_t ldg = round_up(N, 4);
  int64_t ldx = round_up(K, kChunk);
  float* grads = scratch_floats(Slot::gradients, live * ldg);
  float* inputs = scratch_floats(Slot::activations, live * ldx);

  auto widen = [&](int64_t p, int64_t, int) {
    k.decode(grad.dtype, row_of(grad, rows.y(p), N), grads + p * ldg, N);
    std::fill(grads + p * ldg + N, grads + (p + 1) * ldg, 0.0f);
    k.decode(x.dtype, row_of(x, rows.x(p), K), inputs + p * ldx, K);
    std::fill(inputs + p * ldx + K, inputs + (p + 1) * ldx, 0.0f);
  };

  int64_t n_blocks = (N + kN - 1) / kN;
  int64_t k_blocks = (K + kK - 1) / kK;
  auto run = [&](int64_t task, int64_t, int) {
    int64_t e = task / (n_blocks * k_blocks);
    int64_t n0 = task / k_blocks % n_blocks * kN;
    int64_t k0 = task % k_blocks * kK;
    int64_t n = std::min(kN, N - n0);
    int64_t width = std::min(kK, K - k0);
    alignas(64) float acc[kN * kK];
    std::fill_n(acc, kN * kK, 0.0f);
    for (int64_t p = buckets.offsets[e]; p < buckets.offsets[e + 1]; p += kPositions) {
      int64_t count = std::min(kPositions, buckets.offsets[e + 1] - p);
      k.outer(grads + p * ldg + n0, ldg, inputs + p * ldx + k0, ldx, count, round_up(n, 4), round_up(width, kChunk),
              acc, kK, false);
    }
    for (int64_t i = 0; i < n; ++i) {
      k.encode(acc + i * kK, out.dtype, row_of(out, e * N + n0 + i, K) + k0 * size_of(out.dtype), width);
    }
  };
  run_phases({{live, widen}, {E * n_blocks * k_blocks, run}}, threads);
  trim_scratch();
}

}  // namespace moefuse
