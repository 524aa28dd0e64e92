// The functions of kernels.h for one instruction set; MOEFUSE_ISA names it and the compiler flags define it.
//
// Nothing here may call a template or inline function of the standard library: the linker would be free to keep
// this file's copy, with this file's instructions, for the whole library.
#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#include "derivatives.h"
#include "dots.h"
#include "fp8.h"
#include "mathfn.h"
#include "outer.h"

// Which build of block_dots.cpp the table takes: AVX-512 without VNNI has none of its own.
#if defined(__AVX512VNNI__)
#define MOEFUSE_BLOCKS avx512vnni
#elif defined(__AVXVNNI__)
#define MOEFUSE_BLOCKS avxvnni
#elif defined(__AVX2__)
#define MOEFUSE_BLOCKS avx2
#else
#define MOEFUSE_BLOCKS portable
#endif
namespace moefuse::MOEFUSE_BLOCKS {
extern const BlockFormat kBlockFormats[kIntegerTypes], kInterleavedFormats[kIntegerTypes];
}

namespace moefuse::MOEFUSE_ISA {

constexpr int64_t kPackUnit = 2 * kLanes;
constexpr int64_t kStrip = 256;  // elements decoded at a time, in L1

inline uint16_t to_bf16(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

void decode(Dtype dtype, const void* x, float* out, int64_t n) {
  switch (dtype) {
    case Dtype::f32:
      std::memcpy(out, x, static_cast<size_t>(n) * 4);
      return;
    case Dtype::bf16: {
      auto in = static_cast<const uint16_t*>(x);
      for (int64_t i = 0; i < n; ++i) out[i] = from_bits(static_cast<uint32_t>(in[i]) << 16);
      return;
    }
    case Dtype::f16: {
      auto in = static_cast<const uint16_t*>(x);
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(out + i, load_f16(in + i));
      if (i < n) {
        uint16_t half[kLanes] = {};
        float full[kLanes];
        std::memcpy(half, in + i, static_cast<size_t>(n - i) * 2);
        store(full, load_f16(half));
        std::memcpy(out + i, full, static_cast<size_t>(n - i) * 4);
      }
      return;
    }
  }
}

void encode(const float* x, Dtype dtype, void* out, int64_t n) {
  switch (dtype) {
    case Dtype::f32:
      std::memcpy(out, x, static_cast<size_t>(n) * 4);
      return;
    case Dtype::bf16: {
      auto to = static_cast<uint16_t*>(out);
      for (int64_t i = 0; i < n; ++i) to[i] = to_bf16(x[i]);
      return;
    }
    case Dtype::f16: {
      auto to = static_cast<uint16_t*>(out);
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store_f16(to + i, load(x + i));
      if (i < n) {
        uint16_t half[kLanes];
        float full[kLanes] = {};
        std::memcpy(full, x + i, static_cast<size_t>(n - i) * 4);
        store_f16(half, load(full));
        std::memcpy(to + i, half, static_cast<size_t>(n - i) * 2);
      }
      return;
    }
  }
}

inline const char* at(const void* x, Dtype dtype, int64_t i) {
  return static_cast<const char*>(x) + i * (dtype == Dtype::f32 ? 4 : 2);
}

void pack_plain(Dtype dtype, const void* x, int64_t n, int64_t padded, char* out) {
  auto to = reinterpret_cast<float*>(out);
  decode(dtype, x, to, n);
  for (int64_t i = n; i < padded; ++i) to[i] = 0;
}

// The order in which BF16Weights and Fp8Weights yield a row.
void pack_even_odd(Dtype dtype, const void* x, int64_t n, int64_t padded, char* out) {
  auto to = reinterpret_cast<float*>(out);
  for (int64_t i = 0; i < padded; i += kStrip) {
    float strip[kStrip];
    int64_t width = padded - i < kStrip ? padded - i : kStrip;
    int64_t live = n - i < width ? n - i : width;
    live = live < 0 ? 0 : live;
    decode(dtype, at(x, dtype, i), strip, live);
    for (int64_t j = live; j < width; ++j) strip[j] = 0;
    for (int64_t j = 0; j < width; j += kPackUnit) {
      for (int l = 0; l < kLanes; ++l) to[i + j + l] = strip[j + 2 * l];
      for (int l = 0; l < kLanes; ++l) to[i + j + kLanes + l] = strip[j + 2 * l + 1];
    }
  }
}

#ifdef __AVX512BF16__
void pack_bf16(Dtype dtype, const void* x, int64_t n, int64_t padded, char* out) {
  auto to = reinterpret_cast<uint16_t*>(out);
  if (dtype == Dtype::bf16) {
    std::memcpy(to, x, static_cast<size_t>(n) * 2);
  } else {
    for (int64_t i = 0; i < n; i += kStrip) {
      float strip[kStrip];
      int64_t width = n - i < kStrip ? n - i : kStrip;
      decode(dtype, at(x, dtype, i), strip, width);
      encode(strip, Dtype::bf16, to + i, width);
    }
  }
  for (int64_t i = n; i < padded; ++i) to[i] = 0;
}
#endif

void axpy(float scale, Dtype dtype, const void* x, float* acc, int64_t n) {
  float strip[kStrip];
  for (int64_t i = 0; i < n; i += kStrip) {
    int64_t width = n - i < kStrip ? n - i : kStrip;
    const float* in = strip;
    if (dtype == Dtype::f32) {
      in = static_cast<const float*>(x) + i;
    } else {
      decode(dtype, at(x, dtype, i), strip, width);
    }
    for (int64_t j = 0; j < width; ++j) acc[i + j] = madd(scale, in[j], acc[i + j]);
  }
}

float dot(const float* x, const float* y, int64_t n) {
  Vec acc[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) acc[j] = fma(load(x + i + j * kLanes), load(y + i + j * kLanes), acc[j]);
  }
  float sums[4];
  sum4(acc, sums);
  float total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (; i < n; ++i) total = madd(x[i], y[i], total);
  return total;
}

void rotate(float* __restrict a, float* __restrict b, const float* cos, const float* sin, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float x = a[i], y = b[i];
    a[i] = madd(x, cos[i], -(y * sin[i]));
    b[i] = madd(y, cos[i], x * sin[i]);
  }
}

