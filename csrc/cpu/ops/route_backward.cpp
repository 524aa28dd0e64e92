// route_backward: through the selected scores to the logits.
#include "ops/route_backward.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/route.h"
#include "ops/rows.h"
#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace moefuse {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Gradient of values divided by their sum: `floor` (-inf: none) holds the sum up, and takes its gradient away.
void through_divisor(double* grad, const double* values, int64_t n, double floor) {
  double total = 0, along = 0;
  for (int64_t j = 0; j < n; ++j) {
    total += values[j];
    along += grad[j] * values[j];
  }
  bool held = total == 0 || !(total > floor);
  double divisor = !held ? total : floor > 0 ? floor : 1;
  for (int64_t j = 0; j < n; ++j) grad[j] = (grad[j] - (held ? 0 : along / divisor)) / divisor;
}

}  // namespace

RowRouterBackward::RowRouterBackward(Tensor per_expert_scale, int64_t E, const Routing& routing)
    : r_(routing), E_(E), scale_(decoded(per_expert_scale, E)) {}

void RowRouterBackward::row(const float* logits, const int32_t* ids, const float* grad, float* d_logits,
                            float* d_scale) const {
  float capped[kMaxExperts], scores[kMaxExperts];
  for (int64_t e = 0; e < E_; ++e) {
    capped[e] = std::isfinite(logits[e]) ? logits[e] : -kInf;
    if (r_.softcap > 0) capped[e] = softcapped(capped[e], r_.softcap);
  }
  kernels().scores(r_.score, capped, scores, E_);
  ExactScores exact(r_.score, capped, scores, E_);

  // The slots that have an expert; the others take no part in any sum.
  int64_t slots[kMaxTopK], count = 0;
  double g[kMaxTopK], selected[kMaxTopK], shares[kMaxTopK], scaled[kMaxTopK], factor[kMaxTopK];
  for (int64_t j = 0; j < r_.top_k; ++j) {
    d_scale[j] = 0;
    if (ids[j] >= E_) continue;
    slots[count] = j;
    g[count] = grad[j];
    selected[count] = exact[ids[j]];
    factor[count] = r_.scale * (scale_.empty() ? 1.0 : static_cast<double>(scale_[static_cast<size_t>(ids[j])]));
    ++count;
  }
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += selected[i];
  double divisor = r_.renormalize ? std::max(total, static_cast<double>(r_.floor)) : 1;
  if (divisor == 0) divisor = 1;
  for (int64_t i = 0; i < count; ++i) {
    shares[i] = selected[i] / divisor;
    scaled[i] = shares[i] * factor[i];
  }
  if (r_.renormalize_after_scale) through_divisor(g, scaled, count, -kInf);
  for (int64_t i = 0; i < count; ++i) {
    d_scale[slots[i]] = static_cast<float>(g[i] * shares[i] * r_.scale);
    g[i] *= factor[i];
  }
  if (r_.renormalize) through_divisor(g, selected, count, r_.floor);

  double along = 0;
  for (int64_t i = 0; i < count; ++i) along += g[i] * selected[i];
  for (int64_t e = 0; e < E_; ++e) {
    d_logits[e] = r_.score == Score::softmax ? static_cast<float>(-along * scores[e]) : 0;
  }
  for (int64_t i = 0; i < count; ++i) {
    int64_t e = ids[slots[i]];
    double s = selected[i];
    if (r_.score == Score::softmax) d_logits[e] = static_cast<float>(d_logits[e] + s * g[i]);
    if (r_.score == Score::sigmoid) d_logits[e] = static_cast<float>(d_logits[e] + g[i] * s * (1 - s));
    // A score that underflowed to zero has no derivative left.
    if (r_.score == Score::sqrtsoftplus && s > 0) {
      double derivative = 1 / (1 + std::exp(-static_cast<double>(capped[e]))) / (2 * s);
      d_logits[e] = static_cast<float>(d_logits[e] + g[i] * derivative);
    }
  }
  for (int64_t e = 0; e < E_; ++e) {
    if (!std::isfinite(logits[e])) {
      d_logits[e] = 0;
    } else if (r_.softcap > 0) {
      double t = std::tanh(static_cast<double>(logits[e]) / r_.softcap);
      d_logits[e] = static_cast<float>(d_logits[e] * (1 - t * t));
    }
  }
}

void sum_scales(const float* parts, Indices ids, int64_t E, Output out) {
  std::vector<double> total(static_cast<size_t>(E));
  for (int64_t s = 0; s < ids.size; ++s) {
    if (ids[s] < E) total[static_cast<size_t>(ids[s])] += parts[s];
  }
  std::vector<float> sums(total.begin(), total.end());
  kernels().encode(sums.data(), out.dtype, out.data, E);
}

void route_backward(Tensor grad, Tensor logits, Indices ids, Tensor per_expert_scale, const Routing& routing,
                    Output d_logits, Output d_scale, int threads) {
  const Kernels& k = kernels();
  int64_t T = logits.rows, E = logits.columns;
  RowRouterBackward rows(per_expert_scale, E, routing);
  int64_t top_k = routing.top_k;
  float* parts = scratch_floats(Slot::rows, T * top_k);
  auto run = [&](int64_t t, int64_t, int) {
    float in[kMaxExperts], out[kMaxExperts], g[kMaxTopK];
    k.decode(logits.dtype, row_of(logits, t, E), in, E);
    k.decode(grad.dtype, row_of(grad, t, top_k), g, top_k);
    rows.row(in, ids.data + t * top_k, g, out, parts + t * top_k);
    k.encode(out, d_logits.dtype, row_of(d_logits, t, E), E);
  };
  run_phases({{T, run}}, worth(threads, T * E * 16));
  if (d_scale) sum_scales(parts, ids, E, d_scale);
  trim_scratch();
}

}  // namespace moefuse
