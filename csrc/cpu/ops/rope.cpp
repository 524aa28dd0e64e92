// rope: each head normed and rotated in f32 and rounded once; keys and values go to their places in a cache.
#include <algorithm>
#include <cstring>

#include "ops/norm.h"
#include "ops/rows.h"
#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace moefuse {

void rope(const View& q, const View& k, const View& v, const Rotary& rotary, const Cache& cache, const View& q_out,
          const View& k_out, int threads) {
  const Kernels& kernel = kernels();
  int64_t B = q.sizes[0], S = q.sizes[1], D = q.sizes[3], Hk = k.sizes[2], half = rotary.cos.sizes[3];
  threads = worth(threads, B * S * (q.sizes[2] + 2 * Hk) * D);
  float* rows = scratch_floats(Slot::rows, threads * (D + 2 * half));
  auto turn = [&](const View& in, Tensor norm, char* from, char* to, float* angles, float* row) {
    kernel.decode(in.dtype, from, row, D);
    if (norm) rms_norm(row, norm, rotary.eps, D, row);
    kernel.rotate(row, row + half, angles, angles + half, half);
    kernel.encode(row, in.dtype, to, D);
  };
  auto run = [&](int64_t token, int64_t, int worker) {
    int64_t b = token / S, s = token % S;
    float* angles = rows + worker * (D + 2 * half);
    float* row = angles + 2 * half;
    auto of_token = [&](const View& t) { return t.row(0, t.sizes[1] == 1 ? 0 : b, s); };
    kernel.decode(rotary.cos.dtype, of_token(rotary.cos), angles, half);
    kernel.decode(rotary.sin.dtype, of_token(rotary.sin), angles + half, half);
    for (int64_t h = 0; h < q.sizes[2]; ++h) turn(q, rotary.q_norm, q.row(b, s, h), q_out.row(b, s, h), angles, row);
    if (!cache.keys) {
      for (int64_t h = 0; h < Hk; ++h) turn(k, rotary.k_norm, k.row(b, s, h), k_out.row(b, s, h), angles, row);
      return;
    }
    int64_t place = cache.position[0], L = cache.keys.sizes[2];
    if (place < -s || place >= L - s) return;
    place += s;
    auto bytes = static_cast<size_t>(v.sizes[3] * size_of(v.dtype));
    for (int64_t h = 0; h < Hk; ++h) {
      turn(k, rotary.k_norm, k.row(b, s, h), cache.keys.row(b, h, place), angles, row);
      std::memcpy(cache.values.row(b, h, place), v.row(b, s, h), bytes);
    }
  };
  run_phases({{B * S, run}}, threads);
  trim_scratch();
}

}  // namespace moefuse
