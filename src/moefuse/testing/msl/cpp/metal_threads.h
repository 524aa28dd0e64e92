// What threads do together: barriers, atomics, the collectives of simdgroups and quadgroups, matrices of 8 by 8.
// `line` is where the shader calls: threads that meet must come from one place.
#pragma once

#define MSL_HERE int line = __builtin_LINE()

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, MSL_HERE) { msl::msl_threadgroup_barrier(uint(flags), line); }
inline void simdgroup_barrier(mem_flags flags, MSL_HERE) { msl::msl_simdgroup_barrier(uint(flags), line); }

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> || is_same_v<T, bool>,
                "Metal 3.0 has atomics of 32 bits");
  T hidden;
  atomic() = default;
  atomic(const atomic&) = delete;
  atomic& operator=(const atomic&) = delete;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

}  // namespace metal

namespace msl {

// The access is announced as an atomic one, so the compiler must not announce it again.
template <class T, class F>
__attribute__((no_sanitize("thread"))) inline T atomically(const volatile metal::atomic<T>* object, bool reads,
                                                          bool writes, int line, F change) {
  T* value = const_cast<T*>(&object->hidden);
  msl_atomic_access(value, sizeof(T), reads, writes, line);
  const T old = *value;
  if (writes) *value = change(old);
  return old;
}
template <class T>
struct Same {
  using type = T;
};
template <class T>
using same = typename Same<T>::type;  // an argument of this type does not deduce T

}  // namespace msl

namespace metal {

template <class T>
inline T atomic_load_explicit(const volatile atomic<T>* object, memory_order, MSL_HERE) {
  return msl::atomically(object, true, false, line, [](T x) { return x; });
}
#define MSL_ATOMIC(NAME, RESULT)                                                                           \
  template <class T>                                                                                       \
  inline T NAME(volatile atomic<T>* object, msl::same<T> operand, memory_order, MSL_HERE) {                \
    return msl::atomically(object, true, true, line, [=](T old) { return T(RESULT); });                          \
  }
MSL_ATOMIC(atomic_exchange_explicit, ((void)old, operand))
MSL_ATOMIC(atomic_fetch_add_explicit, old + operand)
MSL_ATOMIC(atomic_fetch_sub_explicit, old - operand)
MSL_ATOMIC(atomic_fetch_min_explicit, operand < old ? operand : old)
MSL_ATOMIC(atomic_fetch_max_explicit, operand > old ? operand : old)
MSL_ATOMIC(atomic_fetch_and_explicit, old & operand)
MSL_ATOMIC(atomic_fetch_or_explicit, old | operand)
MSL_ATOMIC(atomic_fetch_xor_explicit, old ^ operand)
#undef MSL_ATOMIC
template <class T>
inline void atomic_store_explicit(volatile atomic<T>* object, msl::same<T> value, memory_order, MSL_HERE) {
  msl::atomically(object, false, true, line, [=](T) { return value; });
}
template <class T>
inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, msl::same<T> desired,
                                                  memory_order, memory_order, MSL_HERE) {
  const T wanted = *expected;
  const T old = msl::atomically(object, true, true, line, [=](T x) { return x == wanted ? desired : x; });
  *expected = old;
  return old == wanted;
}

}  // namespace metal

namespace msl {

template <class T>
inline T& value(Lanes& lanes, uint lane) {
  return *reinterpret_cast<T*>(lanes.slot[lane]);
}

// What a lane can hand over: Metal's collectives take no 64-bit numbers and no bool, and bfloat only in late versions.
template <class T>
inline constexpr bool fits_a_lane = sizeof(T) <= 4 && metal::is_scalar_v<T> && !metal::is_same_v<T, bool> &&
                                    !metal::is_same_v<T, bfloat>;
template <class T, uint N>
inline constexpr bool fits_a_lane<metal::vec<T, N>> = fits_a_lane<T>;

// Results go into the lanes' slots. Float sums add as a butterfly does: halves, then quarters.
template <class T, class F>
__attribute__((no_sanitize("thread"))) inline void reduce(Lanes& lanes, F join) {
  T part[SIMD_WIDTH];
  for (uint i = 0; i < lanes.count; ++i) part[i] = value<T>(lanes, i);
  for (uint step = SIMD_WIDTH / 2; step; step /= 2)
    for (uint i = 0; i < step; ++i)
      if (i + step < lanes.count) part[i] = join(part[i], part[i + step]);
  for (uint i = 0; i < lanes.count; ++i) value<T>(lanes, i) = part[0];
}

template <class T>
__attribute__((no_sanitize("thread"))) inline T meet(const char* name, int line, T mine, Finish finish) {
  static_assert(sizeof(T) <= sizeof(Lanes::slot[0]), "too large for a lane");
  return value<T>(msl_exchange(name, line, &mine, sizeof mine, finish), msl_place.thread_index_in_simdgroup);
}

// What lane `from` brought; a lane that does not exist has no value to give.
template <class T>
__attribute__((no_sanitize("thread"))) inline T fetch(const char* name, int line, T mine, uint from, bool needed = true) {
  static_assert(fits_a_lane<T>, "a shuffle takes numbers of 32 bits and fewer");
  Lanes& lanes = msl_exchange(name, line, &mine, sizeof mine, nullptr);
  if (!needed) return mine;
  if (from >= lanes.count) msl_fault("collective", "takes a value from a lane that is not there", line);
  return value<T>(lanes, from);
}

}  // namespace msl

