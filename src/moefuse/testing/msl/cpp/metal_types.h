// Scalars with Metal's rounding, vectors, packed vectors, as_type.
#pragma once

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;

namespace metal {

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;
template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

}  // namespace metal

namespace msl {

inline u32 float_bits(float x) { return __builtin_bit_cast(u32, x); }
inline float bits_float(u32 x) { return __builtin_bit_cast(float, x); }

// To nearest, ties to even; what is too large becomes infinity; NaN stays NaN.
inline u16 float_to_bfloat(float x) {
  const u32 bits = float_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return u16(bits >> 16 | 0x40);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bfloat_to_float(u16 x) { return bits_float(u32(x) << 16); }

inline u16 float_to_half(float x) {
  const u32 bits = float_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return u16(sign | 0x7e00);
  if (size >= 0x477ff000) return u16(sign | 0x7c00);
  if (size < 0x38800000)  // a subnormal half: the addition rounds at the right bit
    return u16(sign | (float_bits(bits_float(size) + bits_float(0x3f000000)) - 0x3f000000));
  return u16(sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13));
}
inline float half_to_float(u16 x) {
  const u32 sign = u32(x & 0x8000) << 16, size = x & 0x7fff;
  if (size >= 0x7c00) return bits_float(sign | 0x7f800000 | (size & 0x3ff) << 13);
  // Scaling by 2**112 moves the exponent's bias and makes subnormals normal, exactly.
  return bits_float(sign | float_bits(bits_float(size << 13) * bits_float(0x77800000)));
}

template <class T>
inline constexpr bool is_arithmetic = __is_enum(T);
#define MSL_ARITHMETIC(T) \
  template <>             \
  inline constexpr bool is_arithmetic<T> = true;
MSL_ARITHMETIC(bool)
MSL_ARITHMETIC(char)
MSL_ARITHMETIC(signed char)
MSL_ARITHMETIC(unsigned char)
MSL_ARITHMETIC(short)
MSL_ARITHMETIC(unsigned short)
MSL_ARITHMETIC(int)
MSL_ARITHMETIC(unsigned int)
MSL_ARITHMETIC(long)
MSL_ARITHMETIC(unsigned long)
#undef MSL_ARITHMETIC

}  // namespace msl

struct bfloat;

// Each operation is done in float and rounded once: with 24 bits for 11 or 8 that is the correctly rounded result.
#define MSL_OPERATOR(NAME, OP)                                                                                        \
    NAME& operator OP##=(NAME o) { return *this = *this OP o; }                                                       \
    friend NAME operator OP(NAME a, NAME b) { return NAME(float(a) OP float(b)); }                                    \
    template <class I, class = metal::enable_if_t<msl::is_arithmetic<I>>>                                             \
    friend NAME operator OP(NAME a, I b) { return a OP NAME(b); }                                                     \
    friend float operator OP(NAME a, float b) { return float(a) OP b; }                                               \
    friend float operator OP(float a, NAME b) { return a OP float(b); }
#define MSL_SMALL_FLOAT(NAME, FROM_FLOAT, TO_FLOAT, IMPLICIT)                                                         \
  struct NAME {                                                                                                       \
    msl::u16 bits;                                                                                                    \
    NAME() = default;                                                                                                 \
    IMPLICIT NAME(float x) : bits(msl::FROM_FLOAT(x)) {}                                                              \
    template <class I, class = metal::enable_if_t<msl::is_arithmetic<I>>>                                             \
    IMPLICIT NAME(I x) : bits(msl::FROM_FLOAT(float(x))) {}                                                           \
    operator float() const { return msl::TO_FLOAT(bits); }                                                            \
    NAME operator-() const { return NAME(-float(*this)); }                                                            \
    NAME operator+() const { return *this; }                                                                          \
    MSL_OPERATOR(NAME, +)                                                                                             \
    MSL_OPERATOR(NAME, -)                                                                                             \
    MSL_OPERATOR(NAME, *)                                                                                             \
    MSL_OPERATOR(NAME, /)                                                                                             \
  };
MSL_SMALL_FLOAT(half, float_to_half, half_to_float, )
MSL_SMALL_FLOAT(bfloat, float_to_bfloat, bfloat_to_float, explicit)
#undef MSL_SMALL_FLOAT
#undef MSL_OPERATOR

namespace metal {

template <class T>
inline constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T>
inline constexpr bool is_integral_v = msl::is_arithmetic<T>;
template <class T>
inline constexpr bool is_scalar_v = is_floating_point_v<T> || is_integral_v<T>;

template <class T, uint N>
struct vec;

}  // namespace metal

