// What a torch tensor says of itself, through DLPack's exchange table (version 1.3), which is far faster than its
// attributes. Layouts are those that https://dmlc.github.io/dlpack fixes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace moefuse {

namespace nb = nanobind;

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;  // of an element
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;

  int64_t nbytes() const {
    int64_t found = bits / 8;
    for (int32_t i = 0; i < ndim; ++i) found *= shape[i];
    return found;
  }

  // torch gives no address to a tensor without elements; here that would mean that there is no tensor.
  void* address() const {
    constexpr uintptr_t kNowhere = 64;
    return data != nullptr ? static_cast<char*>(data) + byte_offset : reinterpret_cast<void*>(kNowhere);
  }
};

// The shape or the strides of a tensor.
struct Sizes {
  const int64_t* values;
  int64_t count;

  // Counted from the end; 1 where there is no such dimension.
  int64_t operator[](int64_t i) const { return i + count < 0 ? 1 : values[i + count]; }

  int64_t product(int64_t n) const {
    int64_t found = 1;
    for (int64_t i = 0; i < n; ++i) found *= values[i];
    return found;
  }
};

struct ExchangeTable {
  uint32_t major, minor;
  void* previous;
  void *allocate, *from_python, *to_python;
  int (*look)(void* tensor, DLTensor* out);  // -1 with a Python error where it cannot
  void* current_stream;

  static const ExchangeTable& of_torch() {
    static const ExchangeTable* found = load();
    return *found;
  }

 private:
  static const ExchangeTable* load() {
    nb::object capsule = nb::module_::import_("torch").attr("Tensor").attr("__dlpack_c_exchange_api__");
    auto* table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) throw nb::python_error();
    if (table->major != 1) throw nb::import_error("torch exchanges tensors by another version of DLPack");
    return table;
  }
};

inline DLTensor look_at(nb::handle tensor) {
  DLTensor found;
  if (ExchangeTable::of_torch().look(tensor.ptr(), &found) != 0) throw nb::python_error();
  return found;
}

}  // namespace moefuse
