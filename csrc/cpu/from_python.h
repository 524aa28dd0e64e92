// The values of core.h from their Python forms: torch tensors, QuantTensor, and the bundles of moefuse.types by field.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "core.h"
#include "dlpack.h"

namespace moefuse {

// What of Python is asked for, once.
struct PythonTypes {
  nb::object tensor, parameter, quant_tensor, routing, activation;
  nb::object empty_like, threads;

  static const PythonTypes& get() {
    static const auto* found = new PythonTypes;  // never deleted: Python may be gone by then
    return *found;
  }

 private:
  PythonTypes() {
    nb::module_ torch = nb::module_::import_("torch"), types = nb::module_::import_("moefuse.types");
    tensor = torch.attr("Tensor");
    parameter = torch.attr("nn").attr("Parameter");
    quant_tensor = types.attr("QuantTensor");
    routing = types.attr("Routing");
    activation = types.attr("Activation");
    empty_like = torch.attr("empty_like");
    threads = torch.attr("get_num_threads");
  }
};

// The name of an attribute, as a template argument: each is interned once.
template <size_t N>
struct Name {
  char text[N];

  constexpr Name(const char (&name)[N]) { std::copy_n(name, N, text); }
};

template <Name name>
PyObject* interned() {
  static PyObject* found = PyUnicode_InternFromString(name.text);
  return found;
}

inline nb::object valid(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

template <Name name>
nb::object attribute(nb::handle from) {
  return valid(PyObject_GetAttr(from.ptr(), interned<name>()));
}

template <Name name>
nb::object call(nb::handle from) {
  return valid(PyObject_CallMethodNoArgs(from.ptr(), interned<name>()));
}

// Where an address was written, and which tensor begins there.
struct Address {
  void* field;
  nb::object tensor;
};

// Reads values into their place, with the GIL held; None leaves one as it is by default. It owns the copies that it has
// to make.
class Reader {
 public:
  std::vector<Address>* addresses = nullptr;  // noted, where somebody asks

  template <class... Args>
  void read_all(std::tuple<Args...>& to, const std::array<nb::handle, sizeof...(Args)>& from) {
    size_t i = 0;
    std::apply([&](Args&... each) { (read(from[i++], each), ...); }, to);
  }

 private:
  void read(nb::handle from, bool& to) { to = from.ptr() == Py_True; }
  void read(nb::handle from, int& to) { to = static_cast<int>(valid(PyLong_AsLong(from.ptr()))); }
  void read(nb::handle from, int64_t& to) { to = valid(PyLong_AsLongLong(from.ptr())); }
  void read(nb::handle from, float& to) {
    if (!from.is_none()) to = static_cast<float>(valid(PyFloat_AsDouble(from.ptr())));
  }

  void read(nb::handle from, Act& to) { to = named<Act>(from, kActNames, "cpu", "activation"); }
  void read(nb::handle from, Score& to) { to = named<Score>(from, kScoreNames, "cpu", "score"); }
  void read(nb::handle from, GroupScore& to) { to = named<GroupScore>(from, kGroupScoreNames, "group_score", "kind"); }
  void read(nb::handle from, Layout& to) { to = named<Layout>(from, kLayoutNames, "layout", "kind"); }

  template <class Data>
  void read(nb::handle from, Matrix<Data>& to) {
    if (from.is_none()) return;
    DLTensor t = look_at(from);
    Sizes shape{t.shape, t.ndim};
    point(from, t, to.data);
    to.dtype = dtype(from, t);
    to.rows = shape.product(shape.count - 1), to.columns = shape[-1];
  }

  void read(nb::handle from, Ids& to) {
    DLTensor t = look_at(from);
    Sizes shape{t.shape, t.ndim};
    point(from, t, to.data);
    to.wide = t.bits == 64;
    to.rows = shape.product(shape.count - 1), to.columns = shape[-1];
  }

  void read(nb::handle from, View& to) {
    if (from.is_none()) return;
    DLTensor t = look_at(from);
    Sizes shape{t.shape, t.ndim}, strides{t.strides, t.ndim};
    point(from, t, to.data);
    to.dtype = dtype(from, t);
    for (int i = 0; i < 4; ++i) to.sizes[i] = shape[i - 4];
    for (int i = 0; i < 3; ++i) to.strides[i] = strides[i - 4] * (to.dtype == Dtype::f32 ? 4 : 2);
  }

  void read(nb::handle from, Mask& to) {
    if (from.is_none()) return;
    DLTensor t = look_at(from);
    point(from, t, to.data);
    to.stride = Sizes{t.strides, t.ndim}[-2];
  }

  void read(nb::handle from, Indices& to) {
    if (from.is_none()) return;
    DLTensor t = look_at(from);
    point(from, t, to.data);
    to.size = Sizes{t.shape, t.ndim}.product(t.ndim);
  }

  void read(nb::handle from, Weight& to) {
    if (from.is_none()) return;
    bool blocks = valid(PyObject_IsInstance(from.ptr(), types_.quant_tensor.ptr())) == 1;
    nb::object stack = blocks ? attribute<"blocks">(from) : nb::borrow(from);
    DLTensor t = look_at(stack);
    Sizes shape{t.shape, t.ndim}, strides{t.strides, t.ndim};
    to.E = shape[-3], to.N = shape[-2], to.K = shape[-1];
    if (blocks) {
      auto format = named<int>(attribute<"format">(from), kFormatNames, "cpu", "format");
      to.type = static_cast<WeightType>(kPlainTypes + format);
      const Format& form = block_format(to.type).exact;
      to.K = to.K / form.block_bytes * form.block;
      field<"exact">(from, to.exact);
      to.interleaved = PyUnicode_CompareWithASCIIString(attribute<"arrangement">(from).ptr(), "interleaved") == 0;
    } else {
      to.type = static_cast<WeightType>(dtype(stack, t));
    }
    // The transpose of a dense stack, as a backward pass asks for it, is read as it lies.
    bool dense = strides[-1] == 1 || to.K <= 1;
    to.transposed = !dense && strides[-2] == 1;
    if (!dense && !to.transposed) return read(copied(stack), to);
    int64_t bytes = blocks ? 1 : to.dtype() == Dtype::f32 ? 4 : 2;
    point(stack, t, to.data);
    to.stride_e = strides[-3] * bytes;
    to.stride_n = strides[to.transposed ? -1 : -2] * bytes;
  }

  // Where only contiguous rows will do: others are copied.
  template <Name name>
  void rows_field(nb::handle from, Weight& to) {
    nb::object stack = attribute<name>(from);
    read(stack, to);
    if (to.transposed) read(copied(stack), to);
  }

  void read(nb::handle from, Plan& to) {
    if (from.is_none()) return;
    if (addresses != nullptr) throw nb::value_error("a plan is checked at each call");
    field<"offsets">(from, to.offsets);
    field<"order">(from, to.order);
    field<"inverse">(from, to.inverse);
    check_plan(to);
  }

  void read(nb::handle from, Routing& to) {
    field<"top_k">(from, to.top_k);
    field<"score">(from, to.score);
    field<"renormalize">(from, to.renormalize);
    field<"scale">(from, to.scale);
    field<"groups">(from, to.groups);
    field<"top_groups">(from, to.top_groups);
    field<"group_score">(from, to.group_score);
    field<"softcap">(from, to.softcap);
    field<"floor">(from, to.floor);
    field<"renormalize_after_scale">(from, to.renormalize_after_scale);
  }

  void read(nb::handle from, Activation& to) {
    field<"kind">(from, to.kind);
    field<"gated">(from, to.gated);
    field<"alpha">(from, to.alpha);
    field<"limit">(from, to.limit);
  }

  void read(nb::handle from, Router& to) {
    rows_field<"weight">(from, to.weight);
    field<"norm_weight">(from, to.norm_weight);
    field<"bias">(from, to.bias);
    field<"logit_bias">(from, to.logit_bias);
    field<"per_expert_scale">(from, to.per_expert_scale);
    field<"eps">(from, to.eps);
  }

  void read(nb::handle from, Stacks& to) {
    rows_field<"gate_up">(from, to.gate_up);
    rows_field<"up">(from, to.up);
    rows_field<"down">(from, to.down);
    field<"gate_up_bias">(from, to.gate_up_bias);
    field<"down_bias">(from, to.down_bias);
    field<"layout">(from, to.layout);
  }

  void read(nb::handle from, Projections& to) {
    rows_field<"weight">(from, to.weight);
    rows_field<"second">(from, to.second);
    rows_field<"third">(from, to.third);
    rows_field<"fourth">(from, to.fourth);
    field<"bias">(from, to.bias);
    field<"second_bias">(from, to.second_bias);
    field<"third_bias">(from, to.third_bias);
    field<"fourth_bias">(from, to.fourth_bias);
  }

  void read(nb::handle from, Tail& to) {
    field<"shared">(from, to.shared);
    field<"shared_gate">(from, to.shared_gate);
    field<"shared_logit">(from, to.shared_logit);
    field<"residual">(from, to.residual);
    field<"norm_weight">(from, to.norm_weight);
    field<"eps">(from, to.eps);
  }

  void read(nb::handle from, Outputs& to) {
    field<"out">(from, to.out);
    field<"normed">(from, to.normed);
  }

  void read(nb::handle from, Rotary& to) {
    field<"cos">(from, to.cos);
    field<"sin">(from, to.sin);
    field<"q_norm">(from, to.q_norm);
    field<"k_norm">(from, to.k_norm);
    field<"eps">(from, to.eps);
  }

  void read(nb::handle from, Cache& to) {
    if (from.is_none()) return;
    field<"keys">(from, to.keys);
    field<"values">(from, to.values);
    field<"position">(from, to.position);
  }

  void read(nb::handle from, GateGradients& to) {
    field<"x">(from, to.x);
    field<"weight">(from, to.weight);
    field<"norm_weight">(from, to.norm_weight);
    field<"logit_bias">(from, to.logit_bias);
    field<"per_expert_scale">(from, to.per_expert_scale);
  }

  void read(nb::handle from, TailGradients& to) {
    field<"sum">(from, to.sum);
    field<"shared">(from, to.shared);
    field<"shared_gate">(from, to.shared_gate);
    field<"shared_logit">(from, to.shared_logit);
    field<"norm_weight">(from, to.norm_weight);
  }

  void read(nb::handle from, ExpertsGradients& to) {
    field<"x">(from, to.x);
    field<"weights">(from, to.weights);
    field<"gate_up">(from, to.gate_up);
    field<"up">(from, to.up);
    field<"down">(from, to.down);
    field<"gate_up_bias">(from, to.gate_up_bias);
    field<"down_bias">(from, to.down_bias);
  }

  template <Name name, class T>
  void field(nb::handle from, T& to) {
    read(attribute<name>(from), to);
  }

  template <class N>
  static N valid(N number) {
    if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return number;
  }

  // The place of a name among those that kernels know. One they do not know is refused, as moefuse.backends.codes does.
  template <class E, size_t N>
  static E named(nb::handle name, const char* const (&names)[N], const char* owner, const char* what) {
    for (size_t i = 0; i < N; ++i) {
      if (PyUnicode_Check(name.ptr()) && PyUnicode_CompareWithASCIIString(name.ptr(), names[i]) == 0) {
        return static_cast<E>(i);
      }
    }
    std::string known = names[0];
    for (size_t i = 1; i < N; ++i) known += std::string(", ") + names[i];
    PyErr_Format(PyExc_NotImplementedError, "%s: no kernels for the %s %R, only for %s", owner, what, name.ptr(),
                 known.c_str());
    throw nb::python_error();
  }

  static Dtype dtype(nb::handle tensor, const DLTensor& t) {
    constexpr uint8_t kFloat = 2, kBfloat = 4;  // DLPack's
    if (t.code == kFloat && t.bits == 32) return Dtype::f32;
    if (t.code == kBfloat && t.bits == 16) return Dtype::bf16;
    if (t.code == kFloat && t.bits == 16) return Dtype::f16;
    PyErr_Format(PyExc_NotImplementedError, "cpu: no kernels for the dtype %R", attribute<"dtype">(tensor).ptr());
    throw nb::python_error();
  }

  template <class Data>
  void point(nb::handle tensor, const DLTensor& t, Data*& field) {
    field = static_cast<Data*>(t.address());
    if (addresses != nullptr) addresses->push_back({&field, nb::borrow(tensor)});
  }

  nb::handle copied(nb::handle tensor) {
    copies_.push_back(call<"contiguous">(tensor));
    return copies_.back();
  }

  const PythonTypes& types_ = PythonTypes::get();
  std::vector<nb::object> copies_;
};

}  // namespace moefuse
