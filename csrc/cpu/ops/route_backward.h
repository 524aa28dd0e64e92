// The gradient of one row of routing, for the ops that begin with it.
#pragma once

#include <vector>

#include "core.h"

namespace moefuse {

class RowRouterBackward {
 public:
  RowRouterBackward(Tensor per_expert_scale, int64_t E, const Routing& routing);

  // logits [E], ids and grad [top_k] -> d_logits [E]; d_scale [top_k] is each slot's part of its expert's scale.
  void row(const float* logits, const int32_t* ids, const float* grad, float* d_logits, float* d_scale) const;

 private:
  Routing r_;
  int64_t E_;
  std::vector<float> scale_;
};

// out [E] = the sum of each expert's slots, in the order of tokens.
void sum_scales(const float* parts, Indices ids, int64_t E, Output out);

}  // namespace moefuse