float powers(float scale, float* x, int64_t n, float* total) {
  constexpr int64_t kWide = 16;
  float tops[kWide];
  for (int64_t l = 0; l < kWide; ++l) tops[l] = -__builtin_inff();
  int64_t i = 0;
  for (; i + kWide <= n; i += kWide) {
    for (int64_t l = 0; l < kWide; ++l) {
      x[i + l] *= scale;
      tops[l] = at_least(tops[l], x[i + l]);
    }
  }
  for (; i < n; ++i) {
    x[i] *= scale;
    tops[0] = at_least(tops[0], x[i]);
  }
  float top = tops[0];
  for (int64_t l = 1; l < kWide; ++l) top = at_least(top, tops[l]);
  // Nothing but infinities or no numbers have no finite maximum.
  const float shift = at_least(top, -0x1.fffffep127f);
  for (int64_t j = 0; j < n; ++j) x[j] = exponential(x[j] - shift);
  Vec acc[4] = {zero(), zero(), zero(), zero()};
  i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) acc[j] = add(acc[j], load(x + i + j * kLanes));
  }
  float sums[4];
  sum4(acc, sums);
  *total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (; i < n; ++i) *total += x[i];
  return top;
}

#define MOEFUSE_TEXT(x) #x
#define MOEFUSE_NAME(x) MOEFUSE_TEXT(x)

constexpr Format kF32 = {kPackUnit, kPackUnit * 4, 1, 4, pack_plain, dots<F32Weights>};
constexpr Format kBF16 = {kPackUnit, kPackUnit * 4, 1, 2, pack_even_odd, dots<BF16Weights>};
constexpr Format kF16 = {kPackUnit, kPackUnit * 4, 1, 2, pack_plain, dots<F16Weights>};
#ifdef __AVX512BF16__
constexpr Format kBF16Both = {kPackUnit, kPackUnit * 2, 1, 2, pack_bf16, dots<BF16Dot>};
#else
constexpr Format kBF16Both = kBF16;
#endif

constexpr auto fp8 = fp8_dots<Fp8Weights, BF16Weights>;
constexpr Format kFp8 = {kPackUnit, kPackUnit * 4, kFp8Block, kFp8Bytes, pack_even_odd, fp8};
#ifdef __AVX512BF16__
constexpr auto fp8_both = fp8_dots<Fp8Dot, BF16Dot>;
constexpr Format kFp8Both = {kPackUnit, kPackUnit * 2, kFp8Block, kFp8Bytes, pack_bf16, fp8_both};
#else
constexpr Format kFp8Both = kFp8;
#endif

extern const Kernels kKernels = {
    MOEFUSE_NAME(MOEFUSE_ISA),
    {{kF32, kF32}, {kBF16, kBF16Both}, {kF16, kF16}},
    MOEFUSE_BLOCKS::kBlockFormats,
    MOEFUSE_BLOCKS::kInterleavedFormats,
    {kFp8Both, kFp8, decode_fp8},
    decode,
    encode,
    axpy,
    activate,
    scores,
    outer,
    derivatives,
    dot,
    rotate,
    powers,
};

}  // namespace moefuse::MOEFUSE_ISA
