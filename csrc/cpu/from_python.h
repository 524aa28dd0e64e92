// The values of core.h from their Python forms: torch tensors, QuantTensor, and the bundles of moefuse.types by field.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core.h"

namespace moefuse {

namespace nb = nanobind;

// What the type of a Python value is compared with.
struct PythonTypes {
  nb::object dtypes[kPlainTypes], int64, quant_tensor;

  static const PythonTypes& get() {
    static const auto* found = new PythonTypes;  // never deleted: Python may be gone by then
    return *found;
  }

 private:
  PythonTypes() {
    nb::module_ torch = nb::module_::import_("torch");
    const char* names[kPlainTypes] = {"float32", "bfloat16", "float16"};  // as in Dtype
    for (int i = 0; i < kPlainTypes; ++i) dtypes[i] = torch.attr(names[i]);
    int64 = torch.attr("int64");
    quant_tensor = nb::module_::import_("moefuse.quant.tensor").attr("QuantTensor");
  }
};

// The name of an attribute, as a template argument: each is interned once.
template <size_t N>
struct Name {
  char text[N];

  constexpr Name(const char (&name)[N]) { std::copy_n(name, N, text); }
};

// Reads values, with the GIL held; None leaves a value as it is by default. It owns the copies that it has to make.
class Reader {
 public:
  template <class T>
  T get(nb::handle from) {
    T to{};
    read(from, to);
    return to;
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
    Sizes shape(attribute<"shape">(from));
    to = {address(from), dtype(from), shape.product(shape.count() - 1), shape[-1]};
  }

  void read(nb::handle from, Ids& to) {
    Sizes shape(attribute<"shape">(from));
    bool wide = attribute<"dtype">(from).is(types_.int64);
    to = {address(from), wide, shape.product(shape.count() - 1), shape[-1]};
  }

  void read(nb::handle from, View& to) {
    if (from.is_none()) return;
    Sizes shape(attribute<"shape">(from)), strides(call<"stride">(from));
    to.data = static_cast<char*>(address(from));
    to.dtype = dtype(from);
    for (int i = 0; i < 4; ++i) to.sizes[i] = shape[i - 4];
    for (int i = 0; i < 3; ++i) to.strides[i] = strides[i - 4] * (to.dtype == Dtype::f32 ? 4 : 2);
  }

  void read(nb::handle from, Mask& to) {
    if (from.is_none()) return;
    to = {static_cast<const uint8_t*>(address(from)), Sizes(call<"stride">(from))[-2]};
  }

  void read(nb::handle from, Indices& to) {
    if (from.is_none()) return;
    Sizes shape(attribute<"shape">(from));
    to = {static_cast<int32_t*>(address(from)), shape.product(shape.count())};
  }

  void read(nb::handle from, Weight& to) {
    if (from.is_none()) return;
    bool blocks = valid(PyObject_IsInstance(from.ptr(), types_.quant_tensor.ptr())) == 1;
    nb::object stack = blocks ? attribute<"blocks">(from) : nb::borrow(from);
    Sizes shape(attribute<"shape">(stack)), strides(call<"stride">(stack));
    to.E = shape[-3], to.N = shape[-2], to.K = shape[-1];
    if (blocks) {
      auto format = named<int>(attribute<"format">(from), kFormatNames, "cpu", "format");
      to.type = static_cast<WeightType>(kPlainTypes + format);
      const Format& form = block_format(to.type).exact;
      to.K = to.K / form.block_bytes * form.block;
      field<"exact">(from, to.exact);
      to.interleaved = PyUnicode_CompareWithASCIIString(attribute<"arrangement">(from).ptr(), "interleaved") == 0;
    } else {
      to.type = static_cast<WeightType>(dtype(stack));
    }
    // The transpose of a dense stack, as a backward pass asks for it, is read as it lies.
    bool dense = strides[-1] == 1 || to.K <= 1;
    to.transposed = !dense && strides[-2] == 1;
    if (!dense && !to.transposed) return read(copied(stack), to);
    int64_t bytes = blocks ? 1 : to.dtype() == Dtype::f32 ? 4 : 2;
    to.data = address(stack);
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

  template <Name name>
  static PyObject* interned() {
    static PyObject* found = PyUnicode_InternFromString(name.text);
    return found;
  }

  template <class N>
  static N valid(N number) {
    if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    return number;
  }

  static nb::object valid(PyObject* made) {
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
  }

  template <Name name>
  static nb::object attribute(nb::handle from) {
    return valid(PyObject_GetAttr(from.ptr(), interned<name>()));
  }

  template <Name name>
  static nb::object call(nb::handle from) {
    return valid(PyObject_CallMethodNoArgs(from.ptr(), interned<name>()));
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

  Dtype dtype(nb::handle tensor) const {
    nb::object found = attribute<"dtype">(tensor);
    for (int i = 0; i < kPlainTypes; ++i) {
      if (found.is(types_.dtypes[i])) return static_cast<Dtype>(i);
    }
    PyErr_Format(PyExc_NotImplementedError, "cpu: no kernels for the dtype %R", found.ptr());
    throw nb::python_error();
  }

  // torch says 0 of a tensor without elements, which here means that there is no tensor.
  static void* address(nb::handle tensor) {
    constexpr size_t kNowhere = 64;
    size_t found = PyLong_AsSize_t(call<"data_ptr">(tensor).ptr());
    return reinterpret_cast<void*>(found != 0 ? found : kNowhere);
  }

  nb::handle copied(nb::handle tensor) {
    copies_.push_back(call<"contiguous">(tensor));
    return copies_.back();
  }

  // The shape or the strides of a tensor.
  struct Sizes {
    nb::object values;

    explicit Sizes(nb::object tuple) : values(std::move(tuple)) {}
    int64_t count() const { return PyTuple_GET_SIZE(values.ptr()); }

    // Counted from the end; 1 where there is no such dimension.
    int64_t operator[](int64_t i) const {
      i += count();
      return i < 0 ? 1 : PyLong_AsLongLong(PyTuple_GET_ITEM(values.ptr(), i));
    }

    int64_t product(int64_t n) const {
      int64_t found = 1;
      for (int64_t i = 0; i < n; ++i) found *= PyLong_AsLongLong(PyTuple_GET_ITEM(values.ptr(), i));
      return found;
    }
  };

  const PythonTypes& types_ = PythonTypes::get();
  std::vector<nb::object> copies_;
};

}  // namespace moefuse
