// attend: parts of the places that are seen, for all the heads that share their keys; then the parts of each head are
// put together in order. How places are cut into parts depends alone on how many a sequence sees: neither on those that
// a mask leaves out, such as padding, nor on the other sequences.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/grouped.h"
#include "ops/rows.h"
#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace moefuse {
namespace {

constexpr int64_t kPlaces = 256;  // of a part, at most: a read of some 100 KiB, which is worth a task
constexpr int64_t kStrip = 32;    // places whose values are decoded at a time, in L1

}  // namespace

void attend(const View& q, const Cache& cache, Mask mask, Tensor sinks, float scale, int64_t window, Output out,
            int threads) {
  const Kernels& kernel = kernels();
  const View &keys = cache.keys, &values = cache.values;
  int64_t B = keys.sizes[0], Hk = keys.sizes[1], L = keys.sizes[2], D = keys.sizes[3], Dv = values.sizes[3];
  int64_t Hq = q.sizes[2], G = Hq / Hk;
  int64_t last = std::clamp<int64_t>(cache.position[0], -1, std::numeric_limits<int64_t>::max() - 1);
  int64_t end = std::min(last + 1, L);
  int64_t begin = window == 0 ? 0 : std::clamp<int64_t>(last + 1 - window, 0, end);
  // The places that each sequence sees, in order; without a mask they are the same for all.
  std::vector<int64_t> places, firsts(static_cast<size_t>(B) + 1, 0);
  int64_t seen = end - begin;
  if (mask) {
    places.reserve(static_cast<size_t>(B * seen));
    seen = 0;
    for (int64_t b = 0; b < B; ++b) {
      firsts[static_cast<size_t>(b)] = static_cast<int64_t>(places.size());
      for (int64_t j = begin; j < end; ++j) {
        if (mask.data[b * mask.stride + j] != 0) places.push_back(j);
      }
      seen = std::max(seen, static_cast<int64_t>(places.size()) - firsts[static_cast<size_t>(b)]);
    }
    firsts[static_cast<size_t>(B)] = static_cast<int64_t>(places.size());
  }
  auto seen_by = [&](int64_t b) {
    return mask ? firsts[static_cast<size_t>(b) + 1] - firsts[static_cast<size_t>(b)] : seen;
  };
  int64_t parts = parts_of(seen, kPlaces);  // of the sequence that sees most
  threads = worth(threads, B * Hq * seen * (D + Dv));

  int64_t wide = round_up(Dv, kChunk);
  const Format& format = kernel.formats[static_cast<int>(keys.dtype)][q.dtype == Dtype::bf16 ? 1 : 0];
  Packed packed{&format, nullptr, D};
  int64_t part_floats = G * (wide + 2);  // sums, then the largest logit and the total of each head
  char* activations = scratch(Slot::activations, threads * G * packed.pitch());
  float* logits = scratch_floats(Slot::logits, threads * G * kPlaces);
  float* turned = scratch_floats(Slot::products, threads * G * kPlaces);
  float* strips = scratch_floats(Slot::rows, threads * kStrip * wide);
  float* sums = scratch_floats(Slot::hidden, B * Hk * parts * part_floats);

  auto one_part = [&](int64_t task, int64_t, int worker) {
    int64_t pair = task / parts, part = task % parts, b = pair / Hk, h = pair % Hk;
    int64_t mine_seen = seen_by(b), mine_parts = parts_of(mine_seen, kPlaces);
    if (part >= mine_parts) return;
    int64_t from = mine_seen * part / mine_parts, count = mine_seen * (part + 1) / mine_parts - from;
    auto place = [&](int64_t i) { return mask ? places[static_cast<size_t>(firsts[static_cast<size_t>(b)] + from + i)]
                                              : begin + from + i; };
    Packed mine = packed;
    mine.data = activations + worker * G * packed.pitch();
    for (int64_t g = 0; g < G; ++g) format.pack(q.dtype, q.row(0, b, h * G + g), D, mine.padded(), mine.row(g));
    float* z = logits + worker * G * kPlaces;
    for (int64_t first = 0; first < count; first += kMaxColumns) {
      const char *a[kMaxRows], *w[kMaxColumns];
      int64_t n = std::min(kMaxColumns, count - first);
      for (int64_t i = 0; i < n; ++i) w[i] = keys.row(b, h, place(first + i));
      for (int64_t g = 0; g < G; g += kMaxRows) {
        int64_t m = std::min(kMaxRows, G - g);
        for (int64_t i = 0; i < m; ++i) a[i] = mine.row(g + i);
        format.dots({a, w, m, n, D, z + g * kPlaces + first, kPlaces, nullptr});
      }
    }
    float* acc = sums + task * part_floats;
    float* weights = turned + worker * G * kPlaces;
    for (int64_t g = 0; g < G; ++g) {
      acc[G * wide + 2 * g] = kernel.powers(scale, z + g * kPlaces, count, &acc[G * wide + 2 * g + 1]);
      for (int64_t i = 0; i < count; ++i) weights[i * G + g] = z[g * kPlaces + i];
    }
    float* strip = strips + worker * kStrip * wide;
    std::fill_n(strip, kStrip * wide, 0.0f);
    for (int64_t first = 0; first < count; first += kStrip) {
      int64_t n = std::min(kStrip, count - first);
      for (int64_t i = 0; i < n; ++i) {
        kernel.decode(values.dtype, values.row(b, h, place(first + i)), strip + i * wide, Dv);
      }
      kernel.outer(weights + first * G, G, strip, wide, n, G, wide, acc, wide, first == 0);
    }
  };

  auto one_head = [&](int64_t head, int64_t, int worker) {
    int64_t pair = head / G, g = head % G, mine_parts = parts_of(seen_by(pair / Hk), kPlaces);
    const float* first = sums + pair * parts * part_floats;
    auto stats = [&](int64_t part) { return first + part * part_floats + G * wide + 2 * g; };
    float sink = sinks ? element(sinks, head % Hq) : -std::numeric_limits<float>::infinity();
    float top = sink;
    for (int64_t part = 0; part < mine_parts; ++part) top = std::max(top, stats(part)[0]);
    top = std::max(top, std::numeric_limits<float>::lowest());
    float total = std::exp(sink - top);
    float* acc = strips + worker * kStrip * wide;
    std::fill_n(acc, Dv, 0.0f);
    for (int64_t part = 0; part < mine_parts; ++part) {
      float share = std::exp(stats(part)[0] - top);
      total += share * stats(part)[1];
      kernel.axpy(share, Dtype::f32, first + part * part_floats + g * wide, acc, Dv);
    }
    for (int64_t i = 0; i < Dv && total != 0; ++i) acc[i] /= total;
    kernel.encode(acc, out.dtype, row_of(out, head, Dv), Dv);
  };
  run_phases({{B * Hk * parts, one_part}, {B * Hq, one_head}}, threads);
  trim_scratch();
}

}  // namespace moefuse
