// plan: a stable counting sort of assignments by expert.
#include <stdexcept>

#include "core.h"

namespace moefuse {

void check_plan(const Plan& plan) {
  int64_t E = plan.E(), S = plan.S(), before = 0;
  bool bad = plan.offsets[0] != 0;
  for (int64_t e = 0; e <= E; ++e) {
    bad |= plan.offsets[e] < before || plan.offsets[e] > S;
    before = plan.offsets[e];
  }
  for (int64_t p = 0; p < S; ++p) bad |= plan.order[p] < 0 || plan.order[p] >= S;
  if (bad) throw std::invalid_argument("plan: offsets must rise from 0 to at most S and order hold 0 to S - 1");
}

void plan(Ids ids, Indices counts, Indices offsets, Indices order, Indices inverse) {
  int64_t E = counts.size, S = order.size;
  auto bucket = [&](int64_t s) {
    int64_t id = ids[s];
    return id >= 0 && id < E ? id : E;
  };
  for (int64_t e = 0; e <= E; ++e) offsets[e] = 0;
  int64_t live = 0;
  for (int64_t s = 0; s < S; ++s) {
    int64_t e = bucket(s);
    if (e == E) continue;
    ++offsets[e + 1];
    ++live;
  }
  for (int64_t e = 0; e < E; ++e) {
    counts[e] = 0;
    offsets[e + 1] += offsets[e];
  }
  int64_t last = live;
  for (int64_t s = 0; s < S; ++s) {
    int64_t e = bucket(s);
    int64_t p = e == E ? last++ : offsets[e] + counts[e]++;
    order[p] = static_cast<int32_t>(s);
    inverse[s] = static_cast<int32_t>(p);
  }
}

}  // namespace moefuse
