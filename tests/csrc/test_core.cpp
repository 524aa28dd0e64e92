// The C++ core against plain loops in double, without Python. Meant to run under -fsanitize=address,undefined.
//
// Every buffer stands between guard bytes, every output is filled with NaN first, and every case runs on every
// instruction set this machine has, with one, two and three threads, which must give the same bits.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "harness.h"
#include "runtime/pool.h"

using namespace moefuse;
using namespace moefuse::test;

namespace {

double activated(const Activation& a, double g, double u) {
  auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  double up = a.gated ? u : 1;
  switch (a.kind) {
    case Act::silu: return g * sigmoid(g) * up;
    case Act::gelu_tanh: return 0.5 * g * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * up;
    case Act::gelu: return 0.5 * g * std::erfc(-g * 0.7071067811865476) * up;
    case Act::relu: return std::max(g, 0.0) * up;
    case Act::relu2: return std::max(g, 0.0) * std::max(g, 0.0) * up;
    case Act::swiglu_oai:
    case Act::swiglu_clamp: break;
  }
  g = std::min<double>(g, a.limit);
  u = std::clamp<double>(u, -a.limit, a.limit);
  if (a.kind == Act::swiglu_clamp) return g * sigmoid(g) * (a.gated ? u : 1);
  return g * sigmoid(a.alpha * g) * (a.gated ? u + 1 : 1);
}

void finish(std::vector<double>& out, std::vector<double>& normed, int64_t t, int64_t H, const Buffer* norm_weight,
            double eps) {
  double squares = 0;
  for (int64_t h = 0; h < H; ++h) squares += out[t * H + h] * out[t * H + h];
  for (int64_t h = 0; h < H && norm_weight != nullptr; ++h) {
    normed[t * H + h] = out[t * H + h] / std::sqrt(squares / H + eps) * (*norm_weight)[h];
  }
}

// Runs the case with 1, 2 and 3 threads into fresh outputs; returns the first after comparing bits.
template <class Run>
std::unique_ptr<Buffer> same_bits(Dtype d, int64_t n, Run run) {
  auto first = std::make_unique<Buffer>(d, n);
  run(*first, 1);
  for (int threads : {2, 3}) {
    Buffer again(d, n);
    run(again, threads);
    check(first->same_bits(again), "bits depend on the number of threads");
  }
  return first;
}

std::vector<int32_t> random_ids(int64_t T, int64_t top_k, int64_t E) {
  std::vector<int32_t> ids(static_cast<size_t>(T * top_k));
  for (auto& id : ids) {
    int64_t pick = below(E + 2);  // sentinels on both sides; duplicates by chance
    id = static_cast<int32_t>(pick == E + 1 ? -1 : pick);
  }
  return ids;
}

struct Planned {
  std::vector<int32_t> counts, offsets, order, inverse;

