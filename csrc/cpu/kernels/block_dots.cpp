// Products with weights in GGUF blocks, for one instruction set; MOEFUSE_ISA names it and the flags define it.
//
// dots(a [M] packed rows, w [N] rows of blocks, z [M, ldz]). Interleaved rows are multiplied with a few rows of
// activations straight from registers (group_dots.h). In the file's order AVX-512 decodes as many weights as its
// registers hold and multiplies these with every row (register_dots.h). Else, and in f32, panels of kLanes weight rows
// are decoded, kUnit elements at a time, into L1; few rows of activations are multiplied with weights as they lie, and
// only sums are transposed (panel_dots.h). Always a lane is a weight row and products of a group are added up as whole
// numbers, so that a sum has the same bits whatever M, N and the tile.
//
// As in kernels.cpp, nothing here may call a template or inline function of the standard library.
#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#include "group_dots.h"
#ifdef __AVX512VNNI__
#include "register_dots.h"
#else
#include "panel_dots.h"
#endif

namespace moefuse::MOEFUSE_ISA {

void decode(Dtype dtype, const void* x, float* out, int64_t n);
void pack_plain(Dtype dtype, const void* x, int64_t n, int64_t padded, char* out);

namespace {

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// A group with a NaN or an infinity becomes NaN; below 2**-120 it becomes zero, as 127 / largest would overflow.
void quantize(const float* x, Group& out) {
  constexpr int kVecs = kGroup / kLanes;
  Vec v[kVecs], largest = zero(), finite = zero();
  for (int i = 0; i < kVecs; ++i) {
    v[i] = load(x + i * kLanes);
    largest = larger(largest, larger(v[i], splat(0) - v[i]));
    finite = finite + v[i] * splat(0);
  }
  float most = 0, check = 0;
  for (int l = 0; l < kLanes; ++l) {
    most = most > largest[l] ? most : largest[l];
    check += finite[l];
  }
  bool live = most > 0x1p-120f;
  float inverse = live ? 127 / most : 0;
  out.scale = (live ? most / 127 : 0) + check;
  typedef int8_t Small __attribute__((vector_size(kLanes)));
  int sums[2][2] = {};
  for (int h = 0; h < 2; ++h) {
    Ints half{};
    for (int i = h * kVecs / 2; i < (h + 1) * kVecs / 2; ++i) {
      // Adding and taking away 1.5 * 2**23 rounds to the nearest whole number, ties to even.
      Vec rounded = (v[i] * splat(inverse) + splat(0x1.8p23f)) - splat(0x1.8p23f);
      Ints whole = __builtin_convertvector(check == 0 ? rounded : zero(), Ints);
      Small q = __builtin_convertvector(whole, Small);
      __builtin_memcpy(out.q + i * kLanes, &q, kLanes);
      half += whole;
    }
    for (int l = 0; l < kLanes; ++l) sums[h][l / 2 % 2] += half[l];
  }
  for (int h = 0; h < 2; ++h) out.halves[h] = out.scale * static_cast<float>(sums[h][0] + sums[h][1]);
  for (int side = 0; side < 2; ++side) {
    out.sides[0][side] = static_cast<int16_t>(sums[0][side]);
    out.sides[1][side] = static_cast<int16_t>(sums[1][side]);
    out.sides[2][side] = static_cast<int16_t>(sums[0][side] + sums[1][side]);
  }
  out.sum = out.scale * static_cast<float>(sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1]);
}

void pack_groups(Dtype dtype, const void* x, int64_t n, int64_t, char* out) {
  auto in = static_cast<const char*>(x);
  for (int64_t i = 0; i < n; i += kGroup) {
    float values[kGroup];
    decode(dtype, in + i * (dtype == Dtype::f32 ? 4 : 2), values, kGroup);
    Group group;
    quantize(values, group);
    __builtin_memcpy(out + i / kGroup * static_cast<int64_t>(sizeof(Group)), &group, sizeof group);
  }
}

// z[m] += the products of M rows of activations with C panels in f32: weights [k, C * kLanes].
template <int M, int C>
void multiply_exact(const float* w, const char* const* rows, int64_t k, float (*z)[kWidth]) {
  Vec acc[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) acc[m][c] = zero();
  }
  for (int64_t i = 0; i < k; ++i) {
    Vec weights[C];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) weights[c] = load(w + (i * C + c) * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Vec x = splat(reinterpret_cast<const float*>(rows[m])[i]);
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) acc[m][c] = fma(x, weights[c], acc[m][c]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) store(z[m] + c * kLanes, add(load(z[m] + c * kLanes), acc[m][c]));
  }
}

