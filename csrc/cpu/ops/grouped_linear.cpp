// grouped_linear: an expert's weight times its rows.
#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/grouped.h"
#include "ops/transposed.h"
#include "runtime/scratch.h"

namespace moefuse {
namespace {

void by_rows(Tensor x, const Weight& weight, Tensor bias, const Plan& plan, Positions positions, Output y,
             int threads) {
  const Kernels& k = kernels();
  int64_t N = weight.N, K = weight.K;
  Packed packed{&format_of(weight, x.dtype), nullptr, K};
  packed.data = scratch(Slot::activations, x.rows * packed.pitch());
  Grid grid(plan.offsets, N, 1, K, *packed.format, packed.format->pack_unit, threads);

  auto run = [&](int64_t task, int64_t next, int) {
    Workspace ws;
    Cell c = grid.cell(task);
    for (int64_t m = 0; m < c.rows; ++m) ws.a[m] = packed.row(positions.x(c.row + m));
    rows_of(weight, c.expert, c.column, c.columns, ws.w);
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
      k.encode(z, y.dtype, row_of(y, positions.y(c.row + m), N) + c.column * size_of(y.dtype), c.columns);
    }
  };
  // Assignments without an expert stand last.
  auto clear = [&](int64_t task, int64_t, int) {
    std::memset(row_of(y, positions.y(grid.rows() + task), N), 0, static_cast<size_t>(N * size_of(y.dtype)));
  };
  run_phases({pack_phase(x, x.rows, packed), {grid.tasks(), run}, {plan.S() - grid.rows(), clear}}, threads);
}

// The same with a weight that is [E, K, N] in memory.
void by_columns(Tensor x, const Weight& weight, Tensor bias, const Plan& plan, Positions positions, Output y,
                int threads) {
  const Kernels& k = kernels();
  int64_t N = weight.N, K = weight.K;
  std::vector<Panel> panels = panels_of(plan.offsets);
  int64_t columns = parts_of(N, kPanelColumns);
  int64_t live = plan.live();
  PanelBuffers* all = panel_buffers(threads);

  auto run = [&](int64_t task, int64_t, int worker) {
    const Panel& panel = panels[static_cast<size_t>(task / columns)];
    int64_t column = task % columns * kPanelColumns;
    int64_t width = std::min(kPanelColumns, N - column);
    PanelRows rows(x.dtype, panel, [&](int64_t p) { return row_of(x, positions.x(p), K); });
    PanelBuffers& own = all[worker];
    multiply_transposed(rows, K, {panel.expert, weight, K}, column, width, own);
    if (bias) {
      float line[kPanelColumns];
      k.decode(bias.dtype, row_of(bias, panel.expert, N) + column * size_of(bias.dtype), line, width);
      for (int64_t m = 0; m < panel.rows; ++m) {
        for (int64_t n = 0; n < width; ++n) own.acc[m * kPanelColumns + n] += line[n];
      }
    }
    for (int64_t m = 0; m < panel.rows; ++m) {
      char* to = row_of(y, positions.y(panel.row + m), N) + column * size_of(y.dtype);
      k.encode(own.acc + m * kPanelColumns, y.dtype, to, width);
    }
  };
  auto clear = [&](int64_t task, int64_t, int) {
    std::memset(row_of(y, positions.y(live + task), N), 0, static_cast<size_t>(N * size_of(y.dtype)));
  };
  run_phases({{static_cast<int64_t>(panels.size()) * columns, run}, {plan.S() - live, clear}}, threads);
}

}  // namespace

void grouped_linear(Tensor x, const Weight& weight, Tensor bias, const Plan& plan, bool gather, bool scatter, Output y,
                    int threads) {
  threads = worth(threads, plan.S() * weight.N * weight.K);
  auto run = weight.transposed ? by_columns : by_rows;
  run(x, weight, bias, plan, {plan, x.rows, gather, scatter}, y, threads);
  trim_scratch();
}

void grouped_linear_transposed(Tensor grad, const Weight& weight, const Plan& plan, bool gather, bool scatter,
                               Output d_x, int threads) {
  Weight turned = weight;
  std::swap(turned.N, turned.K);
  turned.transposed = !weight.transposed;
  grouped_linear(grad, turned, {}, plan, gather, scatter, d_x, threads);
}

}  // namespace moefuse