  Planned(const std::vector<int32_t>& ids, int64_t E)
      : counts(static_cast<size_t>(E)), offsets(static_cast<size_t>(E + 1)), order(ids.size()), inverse(ids.size()) {
    moefuse::plan({ids.data(), false}, indices(counts), indices(offsets), indices(order), indices(inverse));
  }
  Plan plan() { return {indices(offsets), indices(order), indices(inverse)}; }
};

struct ExpertsCase {
  Dtype dtype;
  int64_t T, E, top_k, H, I;
  Activation activation;
  bool interleaved, apart, biased, tailed, planned;
};

void test_experts(const ExpertsCase& c) {
  bool gated = c.activation.gated;
  int64_t rows = gated ? 2 * c.I : c.I;
  double scale_h = 1 / std::sqrt(c.H + 1.0), scale_i = 1 / std::sqrt(c.I + 1.0);
  auto x = random_buffer(c.dtype, c.T * c.H);
  auto gate_up = random_buffer(c.dtype, c.E * (c.apart ? c.I : rows) * c.H, scale_h);
  auto up = random_buffer(c.dtype, c.apart ? c.E * c.I * c.H : 0, scale_h);
  auto down = random_buffer(c.dtype, c.E * c.H * c.I, scale_i);
  auto up_bias = random_buffer(Dtype::f32, c.E * rows), down_bias = random_buffer(c.dtype, c.E * c.H);
  auto weights = random_buffer(Dtype::f32, c.T * c.top_k);
  auto shared = random_buffer(c.dtype, c.T * c.H), logit = random_buffer(Dtype::f32, c.T);
  auto residual = random_buffer(Dtype::f32, c.T * c.H), norm_weight = random_buffer(c.dtype, c.H);
  std::vector<int32_t> ids = random_ids(c.T, c.top_k, c.E);
  std::vector<int64_t> wide(ids.begin(), ids.end());
  Planned p(ids, c.E);

  Ids picked{ids.data(), false, c.T, c.top_k};
  if (!c.planned) picked = {wide.data(), true, c.T, c.top_k};
  Stacks stacks{};
  stacks.gate_up = plain_weight(*gate_up, c.E, c.apart ? c.I : rows, c.H);
  if (c.apart) stacks.up = plain_weight(*up, c.E, c.I, c.H);
  stacks.down = plain_weight(*down, c.E, c.H, c.I);
  if (c.biased) stacks.gate_up_bias = up_bias->tensor(), stacks.down_bias = down_bias->tensor();
  stacks.layout = c.interleaved ? Layout::interleaved : Layout::halves;
  Tail tail{};
  tail.eps = 1e-6f;
  if (c.tailed) {
    tail.shared = shared->tensor(c.H), tail.shared_logit = logit->tensor();
    tail.residual = residual->tensor(c.H), tail.norm_weight = norm_weight->tensor();
  }

  std::vector<double> want(static_cast<size_t>(c.T * c.H)), want_normed(want);
  auto gate_row = [&](int64_t i) { return gated && c.interleaved ? 2 * i : i; };
  auto up_row = [&](int64_t i) { return c.interleaved ? 2 * i + 1 : c.I + i; };
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t j = 0; j < c.top_k; ++j) {
      int64_t e = ids[static_cast<size_t>(t * c.top_k + j)];
      if (e < 0 || e >= c.E) continue;
      std::vector<double> hidden(static_cast<size_t>(c.I));
      for (int64_t i = 0; i < c.I; ++i) {
        double g = c.biased ? (*up_bias)[e * rows + gate_row(i)] : 0;
        double u = c.biased && gated ? (*up_bias)[e * rows + up_row(i)] : 0;
        for (int64_t h = 0; h < c.H; ++h) {
          double in = (*x)[t * c.H + h];
          g += in * (*gate_up)[(e * (c.apart ? c.I : rows) + gate_row(i)) * c.H + h];
          if (c.apart) u += in * (*up)[(e * c.I + i) * c.H + h];
          if (!c.apart && gated) u += in * (*gate_up)[(e * rows + up_row(i)) * c.H + h];
        }
        hidden[static_cast<size_t>(i)] = activated(c.activation, g, u);
      }
      for (int64_t h = 0; h < c.H; ++h) {
        double y = c.biased ? (*down_bias)[e * c.H + h] : 0;
        for (int64_t i = 0; i < c.I; ++i) y += hidden[static_cast<size_t>(i)] * (*down)[(e * c.H + h) * c.I + i];
        want[static_cast<size_t>(t * c.H + h)] += (*weights)[t * c.top_k + j] * y;
      }
    }
    for (int64_t h = 0; h < c.H && c.tailed; ++h) {
      int64_t at = t * c.H + h;
      want[static_cast<size_t>(at)] += (*shared)[at] / (1 + std::exp(-(*logit)[t])) + (*residual)[at];
    }
    finish(want, want_normed, t, c.H, c.tailed ? norm_weight.get() : nullptr, 1e-6);
  }

  auto normed = std::make_unique<Buffer>(c.dtype, c.T * c.H);
  auto out = same_bits(c.dtype, c.T * c.H, [&](Buffer& to, int threads) {
    experts(x->tensor(c.H), picked, weights->tensor(c.top_k), stacks, c.planned ? p.plan() : Plan{}, c.activation, tail,
            {to.output(c.H), normed->output(c.H)}, {}, threads);
  });
  close(*out, want, "experts");
  if (c.tailed) close(*normed, want_normed, "experts normed");
}

void test_all_experts() {
  const Act kinds[] = {Act::silu,  Act::gelu_tanh,  Act::gelu,        Act::relu,
                       Act::relu2, Act::swiglu_oai, Act::swiglu_clamp};
  const int64_t shapes[][5] = {// T, E, top_k, H, I
                               {0, 4, 2, 8, 8},     {1, 3, 2, 1, 1},    {1, 8, 4, 33, 17},  {5, 4, 3, 64, 48},
                               {3, 1, 1, 1061, 31}, {70, 2, 2, 31, 65}, {9, 5, 5, 100, 90}, {2, 3, 2, 2100, 40},
                               {7, 2, 2, 40, 1100}, {4, 6, 2, 5, 0},    {130, 1, 1, 36, 7}};
  int variant = 0;
  for (Dtype d : kDtypes) {
    for (const auto& s : shapes) {
      for (int repeat = 0; repeat < 3; ++repeat, ++variant) {
        ExpertsCase c{d, s[0], s[1], s[2], s[3], s[4], {kinds[variant % 7], variant % 4 != 3, 1.702f, 7.0f},
                      variant % 3 == 1, false, variant % 2 == 0, variant % 5 < 3, variant % 2 == 1};
        c.apart = c.activation.gated && !c.interleaved && variant % 5 == 0;
        context = kernels().name + std::string(" experts ") + std::to_string(variant);
        test_experts(c);
      }
    }
  }
}

