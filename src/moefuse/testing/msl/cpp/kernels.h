// How a kernel is called: its parameters described for Python, and filled in for each thread.
#pragma once

// All else is hidden: shaders are loaded side by side, and must not share functions or variables of one name.
#define MSL_VISIBLE __attribute__((visibility("default")))

namespace msl {

template <class T>
struct Element {
  static constexpr const char* name = "struct";
  static constexpr u32 scalar = alignof(T) < 4 ? alignof(T) : 4;
};
#define MSL_ELEMENT(T, NAME)                        \
  template <>                                       \
  struct Element<T> {                               \
    static constexpr const char* name = NAME;       \
    static constexpr u32 scalar = sizeof(T);        \
  };
MSL_ELEMENT(float, "float32")
MSL_ELEMENT(half, "float16")
MSL_ELEMENT(bfloat, "bfloat16")
MSL_ELEMENT(bool, "bool")
MSL_ELEMENT(char, "int8")
MSL_ELEMENT(signed char, "int8")
MSL_ELEMENT(unsigned char, "uint8")
MSL_ELEMENT(short, "int16")
MSL_ELEMENT(unsigned short, "uint16")
MSL_ELEMENT(int, "int32")
MSL_ELEMENT(unsigned int, "uint32")
MSL_ELEMENT(long, "int64")
MSL_ELEMENT(unsigned long, "uint64")
MSL_ELEMENT(void, "void")
#undef MSL_ELEMENT
template <class T>
struct Element<const T> : Element<T> {};
template <class T>
struct Element<volatile T> : Element<T> {};
template <class T>
struct Element<const volatile T> : Element<T> {};
template <class T, uint N>
struct Element<metal::vec<T, N>> : Element<T> {};
template <class T, uint N>
struct Element<metal::packed_vec<T, N>> : Element<T> {};
template <class T>
struct Element<metal::atomic<T>> : Element<T> {};
template <class T, u64 N>
struct Element<T[N]> : Element<T> {};

template <class T>
struct Base {
  using type = T;
};
template <class T, u64 N>
struct Base<T[N]> : Base<T> {};

// A parameter as the translator saw it: a buffer's index, or where in Place the attribute's value stands.
struct Role {
  const char* name;
  int buffer;  // -1: an attribute
  u32 offset, components;
  char space;
};

// The same with what only the compiler knows of its type.
struct Parameter {
  Role role;
  const char* element;
  u32 bytes;
  bool pointer, writable;
};

template <class P>
struct Shape {
  using element = P;
  static constexpr bool pointer = false, writable = false;
  static P take(const Role& role) {
    const u32* value = reinterpret_cast<const u32*>(reinterpret_cast<const char*>(&msl_place) + role.offset);
    if constexpr (Components<P>::count == 1) {
      return P(value[0]);
    } else {
      P all;
      for (uint i = 0; i < Components<P>::count; ++i) all[i] = value[i];
      return all;
    }
  }
};
template <class T>
struct Shape<T*> {
  using element = T;
  static constexpr bool pointer = true, writable = true;
  static T* take(const Role& role) { return reinterpret_cast<T*>(msl_bound[role.buffer]); }
};
template <class T>
struct Shape<const T*> : Shape<T*> {
  static constexpr bool writable = false;
};
template <class T>
struct Shape<T&> {
  using element = T;
  static constexpr bool pointer = false, writable = true;
  static T& take(const Role& role) { return *reinterpret_cast<T*>(msl_bound[role.buffer]); }
};
template <class T>
struct Shape<const T&> {
  using element = T;
  static constexpr bool pointer = false, writable = false;
  static const T& take(const Role& role) { return *reinterpret_cast<const T*>(msl_bound[role.buffer]); }
};

template <class T>
constexpr u32 bytes_of = sizeof(T);
template <>
inline constexpr u32 bytes_of<void> = 1;
template <>
inline constexpr u32 bytes_of<const void> = 1;

struct Call {
  template <class F, class... A>
  Call(F function, A&&... arguments) {
    function(static_cast<A&&>(arguments)...);
  }
};
template <class... P>
__attribute__((no_sanitize("thread", "undefined"))) inline void call(void (*function)(P...), const Role* role) {
  Call{function, Shape<P>::take(*role++)...};  // braces: from left to right
}
template <class... P>
inline void describe(void (*)(P...), const Role* role, Parameter* into) {
  ((*into++ = Parameter{*role++, Element<typename Shape<P>::element>::name, bytes_of<typename Shape<P>::element>,
                        Shape<P>::pointer, Shape<P>::writable}),
   ...);
}

struct Kernel {
  const char* name;
  void (*entry)();
  u32 count, max_threads;
  Parameter* parameters;
};

// A declaration of threadgroup memory is noted when the library is loaded: its size is known without a run.
struct Declaration {
  const char* function;
  const char* name;
  u64 bytes;
  Declaration* next;
};
inline Declaration* declarations = nullptr;
struct Note : Declaration {
  Note(const char* function, const char* name, u64 bytes) : Declaration{function, name, bytes, declarations} {
    declarations = this;
  }
};
template <class Site, u64 BYTES>
inline Note note{Site::function(), Site::name(), BYTES};

template <class Site, class Array>
inline Array& threadgroup_array(u32 site, u32 granule, int line) {
  using T = typename Base<Array>::type;
  (void)&note<Site, sizeof(Array)>;
  return *static_cast<Array*>(msl_threadgroup_array(site, Site::name(), sizeof(Array), sizeof(T),
                                                    granule ? granule : Element<T>::scalar, line));
}

template <class T>
inline const volatile void* where(T* pointer) {
  return pointer;
}
template <class T>
inline const volatile void* where(T& reference) {
  return &reference;
}

// A pointer in another address space than declared is an error of Metal's compiler; here it shows when it is passed.
template <char SPACE>
inline void expect(const volatile void* pointer, const char* name, int line) {
  const u64 offset = reinterpret_cast<u64>(pointer) - msl_memory;
  const bool inside = offset < MEMORY_SPAN, group = inside && offset >= MEMORY_SPAN / 2;
  const bool right = SPACE == 't' ? group : SPACE == 'd' ? inside && !group : SPACE == 'p' ? !inside : !group;
  if (!right && pointer) msl_wrong_space(pointer, name, line);
}

}  // namespace msl
