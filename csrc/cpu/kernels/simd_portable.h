// f32 and byte vectors in the compiler's own vector types: 4 lanes, SSE2 on x86-64 and NEON on ARM.
#pragma once

#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bf16 pairs are split by shifting 32-bit words");

namespace moefuse::MOEFUSE_ISA {

typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t VecU __attribute__((vector_size(16)));
constexpr int kLanes = 4;

// Four bytes in each lane, and the same bits as integers of other widths.
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

// A register tile is M rows by kTileColumns[M] weight rows: 8 sums in 16 registers, as there may be no FMA.
constexpr int kTileRows = 4;
constexpr int kTileColumns[kTileRows + 1] = {0, 6, 4, 2, 2};

inline Vec zero() { return Vec{}; }
inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec add(Vec a, Vec b) { return a + b; }

#ifdef __FP_FAST_FMAF
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#else
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif

// The even and the odd elements of 8 bf16 values.
inline Vec load_bf16_even(const void* p) {
  VecU raw;
  std::memcpy(&raw, p, sizeof raw);
  return reinterpret_cast<Vec>(raw << 16);
}
inline Vec load_bf16_odd(const void* p) {
  VecU raw;
  std::memcpy(&raw, p, sizeof raw);
  return reinterpret_cast<Vec>(raw & 0xffff0000u);
}

// The other way, of numbers that bf16 holds.
inline void store_bf16_pairs(void* p, Vec even, Vec odd) {
  VecU both = (reinterpret_cast<VecU>(even) >> 16) | (reinterpret_cast<VecU>(odd) & 0xffff0000u);
  std::memcpy(p, &both, sizeof both);
}

inline float f16_to_f32(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t magnitude = h & 0x7fffu;
  // Multiplying by 2**112 moves the exponent bias from 15 to 127, subnormals included.
  uint32_t bits = magnitude << 13;
  float scaled;
  std::memcpy(&scaled, &bits, sizeof scaled);
  scaled *= 0x1p112f;
  std::memcpy(&bits, &scaled, sizeof bits);
  bits = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude << 13) : bits;
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline uint16_t f32_to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {
    // Subnormal: adding 0.5 rounds to a multiple of 2**-24 in the low bits of the sum.
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | (bits >> 13));
}

inline Vec load_f16(const void* p) {
  uint16_t h[kLanes];
  std::memcpy(h, p, sizeof h);
  return Vec{f16_to_f32(h[0]), f16_to_f32(h[1]), f16_to_f32(h[2]), f16_to_f32(h[3])};
}
inline void store_f16(void* p, Vec v) {
  uint16_t h[kLanes];
  for (int i = 0; i < kLanes; ++i) h[i] = f32_to_f16(v[i]);
  std::memcpy(p, h, sizeof h);
}

// 16 bytes in e4m3, over 2**8: the even and the odd elements of the first 8, then those of the others. Not-a-number,
// which comes out as 480, makes `most` 0x7f.
using Most = uint32_t;
inline void load_e4m3(const void* p, Most& most, Vec (&out)[4]) {
  uint8_t raw[16];
  std::memcpy(raw, p, sizeof raw);
  for (uint8_t b : raw) most = (b & 0x7fu) > most ? b & 0x7fu : most;
  for (int i = 0; i < 4; ++i) {
    const uint8_t* b = raw + i / 2 * 8 + i % 2;
    VecU v = {b[0], b[2], b[4], b[6]}, size = v & 0x7fu;
    // The exponent's bias goes from 7 to 127, less 8; subnormals have none.
    VecU normal = (size << 20) + (112u << 23);
    Vec small = __builtin_convertvector(reinterpret_cast<Ints>(size), Vec) * splat(0x1p-17f);
    out[i] = reinterpret_cast<Vec>((size < 8u ? reinterpret_cast<VecU>(small) : normal) | ((v & 0x80u) << 24));
  }
}
inline bool has_nan(Most most) { return most == 0x7f; }

// out[i] = sum of v[i]; the same order of additions whatever i.
inline void sum4(const Vec* v, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
}
// The sums that a tile makes at once.
constexpr int kSumsAtOnce = 4;
inline void add_lanes(const Vec (&v)[4], int, float* out) { sum4(v, out); }

// Shorts may wrap around on the way to a sum that fits.
inline Shorts add(Shorts a, Shorts b) {
  typedef uint16_t Wrapping __attribute__((vector_size(16)));
  return reinterpret_cast<Shorts>(reinterpret_cast<Wrapping>(a) + reinterpret_cast<Wrapping>(b));
}
inline Ints add(Ints a, Ints b) { return a + b; }

// Up to how many rows of activations weights are better multiplied as they lie than transposed first, for groups of 32
// and of 16.
constexpr int kMostSliceRows = 2;
constexpr int kMostSliceRows16 = 2;

inline Bytes repeat4(const void* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return reinterpret_cast<Bytes>(Words{x, x, x, x});
}