void test_grouped(Dtype d, int64_t T, int64_t top_k, int64_t E, int64_t N, int64_t K, bool gather, bool scatter) {
  std::vector<int32_t> ids = random_ids(T, top_k, E);
  Planned p(ids, E);
  int64_t S = T * top_k;
  int64_t x_rows = gather ? T : S;
  int64_t stride_n = K + 3, stride_e = N * stride_n + 5;  // a view into something larger
  auto x = random_buffer(d, x_rows * K), grad = random_buffer(d, S * N), bias = random_buffer(d, E * N);
  auto weight = random_buffer(d, E * stride_e, 1 / std::sqrt(K + 1.0));
  std::vector<double> y(static_cast<size_t>(S * N)), outer(static_cast<size_t>(E * N * K));
  for (int64_t q = 0; q < p.offsets.back(); ++q) {
    int64_t s = p.order[static_cast<size_t>(q)];
    int64_t e = ids[static_cast<size_t>(s)], in = gather ? s / top_k : q, to = scatter ? s : q;
    for (int64_t n = 0; n < N; ++n) {
      double sum = (*bias)[e * N + n];
      for (int64_t k = 0; k < K; ++k) {
        sum += (*x)[in * K + k] * (*weight)[e * stride_e + n * stride_n + k];
        outer[static_cast<size_t>((e * N + n) * K + k)] += (*grad)[to * N + n] * (*x)[in * K + k];
      }
      y[static_cast<size_t>(to * N + n)] = sum;
    }
  }
  auto got = same_bits(d, S * N, [&](Buffer& to, int threads) {
    grouped_linear(x->tensor(K), plain_weight(*weight, E, N, K, stride_e, stride_n), bias->tensor(), p.plan(), gather,
                   scatter, to.output(N), threads);
  });
  close(*got, y, "grouped_linear");
  Buffer across(d, E * N * K);
  for (int64_t i = 0; i < E * N * K; ++i) {
    int64_t e = i / (N * K), k = i / N % K, n = i % N;
    across.set(i, (*weight)[e * stride_e + n * stride_n + k]);
  }
  Weight transposed = plain_weight(across, E, N, K, N * K, N);
  transposed.transposed = true;
  got = same_bits(d, S * N, [&](Buffer& to, int threads) {
    grouped_linear(x->tensor(K), transposed, bias->tensor(), p.plan(), gather, scatter, to.output(N), threads);
  });
  close(*got, y, "grouped_linear, transposed");
  auto got_outer = same_bits(d, E * N * K, [&](Buffer& to, int threads) {
    grouped_outer(grad->tensor(N), x->tensor(K), p.plan(), gather, scatter, to.output(K), threads);
  });
  close(*got_outer, outer, "grouped_outer");
}

// Two weights side by side, the second with a bias, and the first alone with bias and residual.
void test_linear(Dtype d, int64_t T, int64_t N, int64_t K) {
  int64_t second = N / 2 + 1, width = N + second;
  auto x = random_buffer(d, T * K), bias = random_buffer(d, N), residual = random_buffer(d, T * N);
  auto weight = random_buffer(d, width * K, 1 / std::sqrt(K + 1.0));  // rows of both, one behind the other
  std::vector<double> both(static_cast<size_t>(T * width)), alone(static_cast<size_t>(T * N));
  for (int64_t i = 0; i < T * width; ++i) {
    int64_t t = i / width, n = i % width;
    double sum = 0;
    for (int64_t k = 0; k < K; ++k) sum += (*x)[t * K + k] * (*weight)[n * K + k];
    both[static_cast<size_t>(i)] = sum + (n < N ? 0 : (*bias)[n - N]);
    if (n < N) alone[static_cast<size_t>(t * N + n)] = sum + (*bias)[n] + (*residual)[t * N + n];
  }
  Projections two{};
  two.weight = plain_weight(*weight, 1, N, K);
  two.third = plain_weight(*weight, 1, second, K);
  two.third.data = static_cast<const char*>(weight->data()) + N * K * bytes_of(d);
  two.third_bias = bias->tensor();
  auto got = same_bits(d, T * width, [&](Buffer& to, int threads) {
    linear(x->tensor(K), two, {}, to.output(width), threads);
  });
  close(*got, both, "linear, two weights");
  Projections one{};
  one.weight = two.weight;
  one.bias = bias->tensor();
  got = same_bits(d, T * N, [&](Buffer& to, int threads) {
    linear(x->tensor(K), one, residual->tensor(N), to.output(N), threads);
  });
  close(*got, alone, "linear, residual");
}

