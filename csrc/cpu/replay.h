// What moefuse.ops._core.replay rests on: the key of a call, and calls of ops that run again on other tensors.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "from_python.h"

namespace moefuse {

// (key, tensors) of a call of `op`; the key is all that it hangs on but the numbers in its tensors: (op, backend,
// layouts and types, options). None where a value is not plain, or a tensor is negated, lies at an odd address or
// nowhere, or, with `gradients`, requires one.
inline nb::object look(nb::handle op, nb::handle backend, nb::handle values, bool gradients) {
  constexpr uintptr_t kAlignment = 16;  // what backends specialise addresses on
  const PythonTypes& types = PythonTypes::get();
  std::string key;
  auto note = [&](const void* from, size_t bytes) { key.append(static_cast<const char*>(from), bytes); };
  key.reserve(1024);
  nb::list options, tensors;
  for (nb::handle value : nb::borrow<nb::tuple>(values)) {
    PyTypeObject* type = Py_TYPE(value.ptr());
    note(&type, sizeof(type));
    nb::object blocks;
    if (type == reinterpret_cast<PyTypeObject*>(types.quant_tensor.ptr())) {
      options.append(attribute<"format">(value));
      options.append(attribute<"exact">(value));
      options.append(attribute<"arrangement">(value));
      blocks = attribute<"blocks">(value);
      value = blocks;
    }
    PyObject* kind = reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
    if (kind == types.tensor.ptr() || kind == types.parameter.ptr()) {
      // That torch has no words for a tensor without memory in DLPack takes it milliseconds to say.
      if (tensors.size() == 0 && attribute<"is_meta">(value).is(Py_True)) return nb::none();
      DLTensor t;
      if (ExchangeTable::of_torch().look(value.ptr(), &t) != 0) {
        PyErr_Clear();  // the checks have words for it
        return nb::none();
      }
      if ((reinterpret_cast<uintptr_t>(t.data) + t.byte_offset) % kAlignment != 0) return nb::none();
      if (t.data == nullptr && t.nbytes() > 0) return nb::none();  // zeros without memory
      if (call<"is_neg">(value).is(Py_True)) return nb::none();  // a view's sign is no part of its layout
      if (gradients && attribute<"requires_grad">(value).is(Py_True)) return nb::none();
      note(&t.device_type, offsetof(DLTensor, lanes) - offsetof(DLTensor, device_type));
      note(t.shape, static_cast<size_t>(t.ndim) * sizeof(int64_t));
      note(t.strides, static_cast<size_t>(t.ndim) * sizeof(int64_t));
      tensors.append(value);
    } else if (value.is_none() || PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr()) ||
               PyBool_Check(value.ptr()) || PyUnicode_CheckExact(value.ptr()) || kind == types.routing.ptr() ||
               kind == types.activation.ptr()) {
      options.append(value);
    } else {
      return nb::none();
    }
  }
  if (tensors.size() == 0) return nb::none();
  return nb::make_tuple(nb::make_tuple(op, backend, nb::bytes(key.data(), key.size()), nb::tuple(options)),
                        nb::tuple(tensors));
}

// One call of an op, whose arguments are known but for addresses and the number of threads.
struct Step {
  virtual ~Step() = default;
  virtual void run(void* const* buffers, int threads) const = 0;
};

template <class... Args>
struct StepOf final : Step {
  struct Place {
    size_t offset, buffer;
  };

  void (*op)(Args...);
  std::tuple<std::remove_cvref_t<Args>...> arguments{};
  std::vector<Place> places;

  void run(void* const* buffers, int threads) const override {
    auto now = arguments;
    for (Place place : places) {
      std::memcpy(reinterpret_cast<char*>(&now) + place.offset, &buffers[place.buffer], sizeof(void*));
    }
    if constexpr ((std::is_same_v<Args, int> || ...)) std::get<int>(now) = threads;  // the one int that an op takes
    std::apply(op, now);
  }
};

// Ops called while it is open are taken down and not run; once finished it runs them, on tensors laid out like its
// stand-ins. Buffers are numbered: the stand-ins, then what the run allocated.
class Recording {
 public:
  explicit Recording(nb::tuple stand_ins) : arguments_(stand_ins.size()) {
    for (nb::handle t : stand_ins) buffers_.push_back(nb::borrow(t));
  }

  Recording(const Recording&) = delete;