// w[2i] * x[2i] + w[2i + 1] * x[2i + 1] with x signed bytes; |w| <= 128 and |x| <= 127 when w is signed too.
template <bool Signed>
inline Shorts pair_sums(Bytes w, Bytes x) {
  auto weights = reinterpret_cast<Shorts>(w), inputs = reinterpret_cast<Shorts>(x);
  Shorts even = Signed ? (weights << 8) >> 8 : weights & 0xff;
  Shorts odd = Signed ? weights >> 8 : (weights >> 8) & 0xff;
  return even * ((inputs << 8) >> 8) + odd * (inputs >> 8);
}

constexpr bool kFourProducts = false;

template <class V>
inline void keep(V&) {}

// The two shorts of each lane times those of `scale`, added up.
inline Ints widen_pairs(Shorts v, Shorts scale) {
  auto pairs = reinterpret_cast<Ints>(v), factors = reinterpret_cast<Ints>(scale);
  return ((pairs << 16) >> 16) * ((factors << 16) >> 16) + (pairs >> 16) * (factors >> 16);
}
inline Ints widen_pairs(Shorts v) {
  auto pairs = reinterpret_cast<Ints>(v);
  return ((pairs << 16) >> 16) + (pairs >> 16);
}

// Byte i of each lane in both halves of the lane.
inline Shorts byte_in_halves(Words v, int i) {
  Words byte = (v >> (8 * i)) & 0xffu;
  return reinterpret_cast<Shorts>(byte | byte << 16);
}
inline Shorts signed_byte_in_halves(Words v, int i) { return (byte_in_halves(v, i) << 8) >> 8; }

// out[j]: the 16 bytes at rows[j] + at.
inline void load_slices(const char* const* rows, int64_t at, Bytes* out) {
  for (int j = 0; j < kLanes; ++j) std::memcpy(&out[j], rows[j] + at, sizeof out[j]);
}

// From slices to columns, and back.
inline void transpose4(Bytes* out) {
  Words v[kLanes];
  for (int l = 0; l < kLanes; ++l) v[l] = reinterpret_cast<Words>(out[l]);
  for (int j = 0; j < 4; ++j) out[j] = reinterpret_cast<Bytes>(Words{v[0][j], v[1][j], v[2][j], v[3][j]});
}

// out[j]: bytes 4j to 4j + 3 of the 16 at rows[l] + at, in lane l.
inline void load_columns(const char* const* rows, int64_t at, Bytes* out) {
  load_slices(rows, at, out);
  transpose4(out);
}

// out[4s + j]: 0xff for each set bit among bits 16 s to 16 s + 15 of the 32 at rows[j] + at.
inline void load_bits(const char* const* rows, int64_t at, Bytes* out) {
  for (int i = 0; i < 8; ++i) {
    uint32_t field;
    std::memcpy(&field, rows[i % 4] + at, sizeof field);
    for (int k = 0; k < 16; ++k) out[i][k] = (field >> (i / 4 * 16 + k)) & 1u ? 0xff : 0;
  }
}

// 16 bytes behind each other as often as a vector holds them.
inline Bytes repeat16(const char* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Of vectors that hold 16 bytes per row: those of a, then of b, each half as long, its halves added.
template <class V>
inline V fold_longs(V a, V b) {
  typedef uint64_t Longs __attribute__((vector_size(16)));
  auto x = reinterpret_cast<Longs>(a), y = reinterpret_cast<Longs>(b);
  return add(reinterpret_cast<V>(Longs{x[0], y[0]}), reinterpret_cast<V>(Longs{x[1], y[1]}));
}
// The same for 8 bytes: a lane per row.
template <class V>
inline V fold_words(V a, V b) {
  auto x = reinterpret_cast<Words>(a), y = reinterpret_cast<Words>(b);
  return add(reinterpret_cast<V>(Words{x[0], x[2], y[0], y[2]}), reinterpret_cast<V>(Words{x[1], x[3], y[1], y[3]}));
}

// table[i] for each byte i below 16.
inline Bytes look_up(const uint8_t* table, Bytes i) {
  Bytes out;
  for (int l = 0; l < 4 * kLanes; ++l) out[l] = table[i[l]];
  return out;
}

// Row l of `load_slices`: its 16 bytes, signed or not, as numbers. v is out[l].
template <bool Signed>
inline void widen_slice(Bytes v, int, Vec* out) {
  auto byte = [&](int i) { return static_cast<float>(Signed ? static_cast<int8_t>(v[i]) : v[i]); };
  for (int i = 0; i < 4; ++i) out[i] = Vec{byte(4 * i), byte(4 * i + 1), byte(4 * i + 2), byte(4 * i + 3)};
}

// The f16 at rows[l] + at in lane l.
inline Vec load_halves(const char* const* rows, int64_t at) {
  Vec out;
  for (int l = 0; l < kLanes; ++l) {
    uint16_t half;
    std::memcpy(&half, rows[l] + at, sizeof half);
    out[l] = f16_to_f32(half);
  }
  return out;
}

// The f16 in the low half of each lane.
inline Vec from_f16(Words w) {
  Vec out;
  for (int l = 0; l < kLanes; ++l) out[l] = f16_to_f32(static_cast<uint16_t>(w[l]));
  return out;
}

}  // namespace moefuse::MOEFUSE_ISA