// The seven gradients of experts with silu, sentinels and duplicates among the ids, against loops in double.
void test_experts_backward(Dtype d, int64_t T, int64_t E, int64_t H, int64_t I, int64_t top_k, bool interleaved) {
  context = kernels().name + std::string(" experts_backward");
  int64_t S = T * top_k;
  std::vector<int32_t> ids = random_ids(T, top_k, E);
  Planned p(ids, E);
  auto grad = random_buffer(d, T * H), x = random_buffer(d, T * H), z = random_buffer(d, S * 2 * I);
  auto weights = random_buffer(Dtype::f32, S), bias = random_buffer(d, E * H);
  auto gate_up = random_buffer(d, E * 2 * I * H, 1 / std::sqrt(H));
  auto down = random_buffer(d, E * H * I, 1 / std::sqrt(I));

  const int64_t sizes[7] = {T * H, S, E * 2 * I * H, 0, E * H * I, E * 2 * I, E * H};
  std::vector<double> want[7];
  for (int i = 0; i < 7; ++i) want[i].assign(static_cast<size_t>(sizes[i]), 0);
  auto add = [&](int which, int64_t at, double value) { want[which][static_cast<size_t>(at)] += value; };
  double summed = 0;  // of a routing weight's gradient: a sum of H + I terms, and a call has as few as three of them
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t at = p.offsets[static_cast<size_t>(e)]; at < p.offsets[static_cast<size_t>(e) + 1]; ++at) {
      int64_t s = p.order[static_cast<size_t>(at)], t = s / top_k;
      double w = (*weights)[s], squares = 0;
      for (int64_t h = 0; h < H; ++h) {
        squares += std::pow((*bias)[e * H + h] * (*grad)[t * H + h], 2);
        add(1, s, (*bias)[e * H + h] * (*grad)[t * H + h]);
        add(6, e * H + h, w * (*grad)[t * H + h]);
      }
      for (int64_t i = 0; i < I; ++i) {
        int64_t rows[2] = {interleaved ? 2 * i : i, interleaved ? 2 * i + 1 : I + i};
        double g = (*z)[at * 2 * I + rows[0]], u = (*z)[at * 2 * I + rows[1]], sigmoid = 1 / (1 + std::exp(-g));
        double hidden = g * sigmoid * u, along = 0;
        for (int64_t h = 0; h < H; ++h) {
          along += (*grad)[t * H + h] * (*down)[(e * H + h) * I + i];
          add(4, (e * H + h) * I + i, w * (*grad)[t * H + h] * hidden);
        }
        add(1, s, hidden * along);
        squares += std::pow(hidden * along, 2);
        double d_z[2] = {w * along * sigmoid * (1 + g * (1 - sigmoid)) * u, w * along * g * sigmoid};
        for (int part = 0; part < 2; ++part) {
          add(5, e * 2 * I + rows[part], d_z[part]);
          for (int64_t h = 0; h < H; ++h) {
            add(0, t * H + h, d_z[part] * (*gate_up)[(e * 2 * I + rows[part]) * H + h]);
            add(2, (e * 2 * I + rows[part]) * H + h, d_z[part] * (*x)[t * H + h]);
          }
        }
      }
      summed = std::max(summed, std::sqrt(squares));
    }
  }

  std::unique_ptr<Buffer> first[7];
  for (int threads : {1, 2, 3}) {
    std::unique_ptr<Buffer> got[7];
    for (int i = 0; i < 7; ++i) got[i] = std::make_unique<Buffer>(i == 1 ? Dtype::f32 : d, sizes[i]);
    auto out = [&](int i) { return i == 3 ? Output{} : got[i]->output(); };
    Stacks stacks{plain_weight(*gate_up, E, 2 * I, H), {}, plain_weight(*down, E, H, I), {}, bias->tensor(),
                  interleaved ? Layout::interleaved : Layout::halves};
    experts_backward(grad->tensor(H), x->tensor(H), z->tensor(2 * I), weights->tensor(top_k), stacks, p.plan(),
                     {Act::silu, true, 1, 1}, {out(0), out(1), out(2), out(3), out(4), out(5), out(6)}, threads);
    for (int i = 0; i < 7; ++i) {
      if (threads == 1) {
        close(*got[i], want[i], "experts_backward", i == 1 ? summed : 0);
        first[i] = std::move(got[i]);
      } else {
        check(first[i]->same_bits(*got[i]), "bits depend on the number of threads");
      }
    }
  }
}

void test_plan() {
  context = "plan";
  std::vector<int32_t> ids = {2, 0, 0, 3, 2, 2};
  Planned p(ids, 3);
  check(p.counts == std::vector<int32_t>({2, 0, 3}), "counts");
  check(p.offsets == std::vector<int32_t>({0, 2, 2, 5}), "offsets");
  check(p.order == std::vector<int32_t>({1, 2, 0, 4, 5, 3}), "order");
  check(p.inverse == std::vector<int32_t>({2, 0, 1, 5, 3, 4}), "inverse");
}

Routing simple_routing(int64_t top_k, Score score) {
  return {top_k, score, true, 1, 1, 1, GroupScore::max, 0, 1e-20f, false};
}

void route_to(const std::vector<double>& logits, int64_t E, const Routing& r, std::vector<int32_t> want_ids,
              std::vector<double> want_weights, const Buffer* bias = nullptr) {
  int64_t T = static_cast<int64_t>(logits.size()) / E;
  Buffer in(Dtype::f32, T * E), weights(Dtype::f32, T * r.top_k);
  for (size_t i = 0; i < logits.size(); ++i) in.set(static_cast<int64_t>(i), logits[i]);
  std::vector<int32_t> ids(want_ids.size(), -7);
  route(in.tensor(E), bias == nullptr ? Tensor{} : bias->tensor(), {}, r, weights.output(r.top_k), indices(ids), 2);
  check(ids == want_ids, "route ids");
  close(weights, want_weights, "route weights");
}

