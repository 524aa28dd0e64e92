// The ops of the CPU backend, on raw memory: what the Python module and the C++ tests call.
//
// Shapes are named as in the rest of the project: T tokens, E experts, H hidden, I intermediate, S = T * top_k.
// Every tensor is contiguous unless a stride is given. Arguments are trusted: the Python ops check them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace moefuse {

struct Tensor {
  const void* data = nullptr;  // null: absent
  Dtype dtype = Dtype::f32;

  explicit operator bool() const { return data != nullptr; }
};

struct Output {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;

  explicit operator bool() const { return data != nullptr; }
};

// [E, N, K] with K contiguous, or in blocks along K; strides in bytes.
struct Weight {
  const void* data = nullptr;
  WeightType type = WeightType::f32;
  int64_t stride_e = 0;
  int64_t stride_n = 0;
  bool exact = false;  // blocks: activations stay in f32

  Dtype dtype() const { return static_cast<Dtype>(type); }  // of numbers, not of blocks
  explicit operator bool() const { return data != nullptr; }
};

// Expert ids, int32 or int64. An id outside [0, E) is no expert.
struct Ids {
  const void* data = nullptr;
  bool wide = false;

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Where each expert's rows are: positions offsets[e] to offsets[e + 1], assignment order[p] at position p.
struct Buckets {
  const int32_t* offsets = nullptr;  // [E + 1]
  const int32_t* order = nullptr;    // [S]
};

struct Routing {
  int64_t top_k;
  Score score;
  bool renormalize;
  float scale;
  int64_t groups;
  int64_t top_groups;
  bool top2_sum;
  float softcap;  // 0: none
  float norm_floor;
  bool renormalize_after_scale;
};

// What combine adds to the weighted sum, and where it writes.
struct Tail {
  Tensor shared;        // [T, H]
  Tensor shared_gate;   // [T]
  Tensor shared_logit;  // [T]
  Tensor residual;      // [T, H]
  Tensor norm_weight;   // [H]
  float eps;
  Output out;     // [T, H]
  Output normed;  // [T, H], written when norm_weight is there
};

void route(Tensor logits, Tensor bias, Tensor per_expert_scale, int64_t T, int64_t E, const Routing& routing,
           float* weights, int32_t* ids, int threads);

// `normed` may be absent.
void gate(Tensor x, Weight weight, Tensor norm_weight, Tensor bias, Tensor logit_bias, Tensor per_expert_scale,
          float eps, int64_t T, int64_t H, int64_t E, const Routing& routing, float* weights, int32_t* ids,
          Output normed, int threads);

void plan(Ids ids, int64_t S, int64_t E, int32_t* counts, int32_t* offsets, int32_t* order, int32_t* inverse);

// Throws std::invalid_argument where a plan would lead outside S rows: it was changed after it was checked.
void check_buckets(Buckets buckets, int64_t S, int64_t E);

// x is [x_rows, K]; y is [S, N]. See moefuse.ops.grouped_linear for gather and scatter.
void grouped_linear(Tensor x, int64_t x_rows, Weight weight, Tensor bias, Buckets buckets, int64_t S, int64_t E,
                    int64_t N, int64_t K, bool gather, bool scatter, Output y, int threads);

// out is [E, N, K]: the sum over each expert's rows of grad (outer) x.
void grouped_outer(Tensor grad, Tensor x, int64_t x_rows, Buckets buckets, int64_t S, int64_t E, int64_t N, int64_t K,
                   bool gather, bool scatter, Output out, int threads);

// gate is [rows, 2 I] in the layout and up absent, or both are [rows, I]; with gated false, gate is [rows, I].
void glu(Tensor gate, Tensor up, int64_t rows, int64_t I, const Activation& act, bool gated, bool interleaved,
         Output out, int threads);

// y is [S, H]: slot order, or expert-major when `inverse` is there.
void combine(Tensor y, Tensor weights, const int32_t* inverse, int64_t T, int64_t top_k, int64_t H, const Tail& tail,
             int threads);

struct ExpertsArgs {
  Tensor x;  // [T, H]
  Ids ids;   // [T, top_k]
  Tensor weights;
  Weight gate_up;       // [E, 2 I, H] in the layout, or the gate [E, I, H] when `up` is there or nothing is gated
  Weight up;            // [E, I, H] or absent
  Weight down;          // [E, H, I]
  Tensor gate_up_bias;  // [E, 2 I] in the layout, or [E, I]
  Tensor down_bias;     // [E, H]
  Buckets buckets;      // computed here when absent
  int64_t T, top_k, E, H, I;
  Activation act;
  bool gated;
  bool interleaved;
  Tail tail;
  Output z;  // [S, 2 I] or [S, I], or absent: expert-major pre-activations in the layout, rows without an expert zero
};

void experts(const ExpertsArgs& args, int threads);

// The instruction set in use. `set_isa` throws std::invalid_argument for one that this machine lacks.
const Kernels& kernels();
std::vector<std::string> isas();
void set_isa(const std::string& name);

}  // namespace moefuse
