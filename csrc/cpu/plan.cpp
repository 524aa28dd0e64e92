// The plan: a stable counting sort of assignments by expert.
#include "core.h"

namespace moefuse {

void plan(Ids ids, int64_t S, int64_t E, int32_t* counts, int32_t* offsets, int32_t* order, int32_t* inverse) {
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