void test_route() {
  context = kernels().name + std::string(" route");
  route_to({1, 3, 3, 0}, 4, simple_routing(2, Score::softmax), {1, 2}, {0.5, 0.5});
  route_to({-kInf, 0, -kInf}, 3, simple_routing(2, Score::sigmoid), {1, 3}, {1, 0});
  route_to({0, NAN, 1, 0, kInf, 1}, 3, simple_routing(2, Score::softmax), {3, 3, 3, 3}, {0, 0, 0, 0});
  // Ties wherever they stand: in the vector body and in the tail of the scores' loops.
  std::vector<double> flat(37, 0.3);
  route_to(flat, 37, simple_routing(4, Score::sqrtsoftplus), {0, 1, 2, 3}, {0.25, 0.25, 0.25, 0.25});
  Buffer bias(Dtype::f32, 37);
  for (int64_t i = 0; i < 37; ++i) bias.set(i, 0.5);
  for (Score score : {Score::softmax, Score::sigmoid, Score::sqrtsoftplus}) {
    route_to(flat, 37, simple_routing(4, score), {0, 1, 2, 3}, {0.25, 0.25, 0.25, 0.25}, &bias);
  }
  // Groups {0, 1}, {2, 3}, {4, 5}: the best by the sum of two is the last, by the maximum the first.
  Routing grouped = simple_routing(2, Score::sigmoid);
  grouped.groups = 3, grouped.top_groups = 1, grouped.group_score = GroupScore::top2_sum;
  route_to({3, -9, 0, 0, 2, 2}, 6, grouped, {4, 5}, {0.5, 0.5});
  grouped.group_score = GroupScore::max;
  double first = 1 / (1 + std::exp(-3.0)), second = 1 / (1 + std::exp(9.0));
  route_to({3, -9, 0, 0, 2, 2}, 6, grouped, {0, 1}, {first / (first + second), second / (first + second)});
}

void test_gate(Dtype d, int64_t T, int64_t H, int64_t E) {
  context = kernels().name + std::string(" gate");
  auto x = random_buffer(d, T * H), weight = random_buffer(d, E * H), norm_weight = random_buffer(d, H);
  std::vector<double> normed(static_cast<size_t>(T * H)), unused(normed), want(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t h = 0; h < H; ++h) unused[static_cast<size_t>(t * H + h)] = (*x)[t * H + h];
    finish(unused, normed, t, H, norm_weight.get(), 1e-5);
    double sum = 0, best = -kInf;
    std::vector<double> logits;
    for (int64_t e = 0; e < E; ++e) {
      double logit = 0;
      for (int64_t h = 0; h < H; ++h) logit += normed[static_cast<size_t>(t * H + h)] * (*weight)[e * H + h];
      logits.push_back(logit);
      best = std::max(best, logit);
    }
    for (double logit : logits) sum += std::exp(logit - best);
    want[static_cast<size_t>(t)] = 1 / sum;
  }
  Routing r = simple_routing(1, Score::softmax);
  r.renormalize = false;
  Buffer got_normed(d, T * H);
  auto weights = same_bits(Dtype::f32, T, [&](Buffer& to, int threads) {
    std::vector<int32_t> ids(static_cast<size_t>(T));
    Router router{plain_weight(*weight, 1, E, H), norm_weight->tensor(), {}, {}, {}, 1e-5f};
    gate(x->tensor(H), router, r, to.output(), indices(ids), got_normed.output(H), threads);
  });
  close(got_normed, normed, "normed");
  for (int64_t t = 0; t < T; ++t) {
    check(std::fabs((*weights)[t] - want[static_cast<size_t>(t)]) < 2e-5, "gate weight");
  }
}

void test_glu() {
  const Act kinds[] = {Act::silu,  Act::gelu_tanh,  Act::gelu,        Act::relu,
                       Act::relu2, Act::swiglu_oai, Act::swiglu_clamp};
  for (Act kind : kinds) {
    for (Dtype d : kDtypes) {
      for (int form = 0; form < 4; ++form) {  // halves, interleaved, apart, ungated
        context = kernels().name + std::string(" glu ") + std::to_string(static_cast<int>(kind));
        int64_t rows = 3, I = 700;
        bool together = form < 2, gated = form < 3;
        auto gate = random_buffer(d, rows * (together ? 2 * I : I), 1.5), up = random_buffer(d, rows * I);
        Activation act{kind, gated, 1.702f, 1.5f};
        std::vector<double> want;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < I; ++i) {
            int64_t g = form == 0 ? r * 2 * I + i : form == 1 ? r * 2 * I + 2 * i : r * I + i;
            double u = form == 0 ? (*gate)[g + I] : form == 1 ? (*gate)[g + 1] : (*up)[r * I + i];
            want.push_back(activated(act, (*gate)[g], u));
          }
        }
        auto got = same_bits(d, rows * I, [&](Buffer& to, int threads) {
          glu(gate->tensor(together ? 2 * I : I), form == 2 ? up->tensor(I) : Tensor{}, act,
              form == 1 ? Layout::interleaved : Layout::halves, to.output(I), threads);
        });
        close(*got, want, "glu");
      }
    }
    Buffer in(Dtype::f32, 4), out(Dtype::f32, 4);
    const double extremes[] = {-kInf, -3e38, -95, NAN};
    for (int64_t i = 0; i < 4; ++i) in.set(i, extremes[i]);
    glu(in.tensor(4), {}, {kind, false, 1.702f, 7.0f}, Layout::halves, out.output(4), 1);
    check(std::fabs(out[0]) == 0 && std::fabs(out[1]) == 0 && std::fabs(out[2]) < 1e-30, "large negative input");
    check(std::isnan(out[3]), "NaN comes through");
  }
}

