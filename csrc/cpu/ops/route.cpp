// route: scores, selection inside the kept groups, weights. One row at a time; selection in f32, weights in double.
#include "ops/route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "ops/rows.h"
#include "runtime/pool.h"

namespace moefuse {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

bool fails_closed(const float* x, int64_t n) {
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) bad |= !(x[i] < kInf);
  return bad;
}

// The `limit` largest of keys above -inf, largest first, ties to the lowest index. Returns how many there are.
int64_t select_largest(const float* keys, int64_t n, int64_t limit, int32_t* picked) {
  float held[kMaxExperts];
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    float key = keys[i];
    if (!(key > -kInf) || (count == limit && !(key > held[count - 1]))) continue;
    int64_t at = count < limit ? count++ : count - 1;
    for (; at > 0 && key > held[at - 1]; --at) {
      held[at] = held[at - 1];
      picked[at] = picked[at - 1];
    }
    held[at] = key;
    picked[at] = static_cast<int32_t>(i);
  }
  return count;
}

// Divides by the sum, which is at least `floor`; a sum of 0 counts as 1.
void renormalize(double* weights, int64_t n, double floor) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += weights[i];
  double divisor = std::max(sum, floor);
  if (divisor == 0) return;
  for (int64_t i = 0; i < n; ++i) weights[i] /= divisor;
}

}  // namespace

std::vector<float> decoded(Tensor x, int64_t n) {
  std::vector<float> out(x ? static_cast<size_t>(n) : 0);
  if (x) kernels().decode(x.dtype, x.data, out.data(), n);
  return out;
}

float softcapped(float logit, float softcap) {
  return logit == -kInf ? -kInf : static_cast<float>(softcap * std::tanh(static_cast<double>(logit) / softcap));
}

ExactScores::ExactScores(Score score, const float* logits, const float* scores, int64_t E)
    : score_(score), logits_(logits) {
  if (score != Score::softmax) return;
  int64_t top = std::max_element(scores, scores + E) - scores;
  top_ = logits[top];
  top_score_ = scores[top];
}

double ExactScores::operator[](int64_t e) const {
  double x = logits_[e];
  switch (score_) {
    case Score::softmax:
      return std::exp(x - top_) * top_score_;
    case Score::sigmoid:
      return 1 / (1 + std::exp(-x));
    case Score::sqrtsoftplus:
      return x < -700 ? std::exp(x / 2) : std::sqrt(std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))));
  }
  return 0;
}

RowRouter::RowRouter(Tensor bias, Tensor per_expert_scale, int64_t E, const Routing& routing)
    : r_(routing), E_(E), bias_(decoded(bias, E)), scale_(decoded(per_expert_scale, E)) {
  if (E > kMaxExperts || r_.top_k > kMaxTopK) throw std::length_error("route: more than 1024 experts or top_k over 64");
  closed_ = fails_closed(bias_.data(), static_cast<int64_t>(bias_.size()));
}

// Masks the keys outside the best groups with -inf.
void RowRouter::keep_groups(float* keys, const float* scores) const {
  int64_t size = E_ / r_.groups;
  bool sums_two = r_.group_score == GroupScore::top2_sum;
  float values[kMaxExperts];
  for (int64_t g = 0; g < r_.groups; ++g) {
    float first = -kInf;
    float second = -kInf;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (!(keys[e] > -kInf)) continue;
      float value = sums_two && bias_.empty() ? scores[e] : keys[e];
      second = std::max(second, std::min(first, value));
      first = std::max(first, value);
    }
    values[g] = sums_two && second > -kInf ? first + second : first;
  }
  int32_t kept[kMaxExperts];
  int64_t count = select_largest(values, r_.groups, r_.top_groups, kept);
  bool keep[kMaxExperts] = {};
  for (int64_t i = 0; i < count; ++i) keep[kept[i]] = true;
  for (int64_t e = 0; e < E_; ++e) {
    if (!keep[e / size]) keys[e] = -kInf;
  }
}

void RowRouter::row(const float* logits, float* weights, int32_t* ids) const {
  int32_t picked[kMaxTopK];
  int64_t count = 0;
  double exact[kMaxTopK];
  if (!closed_ && !fails_closed(logits, E_)) {
    float keys[kMaxExperts], scores[kMaxExperts], capped[kMaxExperts];
    const float* scored = logits;
    if (r_.softcap > 0) {
      for (int64_t e = 0; e < E_; ++e) capped[e] = softcapped(logits[e], r_.softcap);
      scored = capped;
    }
    kernels().scores(r_.score, scored, scores, E_);
    // Without a bias the logit itself is the key: a score could round two of them to one.
    for (int64_t e = 0; e < E_; ++e) {
      keys[e] = bias_.empty() ? logits[e] : logits[e] > -kInf ? scores[e] + bias_[static_cast<size_t>(e)] : -kInf;
    }
    if (r_.groups > 1) keep_groups(keys, scores);
    count = select_largest(keys, E_, r_.top_k, picked);
    ExactScores score(r_.score, scored, scores, E_);
    for (int64_t j = 0; j < count; ++j) exact[j] = score[picked[j]];
  }

  if (r_.renormalize) renormalize(exact, count, r_.floor);
  for (int64_t j = 0; j < count; ++j) {
    exact[j] *= r_.scale;
    if (!scale_.empty()) exact[j] *= scale_[static_cast<size_t>(picked[j])];
  }
  if (r_.renormalize_after_scale) renormalize(exact, count, -std::numeric_limits<double>::infinity());
  for (int64_t j = 0; j < r_.top_k; ++j) {
    ids[j] = j < count ? picked[j] : static_cast<int32_t>(E_);
    weights[j] = j < count ? static_cast<float>(exact[j]) : 0;
  }
}

void route(Tensor logits, Tensor bias, Tensor per_expert_scale, const Routing& routing, Output weights, Indices ids,
           int threads) {
  constexpr int64_t kRows = 16;
  int64_t T = logits.rows, E = logits.columns;
  RowRouter router(bias, per_expert_scale, E, routing);
  int64_t top_k = routing.top_k;
  auto run = [&](int64_t task, int64_t, int) {
    float decoded_row[kMaxExperts];
    int64_t end = std::min(T, (task + 1) * kRows);
    for (int64_t t = task * kRows; t < end; ++t) {
      kernels().decode(logits.dtype, row_of(logits, t, E), decoded_row, E);
      router.row(decoded_row, static_cast<float*>(weights.data) + t * top_k, ids.data + t * top_k);
    }
  };
  // An expert's share of a row costs about as much as 16 multiply-adds: its exponential and its comparisons.
  run_phases({{parts_of(T, kRows), run}}, worth(threads, T * E * 16));
}

}  // namespace moefuse
