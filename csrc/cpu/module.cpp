// moefuse.backends.cpu._core: the ops of core.h for Python, and what it may ask of the instruction sets.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <iterator>
#include <tuple>
#include <type_traits>

#include "core.h"
#include "replay.h"
#include "runtime/pool.h"

namespace nb = nanobind;
using namespace moefuse;

namespace {

template <class>
using Argument = nb::handle;

template <class>
auto or_none() {
  return nb::arg().none();
}

// Arguments are read while Python waits and run while it goes on; the caller's frame holds their tensors.
template <class... Args>
void def(nb::module_& m, const char* name, void (*op)(Args...)) {
  auto run = [op](Argument<Args>... given) {
    std::array<nb::handle, sizeof...(Args)> all{given...};
    if (Recording* recording = Recording::open()) return recording->take(op, all);
    std::tuple<std::remove_cvref_t<Args>...> arguments{};
    Reader reader;
    reader.read_all(arguments, all);
    nb::gil_scoped_release released;
    std::apply(op, arguments);
  };
  m.def(name, run, or_none<Args>()...);
}

template <size_t N>
nb::list list_of(const char* const (&names)[N]) {
  nb::list list;
  for (const char* name : names) list.append(name);
  return list;
}

}  // namespace

NB_MODULE(_core, m) {
  // That of torch, which puts its runtime in the global scope and is imported before this module.
  share_openmp(reinterpret_cast<OpenMPParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")));
  PythonTypes::get();
  ExchangeTable::of_torch();

  // The last of each enum has the last name.
  static_assert(kIntegerTypes + kPlainTypes == static_cast<size_t>(WeightType::fp8));
  static_assert(std::size(kFormatNames) + kPlainTypes == static_cast<size_t>(WeightType::fp8) + 1);
  static_assert(std::size(kScoreNames) == static_cast<size_t>(Score::sqrtsoftplus) + 1);
  static_assert(std::size(kActNames) == static_cast<size_t>(Act::swiglu_clamp) + 1);
  m.attr("FORMATS") = list_of(kFormatNames);
  m.attr("SCORES") = list_of(kScoreNames);
  m.attr("ACTIVATIONS") = list_of(kActNames);

  m.def("isa", [] { return std::string(kernels().name); });
  m.def("isas", &isas);
  m.def("set_isa", &set_isa);
  m.def("shares_openmp", &shares_openmp);

  nb::set_leak_warnings(false);  // recordings are kept until Python ends
  m.def("look", &look, nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
  nb::class_<Recording>(m, "Recording")
      .def(nb::init<nb::tuple>())
      .def("open", [](Recording& recording) { Recording::open() = &recording; })
      .def("close", [](Recording&) { Recording::open() = nullptr; })
      .def("allocated", &Recording::allocated)
      .def("finish", &Recording::finish)
      .def("__call__", &Recording::run);

  def(m, "route", route);
  def(m, "route_backward", route_backward);
  def(m, "gate", gate);
  def(m, "gate_backward", gate_backward);
  def(m, "plan", plan);
  def(m, "grouped_linear", grouped_linear);
  def(m, "grouped_linear_transposed", grouped_linear_transposed);
  def(m, "grouped_outer", grouped_outer);
  def(m, "linear", linear);
  def(m, "interleave", interleave);
  def(m, "glu", glu);
  def(m, "glu_backward", glu_backward);
  def(m, "combine", combine);
  def(m, "combine_backward", combine_backward);
  def(m, "tail_backward", tail_backward);
  def(m, "experts", experts);
  def(m, "experts_backward", experts_backward);
  def(m, "rope", rope);
  def(m, "attend", attend);
}