  static Recording*& open() {
    thread_local Recording* now = nullptr;
    return now;
  }

  template <class... Args>
  void take(void (*op)(Args...), const std::array<nb::handle, sizeof...(Args)>& given) {
    auto step = std::make_unique<StepOf<Args...>>();
    step->op = op;
    std::vector<Address> addresses;
    Reader reader;
    reader.addresses = &addresses;
    reader.read_all(step->arguments, given);
    auto* begin = reinterpret_cast<char*>(&step->arguments);
    for (const Address& a : addresses) {
      step->places.push_back({static_cast<size_t>(static_cast<char*>(a.field) - begin), number(a.tensor)});
    }
    steps_.push_back(std::move(step));
  }

  // What the run allocated.
  nb::list allocated() const {
    nb::list found;
    for (size_t i = arguments_; i < buffers_.size(); ++i) found.append(buffers_[i]);
    return found;
  }

  // `results`: (what is returned, a tensor like it or the number of an argument like it) each; what is returned is a
  // tensor that was allocated, a stand-in or None.
  void finish(nb::list results, bool alone) {
    alone_ = alone;
    for (nb::handle pair : results) {
      nb::object returned = pair[0], like = pair[1];
      if (returned.is_none()) {
        results_.push_back({});
        continue;
      }
      size_t buffer = number(returned);
      int64_t alike = nb::isinstance<nb::int_>(like) ? nb::cast<int64_t>(like) : -1;
      results_.push_back({buffer, true, alike, alike < 0 ? like : nb::object()});
    }
    places_.assign(buffers_.size(), -1);
    for (size_t i = arguments_; i < buffers_.size(); ++i) {
      bool returned = false;
      for (const Result& result : results_) returned |= result.given && result.buffer == i;
      if (returned) continue;
      places_[i] = scratch_;
      scratch_ += (look_at(buffers_[i]).nbytes() + kGrain - 1) / kGrain * kGrain;
    }
    for (nb::object& buffer : buffers_) buffer.reset();  // no tensor is kept
  }

  nb::object run(nb::tuple tensors) const {
    const PythonTypes& python = PythonTypes::get();
    std::vector<void*> at(places_.size());
    for (size_t i = 0; i < arguments_; ++i) at[i] = look_at(tensors[i]).address();
    nb::object returned = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(results_.size())));
    for (size_t i = 0; i < results_.size(); ++i) {
      const Result& result = results_[i];
      nb::object value = nb::none();
      if (result.given && result.buffer < arguments_) {
        value = nb::borrow(tensors[result.buffer]);
      } else if (result.given) {
        nb::handle like = result.alike < 0 ? nb::handle(result.like) : nb::handle(tensors[result.alike]);
        value = valid(PyObject_CallOneArg(python.empty_like.ptr(), like.ptr()));
        at[result.buffer] = look_at(value).address();
      }
      PyTuple_SET_ITEM(returned.ptr(), static_cast<Py_ssize_t>(i), value.release().ptr());
    }
    std::unique_ptr<char, decltype(&std::free)> scratch(nullptr, &std::free);
    if (scratch_ > 0) {
      scratch.reset(static_cast<char*>(std::aligned_alloc(kGrain, static_cast<size_t>(scratch_))));
      if (scratch == nullptr) throw std::bad_alloc();
      for (size_t i = arguments_; i < places_.size(); ++i) {
        if (places_[i] >= 0) at[i] = scratch.get() + places_[i];
      }
    }
    int threads = static_cast<int>(PyLong_AsLong(valid(PyObject_CallNoArgs(python.threads.ptr())).ptr()));
    {
      nb::gil_scoped_release released;
      for (const auto& step : steps_) step->run(at.data(), threads);
    }
    return alone_ ? nb::borrow(returned[0]) : returned;
  }

 private:
  static constexpr int64_t kGrain = 64;

  struct Result {
    size_t buffer = 0;
    bool given = false;
    int64_t alike = -1;
    nb::object like;
  };

  size_t number(nb::handle tensor) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (buffers_[i].is(tensor)) return i;
    }
    buffers_.push_back(nb::borrow(tensor));
    return buffers_.size() - 1;
  }

  size_t arguments_;
  std::vector<nb::object> buffers_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<Result> results_;
  std::vector<int64_t> places_;  // in the scratch memory, or -1
  int64_t scratch_ = 0;
  bool alone_ = false;
};

}  // namespace moefuse
