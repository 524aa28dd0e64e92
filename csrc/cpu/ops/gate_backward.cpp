// gate_backward: from the routing's gradient to router weight, norm and x.
#include <algorithm>

#include "ops/grouped.h"
#include "ops/norm.h"
#include "ops/route.h"
#include "ops/route_backward.h"
#include "ops/transposed.h"
#include "runtime/scratch.h"

namespace moefuse {

void gate_backward(Tensor d_weights, Tensor d_normed, Tensor x, const Router& router, Indices ids,
                   const Routing& routing, const GateGradients& gradients, int threads) {
  const Kernels& k = kernels();
  const Weight& weight = router.weight;
  int64_t T = x.rows, H = x.columns, E = weight.N, top_k = routing.top_k;
  threads = worth(threads, T * E * H);
  RowRouterBackward through(router.per_expert_scale, E, routing);
  int64_t pitch = round_up(H, kChunk);
  // Rows of normed x, zero-padded; later x itself.
  float* normed = scratch_floats(Slot::hidden, T * pitch);
  float* d_rows = scratch_floats(Slot::products, gradients.x ? T * H : 0);
  float* logits = scratch_floats(Slot::logits, 2 * T * E);
  float* d_logits = logits + T * E;
  float* small = scratch_floats(Slot::gradients, T + H + T * top_k);
  float* inverse_rms = small;
  float* norm_weight = small + T;
  float* parts = norm_weight + H;
  PanelBuffers* buffers = panel_buffers(threads);
  Packed packed{&format_of(weight, Dtype::f32), nullptr, H};
  packed.data = scratch(Slot::activations, T * packed.pitch());
  if (router.norm_weight) k.decode(router.norm_weight.dtype, router.norm_weight.data, norm_weight, H);

  auto norm = [&](int64_t t, int64_t, int) {
    float* row = normed + t * pitch;
    k.decode(x.dtype, row_of(x, t, H), row, H);
    std::fill(row + H, row + pitch, 0.0f);
    if (router.norm_weight) {
      inverse_rms[t] = inverse_rms_of(row, router.eps, H);
      for (int64_t h = 0; h < H; ++h) row[h] = row[h] * inverse_rms[t] * norm_weight[h];
    }
    packed.format->pack(Dtype::f32, row, H, packed.padded(), packed.row(t));
  };

  int32_t offsets[2] = {0, static_cast<int32_t>(T)};
  Grid grid({offsets, 2}, E, 1, H, *packed.format, packed.format->pack_unit, threads);
  auto route = [&](int64_t t, int64_t, int) {
    float g[kMaxTopK];
    k.decode(d_weights.dtype, row_of(d_weights, t, top_k), g, top_k);
    through.row(logits + t * E, ids.data + t * top_k, g, d_logits + t * E, parts + t * top_k);
  };

  constexpr int64_t kTile = 64;
  int64_t strips = parts_of(H, kPanelColumns);
  int64_t tiles = parts_of(E, kTile);
  auto outer = [&](int64_t task, int64_t, int worker) {
    int64_t first = task / strips * kTile;
    int64_t column = task % strips * kPanelColumns;
    int64_t n = std::min(kTile, E - first);
    int64_t width = std::min(kPanelColumns, H - column);
    float* acc = buffers[worker].acc;
    if (T == 0) std::fill_n(acc, n * kPanelColumns, 0.0f);
    for (int64_t t = 0; t < T; t += kTile) {
      k.outer(d_logits + t * E + first, E, normed + t * pitch + column, pitch, std::min(kTile, T - t), n,
              round_up(width, kChunk), acc, kPanelColumns, t == 0);
    }
    for (int64_t i = 0; i < n; ++i) {
      char* to = row_of(gradients.weight, first + i, H) + column * size_of(gradients.weight.dtype);
      k.encode(acc + i * kPanelColumns, gradients.weight.dtype, to, width);
    }
  };

  std::vector<Panel> panels = panels_of({offsets, 2});
  auto input = [&](int64_t task, int64_t, int worker) {
    const Panel& panel = panels[static_cast<size_t>(task / strips)];
    int64_t column = task % strips * kPanelColumns;
    int64_t width = std::min(kPanelColumns, H - column);
    PanelRows rows(Dtype::f32, panel, [&](int64_t t) { return reinterpret_cast<const char*>(d_logits + t * E); });
    multiply_transposed(rows, E, {0, weight, E}, column, width, buffers[worker]);
    for (int64_t m = 0; m < panel.rows; ++m) {
      std::copy_n(buffers[worker].acc + m * kPanelColumns, width, d_rows + (panel.row + m) * H + column);
    }
  };

  // The rows of `normed` have served: they take x, which the norm's gradient needs beside d_normed.
  auto finish = [&](int64_t t, int64_t, int) {
    float* d = d_rows + t * H;
    if (d_normed) k.axpy(1, d_normed.dtype, row_of(d_normed, t, H), d, H);
    if (!router.norm_weight) {
      k.encode(d, gradients.x.dtype, row_of(gradients.x, t, H), H);
      return;
    }
    float* in = normed + t * pitch;
    float* out = reinterpret_cast<float*>(packed.row(t));
    k.decode(x.dtype, row_of(x, t, H), in, H);
    std::copy_n(d, H, out);
    norm_backward(in, norm_weight, inverse_rms[t], H, out);
    k.encode(out, gradients.x.dtype, row_of(gradients.x, t, H), H);
  };
  auto norm_sum = [&](int64_t task, int64_t, int) {
    sum_norm_weight({d_rows, Dtype::f32}, x, inverse_rms, T, H, task * kNormStrip, gradients.norm_weight);
  };

  bool wants_norm = gradients.x && router.norm_weight;
  run_phases({{T, norm},
              router_phase(router, packed, grid, logits),
              {T, route},
              {gradients.weight ? tiles * strips : 0, outer},
              {gradients.x ? static_cast<int64_t>(panels.size()) * strips : 0, input},
              {gradients.x ? T : 0, finish},
              {wants_norm ? parts_of(H, kNormStrip) : 0, norm_sum}},
             threads);
  if (gradients.logit_bias) {
    std::vector<double> total(static_cast<size_t>(E));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t e = 0; e < E; ++e) total[static_cast<size_t>(e)] += d_logits[t * E + e];
    }
    std::vector<float> sums(total.begin(), total.end());
    k.encode(sums.data(), gradients.logit_bias.dtype, gradients.logit_bias.data, E);
  }
  if (gradients.per_expert_scale) sum_scales(parts, ids, E, gradients.per_expert_scale);
  trim_scratch();
}

}  // namespace moefuse
