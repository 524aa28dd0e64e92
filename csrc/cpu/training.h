// The backward ops of the CPU backend, on raw memory; the conventions are those of core.h.
#pragma once

#include "core.h"

namespace moefuse {

// Gradients of gate [rows, 2 I] in the layout (up absent), or of gate and up [rows, I] each; ungated: of [rows, I].
void glu_backward(Tensor grad, Tensor gate, Tensor up, int64_t rows, int64_t I, const Activation& act, bool gated,
                  bool interleaved, Output d_gate, Output d_up, int threads);

struct TailBackwardArgs {
  Tensor d_out;         // [T, H]
  Tensor d_normed;      // [T, H], or absent: no norm
  Tensor total;         // [T, H]: what was normed
  Tensor shared;        // [T, H]
  Tensor shared_gate;   // [T]
  Tensor shared_logit;  // [T]
  Tensor norm_weight;   // [H]
  float eps;
  int64_t T, H;
  Output d_sum;  // [T, H], with d_normed only
  Output d_shared, d_gate, d_logit, d_norm_weight;
};

void tail_backward(const TailBackwardArgs& args, int threads);

// d_y [S, H] = weight * d [T, H]; d_weights [T, top_k] = <y, d>.
void combine_backward(Tensor d, Tensor y, Tensor weights, const int32_t* inverse, int64_t T, int64_t top_k, int64_t H,
                      Output d_y, Output d_weights, int threads);

// d_scale [E] is absent without per_expert_scale.
void route_backward(Tensor grad, Tensor logits, const int32_t* ids, Tensor per_expert_scale, int64_t T, int64_t E,
                    const Routing& routing, Output d_logits, Output d_scale, int threads);

struct GateBackwardArgs {
  Tensor d_weights;  // [T, top_k]
  Tensor d_normed;   // [T, H] or absent
  Tensor x;          // [T, H]
  Weight weight;     // [1, E, H]
  Tensor norm_weight, logit_bias, per_expert_scale;
  const int32_t* ids;
  float eps;
  int64_t T, H, E;
  Routing routing;
  Output d_x, d_weight, d_norm_weight, d_logit_bias, d_scale;  // absent: not wanted
};

void gate_backward(const GateBackwardArgs& args, int threads);

// grouped_linear with a weight that is [E, K, N] in memory, N contiguous: y row = sum over k of x[k] * weight[k].
void grouped_linear_mirrored(Tensor x, int64_t x_rows, Weight weight, Tensor bias, Buckets buckets, int64_t S,
                             int64_t E, int64_t N, int64_t K, bool gather, bool scatter, Output y, int threads);

struct ExpertsBackwardArgs {
  Tensor d;        // [T, H]: gradient of the weighted sum
  Tensor x;        // [T, H]
  Tensor z;        // [S, 2 I] in the layout, or [S, I]: expert-major
  Tensor weights;  // [T, top_k]
  Weight gate_up, up, down;
  Tensor down_bias;
  Buckets buckets;
  const int32_t* inverse;
  int64_t T, top_k, E, H, I;
  Activation act;
  bool gated;
  bool interleaved;
  Output d_x, d_weights, d_gate_up, d_up, d_down, d_gate_up_bias, d_down_bias;  // absent: not wanted
};

void experts_backward(const ExpertsBackwardArgs& args, int threads);

}  // namespace moefuse