inline Vec byte_of(Words v, int i) { return to_float((v >> (8 * i)) & 0xffu); }
inline Vec signed_byte_of(Words v, int i) { return to_float((reinterpret_cast<Ints>(v) << (24 - 8 * i)) >> 24); }

template <class F, int C>
void expand(const Panel* panels, int64_t k, float* w) {
  for (int64_t i = 0; i < k; ++i) {
    for (int c = 0; c < C; ++c) {
      const Panel& panel = panels[c];
      Words q = words(panel.q[i / 4]);
      int byte = static_cast<int>(i % 4);
      Vec v = F::kSigned ? signed_byte_of(q, byte) : byte_of(q, byte);
      if constexpr (F::kCentre > 0) v = v - splat(F::kCentre);
      Vec scale = panel.d[F::kScales ? 0 : i / kGroup];
      if constexpr (F::kScales) scale = scale * to_float(low_halves(panel.scale[i / F::kGroup]));
      v = v * scale;
      if constexpr (F::kHasOffsets) v = v + panel.offset[i / F::kGroup];
      store(w + (i * C + c) * kLanes, v);
    }
  }
}

// f32 products: decoded weights, activations untouched.
template <class F>
struct Exact {
  static constexpr int64_t kUnitBytes = kUnit * 4;
  static constexpr bool kRaises = false;
  alignas(64) float w[kUnit * kWidth];

  template <int C>
  void prepare(const Panel* panels, int64_t k) {
    expand<F, C>(panels, k, w);
  }

  template <int M, int C>
  void tile(const Panel*, const char* const* rows, int64_t k, float (*z)[kWidth]) const {
    multiply_exact<M, C>(w, rows, k, z);
  }
};

// tile<M, C> for an M known at run time.
template <class Product, int C, int M>
void row_tile(const Product& product, const Panel* panels, const char* const* a, int64_t rows, int64_t k,
              float (*z)[kWidth]) {
  if (rows == M) {
    product.template tile<M, C>(panels, a, k, z);
  } else if constexpr (M > 1) {
    row_tile<Product, C, M - 1>(product, panels, a, rows, k, z);
  }
}

// Decodes the blocks of one unit, or of what is left of a row.
template <class F, bool Raises, class Source>
inline void decode_unit(const Source& from, int64_t at, int64_t k, const char* ahead, Panel& to) {
  constexpr int64_t kGroups = F::kSize / F::kGroup, kSteps = F::kSize / 4;
  for (int64_t b = 0; b < k / F::kSize; ++b) {
    F::head(from, at, {to.d + b, to.scale + b * kGroups, to.offset + b * kGroups});
    if constexpr (Source::kInterleaved) {
      each_repeat<F>([&](int64_t part) __attribute__((always_inline)) {
        constexpr int64_t kPart = kSteps / F::kRepeats;
        fetch<F, kLanes, F::kRepeats>(ahead, part);
        each<kPart>([&]<int I>() __attribute__((always_inline)) {
          to.q[b * kSteps + part * kPart + I] = F::template step<I>(from, at, part);
        });
      });
    } else {
      each_chunk<F>([&]<int C>() {
        fetch<F, kLanes, F::kChunks>(ahead, C);
        F::template chunk<C>(from, at, to.q + b * kSteps + 4 * F::first_slice(C));
      });
    }
    for (int64_t i = b * kSteps; Raises && i < (b + 1) * kSteps; ++i) to.q[i] ^= repeat(0x80);
    at += F::kBytes;
    ahead = behind(ahead, kLanes * F::kBytes);
  }
}

// One unit of C panels: decoded once, multiplied with every row in tiles of about the same height.
template <class F, class Source, class Product, int C>
void unit(Product& product, Panel* panels, const Source* from, int64_t unit_at, const char* ahead,
          const char* const* a, int64_t rows, int64_t k, float (*z)[kWidth]) {
  for (int c = 0; c < C; ++c) {
    const char* next = behind(ahead, c * kLanes * k / F::kSize * F::kBytes);
    decode_unit<F, Product::kRaises>(from[c], unit_at, k, next, panels[c]);
  }
  product.template prepare<C>(panels, k);
  int64_t tiles = (rows + kTileHeight - 1) / kTileHeight;
  for (int64_t t = 0; t < tiles; ++t) {
    int64_t m = rows * t / tiles;
    row_tile<Product, C, kTileHeight>(product, panels, a + m, rows * (t + 1) / tiles - m, k, z + m);
  }
}

