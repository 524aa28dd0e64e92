// The ops of the CPU backend, on raw memory: what the Python module binds and the C++ tests call.
//
// Structs have the names and the fields of the values in moefuse.types. Shapes are named as in the rest of the project:
// T tokens, E experts, H hidden, I intermediate, S = T * top_k. Every tensor is contiguous unless a stride is given.
// Arguments are trusted: the Python ops check them.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "runtime/isa.h"

namespace moefuse {

// A tensor as a matrix: its last dimension, and all those before it. Absent without data.
template <class Data>
struct Matrix {
  Data* data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t rows = 0, columns = 0;

  explicit operator bool() const { return data != nullptr; }
};

using Tensor = Matrix<const void>;
using Output = Matrix<void>;

// [E, N, K] with K contiguous, or in blocks along K (along N where it is transposed); strides in bytes.
struct Weight {
  const void* data = nullptr;
  WeightType type = WeightType::f32;
  int64_t E = 0, N = 0, K = 0;
  int64_t stride_e = 0;
  int64_t stride_n = 0;     // of K instead where it is transposed
  bool exact = false;       // blocks: activations stay in f32
  bool transposed = false;  // N is contiguous, not K
  bool interleaved = false;  // blocks: kStripRows rows lie in turns, see moefuse.quant.arrange

  Dtype dtype() const { return static_cast<Dtype>(type); }  // of numbers, not of blocks
  explicit operator bool() const { return data != nullptr; }
};

// Expert ids [T, top_k], int32 or int64. An id outside [0, E) is no expert.
struct Ids {
  const void* data = nullptr;
  bool wide = false;
  int64_t rows = 0, columns = 0;

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Any number of int32: a table to read or to fill.
struct Indices {
  int32_t* data = nullptr;
  int64_t size = 0;

  int32_t& operator[](int64_t i) const { return data[i]; }
  explicit operator bool() const { return data != nullptr; }
};

// Where each expert's rows are: positions offsets[e] to offsets[e + 1], assignment order[p] at position p.
struct Plan {
  Indices offsets;  // [E + 1]
  Indices order;    // [S]
  Indices inverse;  // [S]: the position of assignment s

  int64_t E() const { return offsets.size - 1; }
  int64_t S() const { return order.size; }
  int64_t live() const { return offsets[E()]; }  // assignments that have an expert; they stand first
  explicit operator bool() const { return static_cast<bool>(offsets); }
};

// Up to four dimensions, dense in the last; those that are missing stand first. Strides in bytes.
struct View {
  char* data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t sizes[4] = {};
  int64_t strides[3] = {};