namespace msl {

template <class T>
struct Components {
  static constexpr uint count = 1;
  static auto get(T v, uint) { return v; }
};
template <class T, uint N>
struct Components<metal::vec<T, N>> {
  static constexpr uint count = N;
  static T get(metal::vec<T, N> v, uint i) { return v[i]; }
};

template <class T, uint N>
struct Members;
template <class T>
struct alignas(2 * sizeof(T)) Members<T, 2> {
  union {
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    T at[2];
  };
};
template <class T>
struct alignas(4 * sizeof(T)) Members<T, 3> {
  union {
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    T at[3];
  };
};
template <class T>
struct alignas(4 * sizeof(T)) Members<T, 4> {
  union {
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    T at[4];
  };
};

}  // namespace msl

namespace metal {

template <class T, uint N>
struct vec : msl::Members<T, N> {
  using msl::Members<T, N>::at;
  vec() = default;
  vec(const vec&) = default;
  vec& operator=(const vec&) & = default;
  vec(T s) {
    for (uint i = 0; i < N; ++i) at[i] = s;
  }
  template <class A, class = enable_if_t<is_scalar_v<A> && !is_same_v<A, T>>>
  vec(A s) : vec(T(s)) {}
  template <class U>
  explicit vec(vec<U, N> o) {
    for (uint i = 0; i < N; ++i) at[i] = T(o[i]);
  }
  template <class A, class B, class... C>
  vec(A a, B b, C... c) {
    static_assert(msl::Components<A>::count + msl::Components<B>::count + (0 + ... + msl::Components<C>::count) == N,
                  "as many components as the vector has");
    uint n = 0;
    put(n, a);
    put(n, b);
    (put(n, c), ...);
  }
  T& operator[](uint i) { return at[i]; }
  T operator[](uint i) const { return at[i]; }
  template <uint... I>
  vec<T, sizeof...(I)> swizzle() const {
    return vec<T, sizeof...(I)>(at[I]...);
  }

#define MSL_BINARY(OP)                                                  \
  friend vec operator OP(vec a, vec b) {                                \
    vec c;                                                              \
    for (uint i = 0; i < N; ++i) c.at[i] = T(a.at[i] OP b.at[i]);       \
    return c;                                                           \
  }                                                                     \
  vec& operator OP##=(vec o)& { return *this = *this OP o; }
  MSL_BINARY(+)
  MSL_BINARY(-)
  MSL_BINARY(*)
  MSL_BINARY(/)
  MSL_BINARY(%)
  MSL_BINARY(&)
  MSL_BINARY(|)
  MSL_BINARY(^)
  MSL_BINARY(<<)
  MSL_BINARY(>>)
#undef MSL_BINARY
#define MSL_COMPARE(OP)                                                 \
  friend vec<bool, N> operator OP(vec a, vec b) {                       \
    vec<bool, N> c;                                                     \
    for (uint i = 0; i < N; ++i) c.at[i] = a.at[i] OP b.at[i];          \
    return c;                                                           \
  }
  MSL_COMPARE(==)
  MSL_COMPARE(!=)
  MSL_COMPARE(<)
  MSL_COMPARE(<=)
  MSL_COMPARE(>)
  MSL_COMPARE(>=)
  MSL_COMPARE(&&)
  MSL_COMPARE(||)
#undef MSL_COMPARE
  vec operator-() const {
    vec c;
    for (uint i = 0; i < N; ++i) c.at[i] = T(-at[i]);
    return c;
  }
  vec operator~() const {
    vec c;
    for (uint i = 0; i < N; ++i) c.at[i] = T(~at[i]);
    return c;
  }
  vec<bool, N> operator!() const {
    vec<bool, N> c;
    for (uint i = 0; i < N; ++i) c.at[i] = !at[i];
    return c;
  }

 private:
  template <class A>
  void put(uint& n, A a) {
    for (uint i = 0; i < msl::Components<A>::count; ++i) at[n++] = T(msl::Components<A>::get(a, i));
  }
};

// The same components without the alignment of a vector.
template <class T, uint N>
struct packed_vec {
  T at[N];
  packed_vec() = default;
  packed_vec(vec<T, N> v) {
    for (uint i = 0; i < N; ++i) at[i] = v[i];
  }
  operator vec<T, N>() const {
    vec<T, N> v;
    for (uint i = 0; i < N; ++i) v[i] = at[i];
    return v;
  }
  T& operator[](uint i) { return at[i]; }
  const T& operator[](uint i) const { return at[i]; }
};

}  // namespace metal

#define MSL_VECTORS(T)              \
  using T##2 = metal::vec<T, 2>;    \
  using T##3 = metal::vec<T, 3>;    \
  using T##4 = metal::vec<T, 4>;    \
  using packed_##T##2 = metal::packed_vec<T, 2>; \
  using packed_##T##3 = metal::packed_vec<T, 3>; \
  using packed_##T##4 = metal::packed_vec<T, 4>;
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

template <class To, class From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the bits, so both types have as many");
  return __builtin_bit_cast(To, x);
}