// unit<C> for as many panels as the columns need.
template <class F, class Source, class Product, int C = kStrips>
void units(Product& product, Panel* panels, const Source* from, int64_t columns, int64_t unit_at, const char* ahead,
           const char* const* a, int64_t rows, int64_t k, float (*z)[kWidth]) {
  if constexpr (C > 1) {
    if (columns <= (C - 1) * kLanes) {
      return units<F, Source, Product, C - 1>(product, panels, from, columns, unit_at, ahead, a, rows, k, z);
    }
  }
  unit<F, Source, Product, C>(product, panels, from, unit_at, ahead, a, rows, k, z);
}

template <class F, class Source, class Product>
void dots(const Dots& d) {
  constexpr int64_t kUnitBytes = kUnit / F::kSize * F::kBytes;
  Product product;
  Panel panels[kStrips];
  const char* a[kMaxRows];
  alignas(64) float z[kMaxRows][kWidth];
  // Fewer weight rows at a time are better read and worse multiplied: up to 4 rows, 16 beat 24 and 8 on a Zen 3.
  int64_t width = d.M <= 4 ? 2 * kLanes : kWidth;
  for (int64_t n0 = 0; n0 < d.N; n0 += width) {
    int64_t columns = d.N - n0 < width ? d.N - n0 : width;
    const char* w[kWidth];
    // Lanes past the end repeat the last row; their sums are dropped.
    for (int64_t n = 0; n < kWidth; ++n) w[n] = d.w[n0 + (n < columns ? n : columns - 1)];
    for (int64_t m = 0; m < d.M; ++m) {
      a[m] = d.a[m];
      for (int64_t n = 0; n < kWidth; ++n) z[m][n] = 0;
    }
    Source from[kStrips];
    for (int c = 0; c < kStrips; ++c) from[c] = {w, c * kLanes, n0};
    const char* next = next_rows(d, n0, width);
    for (int64_t k0 = 0, u = 0; k0 < d.K; k0 += kUnit, ++u) {
      int64_t k = d.K - k0 < kUnit ? d.K - k0 : kUnit;
      const char* ahead = behind(next, u * width * kUnitBytes);
      units<F>(product, panels, from, columns, u * kUnitBytes, ahead, a, d.M, k, z);
      for (int64_t m = 0; m < d.M; ++m) a[m] += Product::kUnitBytes;
    }
    for (int64_t m = 0; m < d.M; ++m) {
      for (int64_t n = 0; n < columns; ++n) d.z[m * d.ldz + n0 + n] = z[m][n];
    }
  }
}

template <class F, class Source>
void integer_dots(const Dots& d) {
  if constexpr (Source::kInterleaved && kMostTiledRows<F> > 0) {
    if (d.M <= kMostTiledRows<F>) return group_dots<F>(d);
  }
#ifdef __AVX512VNNI__
  if constexpr (!Source::kInterleaved) register_dots<F>(d);
#else
  if constexpr (!Source::kInterleaved) {
    if (d.M <= kMostRows<F>) return slice_dots<F>(d);
  }
  dots<F, Source, Integer<F>>(d);
#endif
}

