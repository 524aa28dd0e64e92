#include "ops/transposed.h"

#include "runtime/scratch.h"

namespace moefuse {

PanelBuffers* panel_buffers(int threads) {
  return reinterpret_cast<PanelBuffers*>(
      scratch(Slot::rows, threads * static_cast<int64_t>(sizeof(PanelBuffers))));
}

std::vector<Panel> panels_of(Indices offsets) {
  std::vector<Panel> panels;
  for (int64_t e = 0; e + 1 < offsets.size; ++e) {
    int64_t rows = offsets[e + 1] - offsets[e];
    int64_t count = parts_of(rows, kPanelRows);
    for (int64_t i = 0; i < count; ++i) {
      int64_t begin = rows * i / count;
      panels.push_back({e, offsets[e] + begin, rows * (i + 1) / count - begin});
    }
  }
  return panels;
}

}  // namespace moefuse