namespace metal {

#define MSL_REDUCTION(NAME, JOIN)                                                                               \
  template <class T>                                                                                            \
  inline T simd_##NAME(T x, MSL_HERE) {                                                                         \
    static_assert(msl::fits_a_lane<T>, "simd_" #NAME " takes numbers of 32 bits and fewer");                     \
    return msl::meet(                                                                                           \
        "simd_" #NAME, line, x, +[](msl::Lanes& lanes) { msl::reduce<T>(lanes, [](T a, T b) { return T(JOIN); }); }); \
  }
MSL_REDUCTION(sum, a + b)
MSL_REDUCTION(product, a * b)
MSL_REDUCTION(max, max(a, b))
MSL_REDUCTION(min, min(a, b))
MSL_REDUCTION(and, a & b)
MSL_REDUCTION(or, a | b)
MSL_REDUCTION(xor, a ^ b)
#undef MSL_REDUCTION
inline bool simd_any(bool x, MSL_HERE) { return simd_or(uint(x), line); }
inline bool simd_all(bool x, MSL_HERE) { return simd_and(uint(x), line); }

#define MSL_PREFIX(NAME, FIRST, JOIN, EXCLUSIVE)                              \
  template <class T>                                                         \
  inline T NAME(T x, MSL_HERE) {                                             \
    static_assert(msl::fits_a_lane<T>, #NAME " takes numbers of 32 bits");    \
    return msl::meet(                                                        \
        #NAME, line, x, +[](msl::Lanes& lanes) {                             \
          T running = T(FIRST);                                              \
          for (uint i = 0; i < lanes.count; ++i) {                           \
            T& slot = msl::value<T>(lanes, i);                               \
            const T before = running, own = slot;                            \
            running = T(running JOIN own);                                   \
            slot = EXCLUSIVE ? before : running;                             \
          }                                                                  \
        });                                                                  \
  }
MSL_PREFIX(simd_prefix_exclusive_sum, 0, +, true)
MSL_PREFIX(simd_prefix_inclusive_sum, 0, +, false)
MSL_PREFIX(simd_prefix_exclusive_product, 1, *, true)
MSL_PREFIX(simd_prefix_inclusive_product, 1, *, false)
#undef MSL_PREFIX

class simd_vote {
 public:
  using vote_t = ulong;
  explicit simd_vote(vote_t v = 0) : votes(v) {}
  explicit operator vote_t() const { return votes; }
  bool any() const { return votes != 0; }
  bool all() const { return votes == 0xffffffff; }

 private:
  vote_t votes;
};
inline simd_vote simd_ballot(bool x, MSL_HERE) {
  return simd_vote(msl::meet(
      "simd_ballot", line, ulong(x), +[](msl::Lanes& lanes) {
        ulong votes = 0;
        for (uint i = 0; i < lanes.count; ++i) votes |= msl::value<ulong>(lanes, i) << i;
        for (uint i = 0; i < lanes.count; ++i) msl::value<ulong>(lanes, i) = votes;
      }));
}
inline bool simd_is_first(MSL_HERE) {
  msl::msl_together("simd_is_first", line);
  return msl::msl_place.thread_index_in_simdgroup == 0;
}

// `own` is this thread's lane. A quadgroup is four neighbours of a simdgroup, which here meets as a whole.
#define MSL_SHUFFLE(NAME, OPERAND, FROM)                                                    \
  template <class T>                                                                        \
  inline T NAME(T x, ushort OPERAND, MSL_HERE) {                                            \
    [[maybe_unused]] const uint own = msl::msl_place.thread_index_in_simdgroup;             \
    return msl::fetch(#NAME, line, x, FROM);                                                \
  }
MSL_SHUFFLE(simd_shuffle, lane, lane)
MSL_SHUFFLE(simd_broadcast, lane, lane)
MSL_SHUFFLE(simd_shuffle_xor, mask, own ^ mask)
MSL_SHUFFLE(simd_shuffle_rotate_down, by, (own + by) % msl::SIMD_WIDTH)
MSL_SHUFFLE(simd_shuffle_rotate_up, by, (own - by) % msl::SIMD_WIDTH)
MSL_SHUFFLE(quad_shuffle_xor, mask, own ^ (mask & 3))
MSL_SHUFFLE(quad_broadcast, lane, (own & ~3u) + (lane & 3))
#undef MSL_SHUFFLE
template <class T>
inline T simd_broadcast_first(T x, MSL_HERE) {
  return msl::fetch("simd_broadcast_first", line, x, 0);
}
// Nothing wraps around: lanes without a partner keep their own value.
template <class T>
inline T simd_shuffle_down(T x, ushort by, MSL_HERE) {
  const uint lane = msl::msl_place.thread_index_in_simdgroup;
  return msl::fetch("simd_shuffle_down", line, x, lane + by, lane + by < msl::SIMD_WIDTH);
}
template <class T>
inline T simd_shuffle_up(T x, ushort by, MSL_HERE) {
  const uint lane = msl::msl_place.thread_index_in_simdgroup;
  return msl::fetch("simd_shuffle_up", line, x, lane - by, lane >= by);
}
#define MSL_QUAD(NAME, JOIN)                                                                \
  template <class T>                                                                        \
  inline T NAME(T a, MSL_HERE) {                                                            \
    for (ushort mask = 2; mask > 0; --mask) {                                               \
      const T b = quad_shuffle_xor(a, mask, line);                                          \
      a = JOIN;                                                                             \
    }                                                                                       \
    return a;                                                                               \
  }
MSL_QUAD(quad_sum, a + b)
MSL_QUAD(quad_max, max(a, b))
MSL_QUAD(quad_min, min(a, b))
#undef MSL_QUAD

// Each lane holds two neighbours of a row, where Apple's GPUs have them.
template <class T, int ROWS = 8, int COLUMNS = 8>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8 && is_floating_point_v<T>, "Metal has 8 by 8, of float, half or bfloat");
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T x) : elements(x) {}
  vec<T, 2>& thread_elements() { return elements; }
  vec<T, 2> elements;
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

}  // namespace metal