// The blocks at `at` of kLanes rows, of which `live` are written: bytes as they lie, so that a row's numbers leave in
// their order. The same operations as in `expand`, and so the same bits.
template <class F, class Source>
inline void decode_block(const Source& from, int64_t at, int64_t live, float* out, int64_t pitch) {
  constexpr int kGroups = F::kSize / F::kGroup, kVecs = 16 / kLanes;
  Vec d, offset[kGroups];
  Shorts scale[kGroups];
  F::head(from, at, {&d, scale, offset});
  alignas(32) float factors[kGroups][kLanes], offsets[kGroups][kLanes];
#pragma GCC unroll 16
  for (int g = 0; g < kGroups; ++g) {
    store(factors[g], F::kScales ? d * to_float(low_halves(scale[g])) : d);
    if constexpr (F::kHasOffsets) store(offsets[g], offset[g]);
  }
  // Slice n of every row: q[j] has that of row j and, in longer vectors, of row j + 4 behind it.
  auto write = [&](const Bytes* q, int64_t n) __attribute__((always_inline)) {
    int64_t g = n * 16 / F::kGroup;
#pragma GCC unroll 8
    for (int l = 0; l < kLanes; ++l) {
      if (l >= live) break;
      Vec v[kVecs];
      widen_slice<F::kSigned>(q[l % 4], l, v);
      float* to = out + l * pitch + 16 * n;
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) {
        if constexpr (F::kCentre > 0) v[i] = v[i] - splat(F::kCentre);
        v[i] = v[i] * splat(factors[g][l]);
        if constexpr (F::kHasOffsets) v[i] = v[i] + splat(offsets[g][l]);
        store(to + i * kLanes, v[i]);
      }
    }
  };
  if constexpr (Source::kInterleaved) {
    each_repeat<F>([&](int64_t repeat) __attribute__((always_inline)) {
      constexpr int kSlices = F::kSize / 16 / F::kRepeats;
      each<kSlices>([&]<int S>() __attribute__((always_inline)) {
        Bytes q[4] = {F::template step<4 * S>(from, at, repeat), F::template step<4 * S + 1>(from, at, repeat),
                      F::template step<4 * S + 2>(from, at, repeat), F::template step<4 * S + 3>(from, at, repeat)};
        transpose4(q);
        write(q, repeat * kSlices + S);
      });
    });
  } else {
    each_chunk<F>([&]<int C>() __attribute__((always_inline)) {
      Bytes q[4 * ((F::kChunkSlices - 1) * F::kChunkStep + 1)];
      F::template chunk<C>(from, at, q);
#pragma GCC unroll 4
      for (int s = 0; s < F::kChunkSlices; ++s) {
        write(q + 4 * s * F::kChunkStep, F::first_slice(C) + s * F::kChunkStep);
      }
    });
  }
}

template <class F, class Source>
void decode_rows(const char* const* rows, int64_t count, int64_t n, float* out, int64_t pitch) {
  for (int64_t r = 0; r < count; r += kLanes) {
    int64_t live = count - r < kLanes ? count - r : kLanes;
    const char* some[kLanes];
    // Lanes past the end repeat the last row.
    for (int64_t l = 0; l < kLanes; ++l) some[l] = rows[r + (l < live ? l : live - 1)];
    for (int64_t b = 0; b < n / F::kSize; ++b) {
      decode_block<F>(Source(some, 0, r), b * F::kBytes, live, out + r * pitch + b * F::kSize, pitch);
    }
  }
}

// Products read rows by `Source`, numbers are decoded from `Lying`.
template <class F, class Source, class Lying>
constexpr BlockFormat kBlockFormat = {
    {kGroup, sizeof(Group), F::kSize, F::kBytes, pack_groups, integer_dots<F, Source>},
    {kGroup, kGroup * 4, F::kSize, F::kBytes, pack_plain, dots<F, Source, Exact<F>>},
    decode_rows<F, Lying>,
};
template <class F>
constexpr BlockFormat kInFile = kBlockFormat<F, Columns, Slices>;
template <class F>
constexpr BlockFormat kInTurns = kBlockFormat<F, Interleaved, Interleaved>;

}  // namespace

// In the order of WeightType, from q4_k on.
extern const BlockFormat kBlockFormats[kIntegerTypes] = {
    kInFile<Q4_K>, kInFile<Q6_K>, kInFile<Q8_0>,   kInFile<Q4_0>,   kInFile<Q5_K>,  kInFile<Q5_0>, kInFile<Q5_1>,
    kInFile<Q4_1>, kInFile<IQ4_NL>, kInFile<IQ4_XS>, kInFile<MXFP4>, kInFile<Q2_K>, kInFile<Q3_K>,
};
extern const BlockFormat kInterleavedFormats[kIntegerTypes] = {
    kInTurns<Q4_K>, kInTurns<Q6_K>, kInTurns<Q8_0>,   kInTurns<Q4_0>,   kInTurns<Q5_K>,  kInTurns<Q5_0>,
    kInTurns<Q5_1>, kInTurns<Q4_1>, kInTurns<IQ4_NL>, kInTurns<IQ4_XS>, kInTurns<MXFP4>, kInTurns<Q2_K>,
    kInTurns<Q3_K>,
};

}  // namespace moefuse::MOEFUSE_ISA
