// gate: RMSNorm, the router product and routing in one call. Logits stay in f32.
#include "ops/grouped.h"
#include "ops/norm.h"
#include "ops/route.h"
#include "runtime/scratch.h"

namespace moefuse {

void gate(Tensor x, const Router& router, const Routing& routing, Output weights, Indices ids, Output normed,
          int threads) {
  const Kernels& k = kernels();
  const Weight& weight = router.weight;
  int64_t T = x.rows, H = x.columns, E = weight.N, top_k = routing.top_k;
  threads = worth(threads, T * E * H);
  RowRouter through(router.bias, router.per_expert_scale, E, routing);
  // The normed row is f32 whatever x is, so the f32 form of the format is asked for.
  Packed packed{&format_of(weight, Dtype::f32), nullptr, H};
  packed.data = scratch(Slot::activations, T * packed.pitch());
  float* rows = scratch_floats(Slot::rows, threads * H);
  float* logits = scratch_floats(Slot::logits, T * E);

  auto norm = [&](int64_t t, int64_t, int worker) {
    float* row = rows + worker * H;
    k.decode(x.dtype, row_of(x, t, H), row, H);
    if (router.norm_weight) rms_norm(row, router.norm_weight, router.eps, H, row);
    packed.format->pack(Dtype::f32, row, H, packed.padded(), packed.row(t));
    if (normed) k.encode(row, normed.dtype, row_of(normed, t, H), H);
  };

  int32_t offsets[2] = {0, static_cast<int32_t>(T)};
  Grid grid({offsets, 2}, E, 1, H, *packed.format, packed.format->pack_unit, threads);
  auto select = [&](int64_t t, int64_t, int) {
    through.row(logits + t * E, static_cast<float*>(weights.data) + t * top_k, ids.data + t * top_k);
  };
  run_phases({{T, norm}, router_phase(router, packed, grid, logits), {T, select}}, threads);
  trim_scratch();
}

}  // namespace moefuse