void test_combine_in_place() {
  context = kernels().name + std::string(" combine");
  int64_t T = 40, top_k = 3, H = 301;
  for (Dtype d : kDtypes) {
    std::vector<int32_t> ids = random_ids(T, top_k, 4);
    Planned p(ids, 4);
    auto y = random_buffer(d, T * top_k * H), weights = random_buffer(d, T * top_k), gate = random_buffer(d, T);
    auto residual = random_buffer(d, T * H), shared = random_buffer(Dtype::f16, T * H);
    std::vector<double> want;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        double sum = (*gate)[t] * (*shared)[t * H + h] + (*residual)[t * H + h];
        for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
          sum += (*weights)[s] * (*y)[p.inverse[static_cast<size_t>(s)] * H + h];
        }
        want.push_back(sum);
      }
    }
    auto got = same_bits(d, T * H, [&](Buffer& to, int threads) {
      std::memcpy(to.data(), residual->data(), static_cast<size_t>(T * H * bytes_of(d)));
      Tail tail{shared->tensor(H), gate->tensor(), {}, to.tensor(H), {}, 1e-6f};
      combine(y->tensor(H), weights->tensor(top_k), indices(p.inverse), tail, {to.output(H), {}}, threads);
    });
    close(*got, want, "combine in place");
  }
}

// Heads of q, k and v in one row of a token, and a cache [B, L, Hk, D] whose places come before its heads.
void test_rope(Dtype d, int64_t B, int64_t S, int64_t Hq, int64_t Hk, int64_t D, int64_t half, int64_t position) {
  context = kernels().name + std::string(" rope at ") + std::to_string(position);
  int64_t L = 5, heads = Hq + 2 * Hk;
  auto x = random_buffer(d, B * S * heads * D), norm = random_buffer(d, D), start = random_buffer(d, B * L * Hk * D);
  auto cos = random_buffer(Dtype::f32, S * half), sin = random_buffer(d, B * S * half);
  auto turned = [&](int64_t b, int64_t s, int64_t h, int64_t i, bool normed) {
    int64_t row = ((b * S + s) * heads + h) * D;
    double squares = 0;
    for (int64_t j = 0; j < D; ++j) squares += (*x)[row + j] * (*x)[row + j];
    auto at = [&](int64_t j) { return (*x)[row + j] * (normed ? (*norm)[j] / std::sqrt(squares / D + 1e-5) : 1); };
    if (i >= 2 * half) return at(i);
    double c = (*cos)[s * half + i % half], sine = (*sin)[(b * S + s) * half + i % half];
    return i < half ? at(i) * c - at(i + half) * sine : at(i) * c + at(i - half) * sine;
  };
  std::vector<double> want_q, want_keys, want_values;
  for (int64_t i = 0; i < B * S * Hq * D; ++i) {
    want_q.push_back(turned(i / (S * Hq * D), i / (Hq * D) % S, i / D % Hq, i % D, true));
  }
  for (int64_t i = 0; i < B * L * Hk * D; ++i) {
    int64_t b = i / (L * Hk * D), s = i / (Hk * D) % L - position, h = i / D % Hk;
    bool written = s >= 0 && s < S;
    want_keys.push_back(written ? turned(b, s, Hq + h, i % D, false) : (*start)[i]);
    want_values.push_back(written ? (*x)[((b * S + s) * heads + Hq + Hk + h) * D + i % D] : (*start)[i]);
  }
  for (int threads : {1, 3}) {
    Buffer q(d, B * S * Hq * D), keys(d, B * L * Hk * D), values(d, B * L * Hk * D);
    for (const Buffer* t : {&keys, &values}) {
      std::memcpy(t->data(), start->data(), static_cast<size_t>(t->count() * bytes_of(d)));
    }
    auto of = [&](int64_t count, int64_t first) {
      return view(*x, {B, S, count, D}, {S * heads * D, heads * D, D}, first * D);
    };
    auto cache_of = [&](const Buffer& t) { return view(t, {B, Hk, L, D}, {L * Hk * D, D, Hk * D}); };
    Rotary rotary{view(*cos, {1, 1, S, half}), view(*sin, {1, B, S, half}), norm->tensor(D), {}, 1e-5f};
    rope(of(Hq, 0), of(Hk, Hq), of(Hk, Hq + Hk), rotary, {cache_of(keys), cache_of(values), {&position, true}},
         view(q, {B, S, Hq, D}), {}, threads);
    close(q, want_q, "q");
    close(keys, want_keys, "keys");
    close(values, want_values, "values");
  }
}

