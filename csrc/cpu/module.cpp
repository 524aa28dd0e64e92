// moefuse.backends.cpu._core: the ops of core.h for Python, on addresses.
//
// A tensor is (address, dtype code), a weight (address, type code, expert stride, row stride, exact) with strides in
// bytes, (0, 0, ..) when absent; the codes are those of Dtype and WeightType. The Python side keeps the tensors alive.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <stdexcept>

#include "core.h"
#include "pool.h"
#include "training.h"

namespace nb = nanobind;
using namespace moefuse;

namespace {

using Address = uintptr_t;
using TensorArg = std::tuple<Address, int>;
using WeightArg = std::tuple<Address, int, int64_t, int64_t, bool>;
// shared, shared_gate, shared_logit, residual, norm_weight, eps, out, normed
using TailArg = std::tuple<TensorArg, TensorArg, TensorArg, TensorArg, TensorArg, float, TensorArg, TensorArg>;
// top_k, score, renormalize, scale, groups, top_groups, top2_sum, softcap, norm_floor, renormalize_after_scale
using RoutingArg = std::tuple<int64_t, int, bool, float, int64_t, int64_t, bool, float, float, bool>;
template <size_t N>
using OutputArgs = std::array<TensorArg, N>;
// kind, alpha, limit
using ActivationArg = std::tuple<int, float, float>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// A number from Python as a value of an enum that has `count` of them.
template <class E>
E checked(int code, size_t count, const char* what) {
  if (code < 0 || static_cast<size_t>(code) >= count) {
    throw std::invalid_argument("cpu: no kernels for " + std::string(what) + " number " + std::to_string(code));
  }
  return static_cast<E>(code);
}

Dtype dtype(int code) { return checked<Dtype>(code, kPlainTypes, "dtype"); }

Tensor tensor(const TensorArg& t) { return {at<const void>(std::get<0>(t)), dtype(std::get<1>(t))}; }

Output output(const TensorArg& t) { return {at<void>(std::get<0>(t)), dtype(std::get<1>(t))}; }

Weight weight(const WeightArg& w) {
  return {at<const void>(std::get<0>(w)), checked<WeightType>(std::get<1>(w), kPlainTypes + kBlockTypes, "weight type"), std::get<2>(w), std::get<3>(w),
          std::get<4>(w)};
}

Tail tail(const TailArg& t) {
  return {tensor(std::get<0>(t)), tensor(std::get<1>(t)), tensor(std::get<2>(t)), tensor(std::get<3>(t)),
          tensor(std::get<4>(t)), std::get<5>(t),         output(std::get<6>(t)), output(std::get<7>(t))};
}

Routing routing(const RoutingArg& r) {
  return {std::get<0>(r), checked<Score>(std::get<1>(r), std::size(kScoreNames), "score"), std::get<2>(r), std::get<3>(r), std::get<4>(r),
          std::get<5>(r), std::get<6>(r),                     std::get<7>(r), std::get<8>(r), std::get<9>(r)};
}

Activation activation(const ActivationArg& a) {
  return {checked<Act>(std::get<0>(a), std::size(kActNames), "activation"), std::get<1>(a), std::get<2>(a)};
}

// Absent where there are none; a plan that leads outside its S rows is refused.
Buckets buckets(Address offsets, Address order, int64_t S, int64_t E) {
  Buckets given{at<const int32_t>(offsets), at<const int32_t>(order)};
  if (given.offsets != nullptr) check_buckets(given, S, E);
  return given;
}

}  // namespace