  char* row(int64_t i, int64_t j, int64_t k) const { return data + i * strides[0] + j * strides[1] + k * strides[2]; }
  explicit operator bool() const { return data != nullptr; }
};

// Which places of a cache are seen: [B, L] bytes, stride in bytes.
struct Mask {
  const uint8_t* data = nullptr;
  int64_t stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

enum class GroupScore : int { max, top2_sum };
enum class Layout : int { halves, interleaved };
constexpr const char* kGroupScoreNames[] = {"max", "top2_sum"};
constexpr const char* kLayoutNames[] = {"halves", "interleaved"};

struct Routing {
  int64_t top_k;
  Score score;
  bool renormalize;
  float scale;
  int64_t groups;
  int64_t top_groups;
  GroupScore group_score;
  float softcap;  // 0: none
  float floor;
  bool renormalize_after_scale;
};

struct Router {
  Weight weight;  // [E, H], as one expert's [1, E, H]
  Tensor norm_weight, bias, logit_bias, per_expert_scale;
  float eps;
};

struct Stacks {
  Weight gate_up;       // [E, 2 I, H] in the layout, or the gate [E, I, H] when `up` is there or nothing is gated
  Weight up;            // [E, I, H] or absent
  Weight down;          // [E, H, I]
  Tensor gate_up_bias;  // [E, 2 I] in the layout, or [E, I]
  Tensor down_bias;     // [E, H]
  Layout layout;
};

struct Projections {
  Weight weight, second, third, fourth;  // [N, K] each, as one expert's [1, N, K]; but for the first they may be absent
  Tensor bias, second_bias, third_bias, fourth_bias;
};

struct Tail {
  Tensor shared;        // [T, H]
  Tensor shared_gate;   // [T]
  Tensor shared_logit;  // [T]
  Tensor residual;      // [T, H]
  Tensor norm_weight;   // [H]
  float eps;
};

struct Outputs {
  Output out;     // [T, H]
  Output normed;  // [T, H], written when the tail has a norm weight
};

struct Rotary {
  View cos, sin;  // [B or 1, S, R/2]
  Tensor q_norm, k_norm;
  float eps;
};

struct Cache {
  View keys, values;  // [B, Hk, L, D] and [B, Hk, L, Dv]
  Ids position;       // one
};

void route(Tensor logits, Tensor bias, Tensor per_expert_scale, const Routing& routing, Output weights, Indices ids,
           int threads);

// d_scale [E] is absent without per_expert_scale.
void route_backward(Tensor grad, Tensor logits, Indices ids, Tensor per_expert_scale, const Routing& routing,
                    Output d_logits, Output d_scale, int threads);

// `normed` may be absent.
void gate(Tensor x, const Router& router, const Routing& routing, Output weights, Indices ids, Output normed,
          int threads);

// What is absent is not wanted, here and in the other gradients.
struct GateGradients {
  Output x, weight, norm_weight, logit_bias, per_expert_scale;
};

void gate_backward(Tensor d_weights, Tensor d_normed, Tensor x, const Router& router, Indices ids,
                   const Routing& routing, const GateGradients& gradients, int threads);

void plan(Ids ids, Indices counts, Indices offsets, Indices order, Indices inverse);

// Throws std::invalid_argument where a plan would lead outside its rows: it was changed after it was checked.
void check_plan(const Plan& plan);

// x [T, K] or [S, K] -> y [S, N]. See moefuse.ops.grouped_linear for gather and scatter.
void grouped_linear(Tensor x, const Weight& weight, Tensor bias, const Plan& plan, bool gather, bool scatter, Output y,
                    int threads);

// The same blocks in the other order, where one of the two is interleaved and N a multiple of kStripRows. `fields` has
// where each field of a block begins, and the size of a block.
void interleave(const Weight& from, const Weight& to, Indices fields, int threads);

// grad [S, N] -> d_x [S, K], what `grouped_linear` does to x turned round: `gather` reads rows of slots, `scatter`
// writes them.
void grouped_linear_transposed(Tensor grad, const Weight& weight, const Plan& plan, bool gather, bool scatter,
                               Output d_x, int threads);

// x [T, K] -> out [T, N of all], the weights' results side by side; residual is like out, or absent.
void linear(Tensor x, const Projections& projections, Tensor residual, Output out, int threads);

// out is [E, N, K]: the sum over each expert's rows of grad (outer) x.
void grouped_outer(Tensor grad, Tensor x, const Plan& plan, bool gather, bool scatter, Output out, int threads);

// gate_up is [rows, 2 I] in the layout and up absent, or both are [rows, I]; ungated, gate_up is [rows, I].
void glu(Tensor gate_up, Tensor up, const Activation& activation, Layout layout, Output out, int threads);

void glu_backward(Tensor grad, Tensor gate_up, Tensor up, const Activation& activation, Layout layout,
                  Output d_gate_up, Output d_up, int threads);

// y is [S, H]: slot order, or expert-major when `inverse` is there.
void combine(Tensor y, Tensor weights, Indices inverse, const Tail& tail, const Outputs& outputs, int threads);

// d_y [S, H] = weight * d [T, H]; d_weights [T, top_k] = <y, d>.
void combine_backward(Tensor d, Tensor y, Tensor weights, Indices inverse, Output d_y, Output d_weights, int threads);

struct TailGradients {
  Output sum;  // [T, H], with d_normed only
  Output shared, shared_gate, shared_logit, norm_weight;
};

// d_normed is absent without a norm, and with it `total` [T, H], which is what was normed.
void tail_backward(Tensor d_out, Tensor d_normed, Tensor total, const Tail& tail, const TailGradients& gradients,
                   int threads);

// Without a plan one is made. z [S, 2 I] or [S, I], where it is wanted, gets the expert-major pre-activations in the
// layout, zeros for rows without an expert.
void experts(Tensor x, Ids ids, Tensor weights, const Stacks& stacks, const Plan& plan, const Activation& activation,
             const Tail& tail, const Outputs& outputs, Output z, int threads);

struct ExpertsGradients {
  Output x, weights, gate_up, up, down, gate_up_bias, down_bias;
};

// d [T, H] is the gradient of the weighted sum, z what `experts` wrote.
void experts_backward(Tensor d, Tensor x, Tensor z, Tensor weights, const Stacks& stacks, const Plan& plan,
                      const Activation& activation, const ExpertsGradients& gradients, int threads);

// q [B, S, Hq, D] to q_out; k to k_out, or with a cache k and v to the places from its position on that there are.
void rope(const View& q, const View& k, const View& v, const Rotary& rotary, const Cache& cache, const View& q_out,
          const View& k_out, int threads);

// q [B, Hq, D] -> out [B, Hq, Dv]. A window of 0 leaves nothing out.
void attend(const View& q, const Cache& cache, Mask mask, Tensor sinks, float scale, int64_t window, Output out,
            int threads);

}  // namespace moefuse