// Every third place is masked, and what is not seen is no number.
void test_attend(Dtype d, int64_t B, int64_t Hq, int64_t Hk, int64_t D, int64_t Dv, int64_t L, int64_t position,
                 int64_t window) {
  context = kernels().name + std::string(" attend at ") + std::to_string(position);
  auto q = random_buffer(d, B * Hq * D), keys = random_buffer(d, B * L * Hk * D), sinks = random_buffer(d, Hq);
  auto values = random_buffer(d, B * L * Hk * Dv);
  std::vector<uint8_t> mask;
  std::vector<double> want;
  auto seen = [&](int64_t b, int64_t j) {
    return mask[static_cast<size_t>(b * L + j)] != 0 && j <= position && (window == 0 || j > position - window);
  };
  for (int64_t i = 0; i < B * L; ++i) {
    mask.push_back(i % 3 != 0);
    for (int64_t j = 0; j < Hk * D && !seen(i / L, i % L); ++j) keys->set(i * Hk * D + j, NAN);
    for (int64_t j = 0; j < Hk * Dv && !seen(i / L, i % L); ++j) values->set(i * Hk * Dv + j, NAN);
  }
  for (int64_t row = 0; row < B * Hq; ++row) {
    int64_t b = row / Hq, h = row % Hq / (Hq / Hk);
    double total = std::exp((*sinks)[row % Hq]);
    std::vector<double> sum(static_cast<size_t>(Dv));
    for (int64_t j = 0; j < L; ++j) {
      double logit = 0;
      for (int64_t i = 0; i < D; ++i) logit += (*q)[row * D + i] * (*keys)[((b * L + j) * Hk + h) * D + i];
      if (!seen(b, j)) continue;
      total += std::exp(0.1f * logit);
      for (int64_t i = 0; i < Dv; ++i) {
        sum[static_cast<size_t>(i)] += std::exp(0.1f * logit) * (*values)[((b * L + j) * Hk + h) * Dv + i];
      }
    }
    for (double value : sum) want.push_back(value / total);
  }
  Cache cache{view(*keys, {B, Hk, L, D}, {L * Hk * D, D, Hk * D}),
              view(*values, {B, Hk, L, Dv}, {L * Hk * Dv, Dv, Hk * Dv}),
              {&position, true}};
  auto got = same_bits(d, B * Hq * Dv, [&](Buffer& to, int threads) {
    attend(view(*q, {1, B, Hq, D}), cache, {mask.data(), L}, sinks->tensor(), 0.1f, window, to.output(Dv), threads);
  });
  close(*got, want, "attend");
}

// One product large enough for several threads, compared with its own bits.
class Repeated {
 public:
  Repeated() : ids_(random_ids(64, 2, 4)), planned_(ids_, 4), plan_(planned_.plan()) {
    x_ = random_buffer(Dtype::bf16, 64 * 256);
    weight_ = random_buffer(Dtype::bf16, 4 * 96 * 256);
    expected_ = std::make_unique<Buffer>(Dtype::bf16, 128 * 96);
    run(*expected_, 1);
  }

  bool agrees(int threads) const {
    Buffer y(Dtype::bf16, 128 * 96);
    run(y, threads);
    return y.same_bits(*expected_);
  }

 private:
  void run(Buffer& y, int threads) const {
    grouped_linear(x_->tensor(256), plain_weight(*weight_, 4, 96, 256), {}, plan_, true, true, y.output(96), threads);
  }

  std::vector<int32_t> ids_;
  Planned planned_;
  Plan plan_;
  std::unique_ptr<Buffer> x_, weight_, expected_;
};

void test_concurrent_callers_and_fork() {
  context = "callers";
  Repeated product;
  bool agreed[4] = {};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      agreed[i] = true;
      for (int n = 0; n < 50; ++n) agreed[i] = product.agrees(1 + n % 4) && agreed[i];
    });
  }
  for (auto& caller : callers) caller.join();
  for (bool ok : agreed) check(ok, "a concurrent caller got other bits");

  context = "fork";
  pid_t child = fork();
  if (child == 0) {
    bool ok = true;
    for (int n = 0; n < 10; ++n) ok = product.agrees(3) && ok;
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child of a fork computes the same");
  check(product.agrees(2), "the parent goes on");
}

// A team as OpenMP keeps one: runs on its threads and comes back when the last of them has.
int team_threads, team_calls;
std::chrono::milliseconds team_delay;

void run_on_team(void (*run)(void*), void* data, unsigned threads, unsigned) {
  check(threads == 0, "the whole team is asked for");
  ++team_calls;
  std::vector<std::thread> team;
  for (int i = 1; i < team_threads; ++i) team.emplace_back(run, data);
  run(data);
  for (auto& thread : team) thread.join();
  std::this_thread::sleep_for(team_delay);
}

