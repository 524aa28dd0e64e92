// Routing of one row, for the ops that end in it.
#pragma once

#include <vector>

#include "core.h"

namespace moefuse {

// What fits a row's buffers on the stack.
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 64;

// n numbers; none where the tensor is absent.
std::vector<float> decoded(Tensor x, int64_t n);

// A masked expert stays masked: it has no part in the softmax either.
float softcapped(float logit, float softcap);

// Scores of single experts in double, where float scores would have underflowed before they are divided by their sum.
class ExactScores {
 public:
  // logits (soft-capped) and scores [E] of one row.
  ExactScores(Score score, const float* logits, const float* scores, int64_t E);

  double operator[](int64_t e) const;

 private:
  Score score_;
  const float* logits_;
  double top_ = 0;        // softmax: the largest logit, and its score
  double top_score_ = 0;
};

class RowRouter {
 public:
  RowRouter(Tensor bias, Tensor per_expert_scale, int64_t E, const Routing& routing);

  // logits [E] -> weights [top_k], ids [top_k].
  void row(const float* logits, float* weights, int32_t* ids) const;

 private:
  void keep_groups(float* keys, const float* scores) const;

  Routing r_;
  int64_t E_;
  std::vector<float> bias_;   // empty: none
  std::vector<float> scale_;  // per expert; empty: none
  bool closed_ = false;       // a bias of NaN or +inf: no row is routed
};

}  // namespace moefuse