namespace msl {

inline uint matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline uint matrix_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

// Of element `i` of this thread's two; the origin is (column, row) in memory.
inline ulong matrix_offset(uint i, ulong elements_per_row, ulong2 origin, bool transpose) {
  const uint row = matrix_row(msl_place.thread_index_in_simdgroup);
  const uint column = matrix_column(msl_place.thread_index_in_simdgroup) + i;
  return (origin.y + (transpose ? column : row)) * elements_per_row + origin.x + (transpose ? row : column);
}

struct Fragments {
  float a[2], b[2], c[2];
};

__attribute__((no_sanitize("thread"))) inline void multiply(Lanes& lanes) {
  if (lanes.count != SIMD_WIDTH) msl_fault("collective", "multiplies matrices in a simdgroup of fewer than 32 threads", 0);
  float a[8][8], b[8][8];
  for (uint lane = 0; lane < SIMD_WIDTH; ++lane) {
    const Fragments& f = value<Fragments>(lanes, lane);
    for (uint i = 0; i < 2; ++i) {
      a[matrix_row(lane)][matrix_column(lane) + i] = f.a[i];
      b[matrix_row(lane)][matrix_column(lane) + i] = f.b[i];
    }
  }
  for (uint lane = 0; lane < SIMD_WIDTH; ++lane) {
    Fragments& f = value<Fragments>(lanes, lane);
    const uint row = matrix_row(lane), column = matrix_column(lane);
    for (uint k = 0; k < 8; ++k)
      for (uint i = 0; i < 2; ++i) f.c[i] += a[row][k] * b[k][column + i];
  }
}

}  // namespace msl

namespace metal {

template <class T, int R, int C>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x, MSL_HERE) {
  msl::msl_together("make_filled_simdgroup_matrix", line);
  return simdgroup_matrix<T, R, C>(x);
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* source, ulong elements_per_row = 8,
                           ulong2 origin = ulong2(0), bool transpose = false, MSL_HERE) {
  msl::msl_together("simdgroup_load", line);
  for (uint i = 0; i < 2; ++i) m.elements.at[i] = source[msl::matrix_offset(i, elements_per_row, origin, transpose)];
}
template <class T>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* target, ulong elements_per_row = 8,
                            ulong2 origin = ulong2(0), bool transpose = false, MSL_HERE) {
  msl::msl_together("simdgroup_store", line);
  for (uint i = 0; i < 2; ++i) target[msl::matrix_offset(i, elements_per_row, origin, transpose)] = m.elements.at[i];
}
// Sums are kept in float and rounded to the result's type once.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          MSL_HERE) {
  msl::Fragments f;
  for (uint i = 0; i < 2; ++i) f.a[i] = a.elements.at[i], f.b[i] = b.elements.at[i], f.c[i] = c.elements.at[i];
  f = msl::meet("simdgroup_multiply_accumulate", line, f, msl::multiply);
  d.elements = vec<D, 2>(D(f.c[0]), D(f.c[1]));
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, MSL_HERE) {
  simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<D, 8, 8>(D(0)), line);
}

}  // namespace metal

#undef MSL_HERE