void test_openmp_team() {
  Repeated product;
  for (int size : {1, 2, 5}) {
    context = "team of " + std::to_string(size);
    team_threads = size, team_calls = 0, team_delay = {};
    share_openmp(run_on_team);
    check(product.agrees(3) && team_calls == 1, "the product is right and the team ran it");
    check(product.agrees(1) && team_calls == 1, "one thread needs no team");

    // Every task once, on workers below the number asked for.
    std::vector<std::atomic<int>> runs(64);
    std::atomic<bool> above{false};
    share_openmp(run_on_team);
    run_phases({{64, [&](int64_t task, int64_t, int worker) {
                   runs[static_cast<size_t>(task)] += 1;
                   std::this_thread::sleep_for(std::chrono::microseconds(200));  // so that all come to work
                   if (worker < 0 || worker >= 2) above = true;
                 }}},
               2);
    check(!above && std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; }), "tasks and workers");
  }

  context = "late team";
  team_threads = 2, team_calls = 0, team_delay = std::chrono::milliseconds(3);
  share_openmp(run_on_team);
  for (int n = 0; n < 40; ++n) check(product.agrees(2), "right on either kind of thread");
  check(team_calls == 5, "a team that is late is left alone for 2, 4, 8, .. calls");

  context = "fork with a team";
  team_delay = {};
  share_openmp(run_on_team);
  pid_t child = fork();
  if (child == 0) {
    team_calls = 0;
    _exit(product.agrees(3) && team_calls == 0 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child has threads of its own");
  check(shares_openmp(), "the parent keeps its team");

  context = "libgomp";
  if (void* library = dlopen("libgomp.so.1", RTLD_NOW)) {
    share_openmp(reinterpret_cast<OpenMPParallel>(dlsym(library, "GOMP_parallel")));
    for (int n = 0; n < 20; ++n) check(product.agrees(1 + n % 4), "the same bits on OpenMP's threads");
  }
  share_openmp(nullptr);
}

// Every 16-bit value comes back as it went in; halfway between two neighbours rounds to the even one.
void test_conversions() {
  context = kernels().name + std::string(" conversions");
  constexpr int64_t kCount = 0x7fff;
  for (Dtype d : {Dtype::bf16, Dtype::f16}) {
    std::vector<uint16_t> bits(kCount), back(kCount);
    for (int64_t i = 0; i < kCount; ++i) bits[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
    std::vector<float> values(kCount), middles(kCount, 0.0f);
    kernels().decode(d, bits.data(), values.data(), kCount);
    kernels().encode(values.data(), d, back.data(), kCount);
    uint16_t infinity = d == Dtype::bf16 ? 0x7f80 : 0x7c00;
    for (uint16_t i = 0; i < kCount; ++i) {
      double want = widen(d, &bits[i]);
      if (i > infinity) {
        check(std::isnan(values[i]) && back[i] > infinity, "NaN stays NaN");
      } else {
        check(values[i] == want && back[i] == i, "a value changed on the way");
      }
      if (i + 1 < infinity) middles[i] = static_cast<float>((want + widen(d, &bits[i + 1u])) / 2);
    }
    kernels().encode(middles.data(), d, back.data(), kCount);
    for (uint16_t i = 0; i + 1 < infinity; ++i) check(back[i] == i + (i & 1), "a tie rounds to even");
  }
  float large[4] = {65519, 65520, -65520, 3e38f};
  uint16_t half[4];
  kernels().encode(large, Dtype::f16, half, 4);
  check(half[0] == 0x7bff && half[1] == 0x7c00 && half[2] == 0xfc00 && half[3] == 0x7c00, "f16 overflow");
}

void test_unknown_isa() {
  context = "isa";
  try {
    set_isa("sse9");
    fail("an unknown instruction set is refused");
  } catch (const std::invalid_argument& error) {
    check(std::strstr(error.what(), "portable") != nullptr, "the message lists what there is");
  }
}

}  // namespace

int main() {
  test_plan();
  test_unknown_isa();
  test_openmp_team();
  for (const std::string& isa : isas()) {
    set_isa(isa);
    test_conversions();
    test_route();
    test_glu();
    test_combine_in_place();
    test_all_experts();
    test_blocks();
    for (Dtype d : kDtypes) {
      test_gate(d, 5, 70, 37);
      test_gate(d, 1, 1100, 130);
      for (int form = 0; form < 4; ++form) {
        context = isa + " grouped";
        test_grouped(d, 6, 2, 4, 33, 45, form & 1, form & 2);
        test_grouped(d, 50, 2, 1, 300, 70, form & 1, form & 2);
        test_grouped(d, 0, 2, 3, 4, 5, form & 1, form & 2);
      }
      context = isa + " linear";
      test_linear(d, 1, 300, 70);
      test_linear(d, 5, 33, 45);
      test_linear(d, 130, 200, 260);
      test_experts_backward(d, 7, 4, 33, 21, 2, false);
      test_experts_backward(d, 60, 2, 40, 37, 4, true);
      test_experts_backward(d, 3, 2, 300, 270, 1, false);
      test_experts_backward(d, 0, 3, 8, 8, 2, true);
      for (int64_t position : {-9, -1, 0, 3, 5}) test_rope(d, 2, 3, 3, 2, 70, 33, position);
      test_rope(d, 4, 40, 8, 2, 128, 64, 1);
      test_rope(d, 0, 1, 1, 1, 2, 1, 0);
      for (int64_t position : {-1, 0, 1, 600, 640}) test_attend(d, 2, 6, 2, 70, 45, 610, position, 0);
      test_attend(d, 1, 70, 1, 16, 8, 700, 650, 300);
      test_attend(d, 3, 2, 2, 256, 128, 9, 7, 4);
      test_attend(d, 0, 2, 1, 8, 8, 4, 2, 0);
      test_attend(d, 1, 2, 1, 8, 8, 0, 2, 0);
    }
    test_concurrent_callers_and_fork();
    std::printf("%s: %s\n", isa.c_str(), failures == 0 ? "ok" : "failed");
  }
  return failures == 0 ? 0 : 1;
}