NB_MODULE(_core, m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;

  // That of torch, which puts its runtime in the global scope and is imported before this module.
  share_openmp(reinterpret_cast<OpenMPParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")));

  // The last of each enum has the last name.
  static_assert(std::size(kFormatNames) == kBlockTypes);
  static_assert(std::size(kFormatNames) + kPlainTypes == static_cast<size_t>(WeightType::q3_k) + 1);
  static_assert(std::size(kScoreNames) == static_cast<size_t>(Score::sqrtsoftplus) + 1);
  static_assert(std::size(kActNames) == static_cast<size_t>(Act::swiglu_clamp) + 1);
  m.def("names", [] {
    nb::dict found;
    auto put = [&](const char* what, auto& names) {
      nb::list list;
      for (const char* name : names) list.append(name);
      found[what] = list;
    };
    put("formats", kFormatNames);
    put("scores", kScoreNames);
    put("activations", kActNames);
    return found;
  });
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("isas", &isas);
  m.def("set_isa", &set_isa);
  m.def("shares_openmp", &shares_openmp);

  m.def(
      "route",
      [](TensorArg logits, TensorArg bias, TensorArg scale, int64_t T, int64_t E, RoutingArg r, Address weights,
         Address ids, int threads) {
        route(tensor(logits), tensor(bias), tensor(scale), T, E, routing(r), at<float>(weights), at<int32_t>(ids),
              threads);
      },
      Release());

  m.def(
      "gate",
      [](TensorArg x, WeightArg w, TensorArg norm_weight, TensorArg bias, TensorArg logit_bias, TensorArg scale,
         float eps, int64_t T, int64_t H, int64_t E, RoutingArg r, Address weights, Address ids, TensorArg normed,
         int threads) {
        gate(tensor(x), weight(w), tensor(norm_weight), tensor(bias), tensor(logit_bias), tensor(scale), eps, T, H, E,
             routing(r), at<float>(weights), at<int32_t>(ids), output(normed), threads);
      },
      Release());

  m.def(
      "plan",
      [](Address ids, bool wide, int64_t S, int64_t E, Address counts, Address offsets, Address order,
         Address inverse) {
        plan({at<const void>(ids), wide}, S, E, at<int32_t>(counts), at<int32_t>(offsets), at<int32_t>(order),
             at<int32_t>(inverse));
      },
      Release());

  m.def(
      "grouped_linear",
      [](TensorArg x, int64_t x_rows, WeightArg w, TensorArg bias, Address offsets, Address order, int64_t S,
         int64_t E, int64_t N, int64_t K, bool gather, bool scatter, TensorArg y, int threads) {
        grouped_linear(tensor(x), x_rows, weight(w), tensor(bias), buckets(offsets, order, S, E), S, E, N, K, gather,
                       scatter, output(y), threads);
      },
      Release());

  m.def(
      "grouped_outer",
      [](TensorArg grad, TensorArg x, int64_t x_rows, Address offsets, Address order, int64_t S, int64_t E, int64_t N,
         int64_t K, bool gather, bool scatter, TensorArg out, int threads) {
        grouped_outer(tensor(grad), tensor(x), x_rows, buckets(offsets, order, S, E), S, E, N, K, gather, scatter,
                      output(out), threads);
      },
      Release());

  m.def(
      "glu",
      [](TensorArg gate, TensorArg up, int64_t rows, int64_t I, ActivationArg act, bool gated, bool interleaved,
         TensorArg out, int threads) {
        glu(tensor(gate), tensor(up), rows, I, activation(act), gated, interleaved, output(out), threads);
      },
      Release());

  m.def(
      "combine",
      [](TensorArg y, TensorArg weights, Address inverse, int64_t T, int64_t top_k, int64_t H, TailArg t,
         int threads) {
        combine(tensor(y), tensor(weights), at<const int32_t>(inverse), T, top_k, H, tail(t), threads);
      },
      Release());

  m.def(
      "experts",
      [](TensorArg x, Address ids, bool wide, TensorArg weights, WeightArg gate_up, WeightArg up, WeightArg down,
         TensorArg gate_up_bias, TensorArg down_bias, Address offsets, Address order, int64_t T, int64_t top_k,
         int64_t E, int64_t H, int64_t I, ActivationArg act, bool gated, bool interleaved, TailArg t, TensorArg z,
         int threads) {
        experts({tensor(x), {at<const void>(ids), wide}, tensor(weights), weight(gate_up), weight(up), weight(down),
                 tensor(gate_up_bias), tensor(down_bias), buckets(offsets, order, T * top_k, E), T, top_k, E, H, I, activation(act),
                 gated, interleaved, tail(t), output(z)},
                threads);
      },
      Release());

  m.def(
      "glu_backward",
      [](TensorArg grad, TensorArg gate, TensorArg up, int64_t rows, int64_t I, ActivationArg act, bool gated,
         bool interleaved, TensorArg d_gate, TensorArg d_up, int threads) {
        glu_backward(tensor(grad), tensor(gate), tensor(up), rows, I, activation(act), gated, interleaved,
                     output(d_gate), output(d_up), threads);
      },
      Release());

  m.def(
      "tail_backward",
      [](TensorArg d_out, TensorArg d_normed, TensorArg total, TensorArg shared, TensorArg shared_gate,
         TensorArg shared_logit, TensorArg norm_weight, float eps, int64_t T, int64_t H, OutputArgs<5> out,
         int threads) {
        tail_backward({tensor(d_out), tensor(d_normed), tensor(total), tensor(shared), tensor(shared_gate),
                       tensor(shared_logit), tensor(norm_weight), eps, T, H, output(out[0]), output(out[1]),
                       output(out[2]), output(out[3]), output(out[4])},
                      threads);
      },
      Release());

  m.def(
      "combine_backward",
      [](TensorArg d, TensorArg y, TensorArg weights, Address inverse, int64_t T, int64_t top_k, int64_t H,
         TensorArg d_y, TensorArg d_weights, int threads) {
        combine_backward(tensor(d), tensor(y), tensor(weights), at<const int32_t>(inverse), T, top_k, H, output(d_y),
                         output(d_weights), threads);
      },
      Release());

  m.def(
      "route_backward",
      [](TensorArg grad, TensorArg logits, Address ids, TensorArg scale, int64_t T, int64_t E, RoutingArg r,
         TensorArg d_logits, TensorArg d_scale, int threads) {
        route_backward(tensor(grad), tensor(logits), at<const int32_t>(ids), tensor(scale), T, E, routing(r),
                       output(d_logits), output(d_scale), threads);
      },
      Release());

  m.def(
      "gate_backward",
      [](TensorArg d_weights, TensorArg d_normed, TensorArg x, WeightArg w, TensorArg norm_weight,
         TensorArg logit_bias, TensorArg scale, Address ids, float eps, int64_t T, int64_t H, int64_t E, RoutingArg r,
         OutputArgs<5> out, int threads) {
        gate_backward({tensor(d_weights), tensor(d_normed), tensor(x), weight(w), tensor(norm_weight),
                       tensor(logit_bias), tensor(scale), at<const int32_t>(ids), eps, T, H, E, routing(r),
                       output(out[0]), output(out[1]), output(out[2]), output(out[3]), output(out[4])},
                      threads);
      },
      Release());

  m.def(
      "grouped_linear_mirrored",
      [](TensorArg x, int64_t x_rows, WeightArg w, TensorArg bias, Address offsets, Address order, int64_t S,
         int64_t E, int64_t N, int64_t K, bool gather, bool scatter, TensorArg y, int threads) {
        grouped_linear_mirrored(tensor(x), x_rows, weight(w), tensor(bias), buckets(offsets, order, S, E), S, E, N, K,
                                gather, scatter, output(y), threads);
      },
      Release());

  m.def(
      "experts_backward",
      [](TensorArg d, TensorArg x, TensorArg z, TensorArg weights, WeightArg gate_up, WeightArg up, WeightArg down,
         TensorArg down_bias, Address offsets, Address order, Address inverse, int64_t T, int64_t top_k, int64_t E,
         int64_t H, int64_t I, ActivationArg act, bool gated, bool interleaved, OutputArgs<7> out, int threads) {
        experts_backward({tensor(d), tensor(x), tensor(z), tensor(weights), weight(gate_up), weight(up), weight(down),
                          tensor(down_bias), buckets(offsets, order, T * top_k, E), at<const int32_t>(inverse), T, top_k, E, H, I,
                          activation(act), gated, interleaved, output(out[0]), output(out[1]), output(out[2]),
                          output(out[3]), output(out[4]), output(out[5]), output(out[6])},
                         threads);
      },
      Release());
}
