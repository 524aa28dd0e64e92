// What the C++ tests are written with: checks, guarded buffers, comparison with double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(at, size) static_cast<void>(0)
#endif

#include "core.h"

namespace moefuse::test {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

inline int failures = 0;
inline std::string context;

inline void fail(const std::string& what) {
  if (++failures <= 20) std::fprintf(stderr, "FAIL [%s] %s\n", context.c_str(), what.c_str());
}

inline void check(bool ok, const char* what) {
  if (!ok) fail(what);
}

inline int64_t bytes_of(Dtype d) { return d == Dtype::f32 ? 4 : 2; }

inline double widen(Dtype d, const void* at) {
  if (d == Dtype::f32) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
  }
  uint16_t h;
  std::memcpy(&h, at, 2);
  if (d == Dtype::bf16) {
    uint32_t u = static_cast<uint32_t>(h) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
  int exponent = (h >> 10) & 31;
  double fraction = h & 1023;
  double magnitude = exponent == 31  ? (fraction != 0 ? NAN : kInf)
                     : exponent == 0 ? std::ldexp(fraction, -24)
                                     : std::ldexp(1024 + fraction, exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

// A value that the dtype holds exactly, so that the reference sees what the kernel sees.
inline void put(Dtype d, void* at, double value) {
  if (d == Dtype::f16) {
    // Multiples of 2**-8 below 4 are exact, as are the infinities and NaN.
    uint16_t h = 0;
    if (std::isnan(value)) {
      h = 0x7e00;
    } else if (std::isinf(value)) {
      h = value > 0 ? 0x7c00 : 0xfc00;
    } else if (double q = std::nearbyint(std::fabs(value) * 256) / 256; q > 0) {
      int exponent;
      double fraction = std::frexp(q, &exponent);
      h = static_cast<uint16_t>(((exponent + 14) << 10) | (static_cast<int>(fraction * 2048) & 1023));
      h = static_cast<uint16_t>(h | (value < 0 ? 0x8000 : 0));
    }
    std::memcpy(at, &h, 2);
    return;
  }
  float x = static_cast<float>(value);
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (d == Dtype::f32) {
    std::memcpy(at, &u, 4);
    return;
  }
  uint16_t h = static_cast<uint16_t>(u >> 16);
  std::memcpy(at, &h, 2);
}

class Buffer {
 public:
  Buffer(Dtype dtype, int64_t n) : dtype_(dtype), n_(n), width_(bytes_of(dtype)) { allocate(); }
  Buffer(Buffer&&) = delete;

  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(memory_.get(), static_cast<size_t>(size() + 2 * kGuard));
    for (int64_t i = 0; i < kGuard; ++i) {
      check(memory_[i] == kMark && memory_[kGuard + size() + i] == kMark, "a guard byte was overwritten");
    }
  }

  void* data() const { return memory_.get() + kGuard; }
  int64_t count() const { return n_; }
  Dtype dtype() const { return dtype_; }
  Tensor tensor(int64_t columns = 1) const { return {data(), dtype_, n_ / columns, columns}; }
  Output output(int64_t columns = 1) const { return {data(), dtype_, n_ / columns, columns}; }
  double operator[](int64_t i) const { return widen(dtype_, static_cast<char*>(data()) + i * width_); }
  void set(int64_t i, double value) { put(dtype_, static_cast<char*>(data()) + i * width_, value); }
  bool same_bits(const Buffer& other) const {
    return std::memcmp(data(), other.data(), static_cast<size_t>(size())) == 0;
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr unsigned char kMark = 0xa5;

  int64_t size() const { return n_ * width_; }

  void allocate() {
    memory_.reset(new unsigned char[static_cast<size_t>(size() + 2 * kGuard)]);
    std::memset(memory_.get(), kMark, static_cast<size_t>(size() + 2 * kGuard));
    for (int64_t i = 0; i < n_; ++i) set(i, NAN);
    ASAN_POISON_MEMORY_REGION(memory_.get(), kGuard);
    ASAN_POISON_MEMORY_REGION(memory_.get() + kGuard + size(), kGuard);
  }

  Dtype dtype_;
  int64_t n_, width_;
  std::unique_ptr<unsigned char[]> memory_;
};

// [E, N, K], with strides in elements, or dense.
inline Weight plain_weight(const Buffer& b, int64_t E, int64_t N, int64_t K, int64_t stride_e, int64_t stride_n) {
  int64_t width = bytes_of(b.dtype());
  return {b.data(), static_cast<WeightType>(b.dtype()), E, N, K, stride_e * width, stride_n * width};
}

inline Weight plain_weight(const Buffer& b, int64_t E, int64_t N, int64_t K) {
  return plain_weight(b, E, N, K, N * K, K);
}

// Dimensions that lie in memory in the order of their strides, in elements; the last is dense.
inline View view(const Buffer& b, const int64_t (&sizes)[4], const int64_t (&strides)[3], int64_t offset = 0) {
  int64_t width = bytes_of(b.dtype());
  View to{static_cast<char*>(b.data()) + offset * width, b.dtype()};
  for (int i = 0; i < 4; ++i) to.sizes[i] = sizes[i];
  for (int i = 0; i < 3; ++i) to.strides[i] = strides[i] * width;
  return to;
}

inline View view(const Buffer& b, const int64_t (&sizes)[4]) {
  return view(b, sizes, {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3]});
}

inline Indices indices(std::vector<int32_t>& v) { return {v.data(), static_cast<int64_t>(v.size())}; }

inline std::mt19937 rng(7);

inline double normal() { return std::normal_distribution<double>()(rng); }
inline int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(rng); }

inline std::unique_ptr<Buffer> random_buffer(Dtype d, int64_t n, double scale = 1) {
  auto b = std::make_unique<Buffer>(d, n);
  for (int64_t i = 0; i < n; ++i) b->set(i, normal() * scale);
  return b;
}

// Within the rounding of the result's dtype, relative to the largest value, or to what sums were made of where few of
// them are compared and all may have cancelled.
inline void close(const Buffer& got, const std::vector<double>& want, const char* what, double summed = 0) {
  double tolerance = got.dtype() == Dtype::f32 ? 3e-6 : got.dtype() == Dtype::bf16 ? 1.2e-2 : 1.5e-3;
  double subnormal = got.dtype() == Dtype::f16 ? 0x1p-24 : 0;
  double largest = std::max(summed, 1e-30);
  for (double x : want) largest = std::max(largest, std::fabs(x));
  for (int64_t i = 0; i < got.count(); ++i) {
    double error = std::fabs(got[i] - want[static_cast<size_t>(i)]);
    if (error <= tolerance * largest + subnormal) continue;
    char text[160];
    std::snprintf(text, sizeof text, "%s[%ld]: got %g, want %g", what, static_cast<long>(i), got[i],
                  want[static_cast<size_t>(i)]);
    return fail(text);
  }
}

// test_blocks.cpp: weights in GGUF blocks, on the instruction set in use.
void test_blocks();

}  // namespace moefuse::test
