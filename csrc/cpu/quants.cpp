// Products with weights in GGUF blocks, for one instruction set; MOEFUSE_ISA names it and the flags define it.
//
// dots(a [M] packed rows, w [N] rows of blocks, z [M, ldz]): two panels of kLanes weight rows are decoded, kUnit
// elements at a time, into L1, and multiplied with every activation row. Lanes are weight rows, so a sum runs over K
// in one order whatever M, N and the tile.
//
// As in kernels.cpp, nothing here may call a template or inline function of the standard library.
#ifdef __AVX2__
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#include "blocks.h"

namespace moefuse::MOEFUSE_ISA {

void decode(Dtype dtype, const void* x, float* out, int64_t n);
void pack_plain(Dtype dtype, const void* x, int64_t n, int64_t padded, char* out);

namespace {

constexpr int kStrips = 3;  // panels side by side
constexpr int64_t kWidth = kStrips * kLanes;
// Rows of a tile. Spans of two steps keep two weights of each panel in registers, which leaves room for fewer sums.
template <class F>
constexpr int kTileHeight = F::kSpan == 2 ? 2 : 3;

// Activations of the integer products: 32 at a time, with the sums that offsets are multiplied with.
struct Group {
  int8_t q[32];
  float scale;
  float halves[2];  // scale * the sum of q over 16
  float sum;
};
constexpr int64_t kGroup = 32;

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
  int sums[2] = {0, 0};
  for (int i = 0; i < kVecs; ++i) {
    // Adding and taking away 1.5 * 2**23 rounds to the nearest whole number, ties to even.
    Vec rounded = (v[i] * splat(inverse) + splat(0x1.8p23f)) - splat(0x1.8p23f);
    for (int l = 0; l < kLanes; ++l) {
      int q = check == 0 ? static_cast<int>(rounded[l]) : 0;
      out.q[i * kLanes + l] = static_cast<int8_t>(q);
      sums[i / (kVecs / 2)] += q;
    }
  }
  for (int h = 0; h < 2; ++h) out.halves[h] = out.scale * static_cast<float>(sums[h]);
  out.sum = out.scale * static_cast<float>(sums[0] + sums[1]);
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

// Adds the products of a span to the sums: step by step for all rows and panels, widened at the end.
template <class F, int M, int C>
inline __attribute__((always_inline)) void long_span(const Panel* panels, int64_t q, const char* const* rows,
                                                     int64_t at, bool first, Ints (&sums)[M][C]) {
  Shorts pairs[M][C];
#pragma GCC unroll 8
  for (int i = 0; i < F::kSpan; ++i) {
    Bytes w[C];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) w[c] = panels[c].q[q + i];
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) {
      Bytes x = repeat4(rows[m] + at + 4 * i);
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) {
        Shorts product = pair_sums<F::kSigned>(w[c], x);
        pairs[m][c] = i == 0 ? product : pairs[m][c] + product;
        keep(pairs[m][c]);
      }
    }
  }
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) sums[m][c] = first ? widen_pairs(pairs[m][c]) : sums[m][c] + widen_pairs(pairs[m][c]);
  }
}

// The same for a span of one or two steps, row by row, so that only the sums stay in registers.
template <class F, int M, int C>
inline __attribute__((always_inline)) void short_span(const Panel* panels, int64_t q, const char* const* rows,
                                                      int64_t at, bool first, Ints (&sums)[M][C]) {
  constexpr int kLast = F::kSpan - 1;
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
    Bytes x = repeat4(rows[m] + at), second = repeat4(rows[m] + at + 4 * kLast);
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) {
      Shorts pair = pair_sums<F::kSigned>(panels[c].q[q], x);
      if constexpr (kLast > 0) pair = pair + pair_sums<F::kSigned>(panels[c].q[q + kLast], second);
      sums[m][c] = first ? widen_pairs(pair) : sums[m][c] + widen_pairs(pair);
      keep(sums[m][c]);
    }
  }
}

// z[m] += the products of M rows of groups with C panels, over `groups` groups.
template <class F, int M, int C>
void multiply(const Panel* panels, const char* const* rows, int64_t groups, float (*z)[kWidth]) {
  constexpr int kParts = kGroup / F::kGroup;
  constexpr int kSteps = F::kGroup / 4;
  Vec acc[M][C];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) acc[m][c] = load(z[m] + c * kLanes);
  }
  for (int64_t g = 0; g < groups; ++g) {
    int64_t at = g * static_cast<int64_t>(sizeof(Group));
#pragma GCC unroll 3
    for (int part = 0; part < kParts; ++part) {
      Ints sums[M][C];
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; step += F::kSpan) {
        const int64_t q = part * kSteps + step;
        if constexpr (F::kSpan <= 2) {
          short_span<F, M, C>(panels, g * (kGroup / 4) + q, rows, at + 4 * q, step == 0, sums);
        } else {
          long_span<F, M, C>(panels, g * (kGroup / 4) + q, rows, at + 4 * q, step == 0, sums);
        }
      }
      int64_t s = g * kParts + part;
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        auto group = reinterpret_cast<const Group*>(rows[m] + at);
        Vec scale = splat(group->scale), sum = splat(kParts == 1 ? group->sum : group->halves[part]);
        Vec centre = sum * splat(-F::kCentre);
#pragma GCC unroll 3
        for (int c = 0; c < C; ++c) {
          Vec product = to_float(sums[m][c]);
          product = F::kCentre > 0 ? fma(product, scale, centre) : product * scale;
          acc[m][c] = fma(product, panels[c].scale[s], acc[m][c]);
          if constexpr (F::kHasOffsets) acc[m][c] = fma(sum, panels[c].offset[s], acc[m][c]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) store(z[m] + c * kLanes, acc[m][c]);
  }
}

// What `multiply` needs of a format, so that formats alike in it share the code.
template <class F>
using Alike = Block<0, 0, F::kGroup, F::kSpan, F::kCentre>;

// The same in f32: weights [k, C * kLanes], activation rows as they are.
template <int M, int C>
void multiply_exact(const float* w, const char* const* rows, int64_t k, float (*z)[kWidth]) {
  Vec acc[M][C];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) acc[m][c] = zero();
  }
  for (int64_t i = 0; i < k; ++i) {
    Vec weights[C];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) weights[c] = load(w + (i * C + c) * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      Vec x = splat(reinterpret_cast<const float*>(rows[m])[i]);
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) acc[m][c] = fma(x, weights[c], acc[m][c]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) store(z[m] + c * kLanes, add(load(z[m] + c * kLanes), acc[m][c]));
  }
}

template <class F, int C>
void expand(const Panel* panels, int64_t k, float* w) {
  for (int64_t i = 0; i < k; ++i) {
    for (int c = 0; c < C; ++c) {
      Words q = words(panels[c].q[i / 4]);
      int byte = static_cast<int>(i % 4);
      Vec v = F::kSigned ? signed_byte_of(q, byte) : byte_of(q, byte);
      if constexpr (F::kCentre > 0) v = v - splat(F::kCentre);
      v = v * panels[c].scale[i / F::kGroup];
      if constexpr (F::kHasOffsets) v = v + panels[c].offset[i / F::kGroup];
      store(w + (i * C + c) * kLanes, v);
    }
  }
}

// Integer products: groups of quantised activations.
template <class F>
struct Integer {
  static constexpr int64_t kUnitBytes = kUnit / kGroup * static_cast<int64_t>(sizeof(Group));

  template <int C>
  void prepare(const Panel*, int64_t) {}

  template <int M, int C>
  void tile(const Panel* panels, const char* const* rows, int64_t k, float (*z)[kWidth]) const {
    multiply<Alike<F>, M, C>(panels, rows, k / kGroup, z);
  }
};

// f32 products: decoded weights, activations untouched.
template <class F>
struct Exact {
  static constexpr int64_t kUnitBytes = kUnit * 4;
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

// One unit of C panels: decoded once, multiplied with every row in tiles of about the same height.
template <class F, class Product, int C>
void unit(Product& product, Panel* panels, const char* const* w, int64_t unit_at, uintptr_t ahead,
          const char* const* a, int64_t rows, int64_t k, float (*z)[kWidth]) {
  for (int c = 0; c < C; ++c) {
    Source from{w + c * kLanes, ahead};
    for (int64_t b = 0; b < k / F::kSize; ++b) {
      Panel& p = panels[c];
      constexpr int64_t kScales = F::kSize / F::kGroup;
      F::decode(from, unit_at + b * F::kBytes, p.q + b * F::kSize / 4, p.scale + b * kScales, p.offset + b * kScales);
    }
    ahead = from.ahead;
  }
  product.template prepare<C>(panels, k);
  constexpr int kHeight = kTileHeight<F>;
  int64_t tiles = (rows + kHeight - 1) / kHeight;
  for (int64_t t = 0; t < tiles; ++t) {
    int64_t m = rows * t / tiles;
    row_tile<Product, C, kHeight>(product, panels, a + m, rows * (t + 1) / tiles - m, k, z + m);
  }
}

// unit<C> for as many panels as the columns need.
template <class F, class Product, int C = kStrips>
void units(Product& product, Panel* panels, const char* const* w, int64_t columns, int64_t unit_at, uintptr_t ahead,
           const char* const* a, int64_t rows, int64_t k, float (*z)[kWidth]) {
  if constexpr (C > 1) {
    if (columns <= (C - 1) * kLanes) {
      return units<F, Product, C - 1>(product, panels, w, columns, unit_at, ahead, a, rows, k, z);
    }
  }
  unit<F, Product, C>(product, panels, w, unit_at, ahead, a, rows, k, z);
}

template <class F, class Product>
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
    // Where there are no next rows, these are fetched again, which costs nothing.
    const char* next = n0 + width < d.N ? d.w[n0 + width] : d.next != nullptr ? d.next : w[0];
    for (int64_t k0 = 0, u = 0; k0 < d.K; k0 += kUnit, ++u) {
      int64_t k = d.K - k0 < kUnit ? d.K - k0 : kUnit;
      uintptr_t ahead = reinterpret_cast<uintptr_t>(next) + static_cast<uintptr_t>(u * width * kUnitBytes);
      units<F, Product>(product, panels, w, columns, u * kUnitBytes, ahead, a, d.M, k, z);
      for (int64_t m = 0; m < d.M; ++m) a[m] += Product::kUnitBytes;
    }
    for (int64_t m = 0; m < d.M; ++m) {
      for (int64_t n = 0; n < columns; ++n) d.z[m * d.ldz + n0 + n] = z[m][n];
    }
  }
}

template <class F>
constexpr BlockFormat kBlockFormat = {
    {kGroup, sizeof(Group), F::kSize, F::kBytes, pack_groups, dots<F, Integer<F>>},
    {kGroup, kGroup * 4, F::kSize, F::kBytes, pack_plain, dots<F, Exact<F>>},
};

}  // namespace

// In the order of WeightType, from q4_k on.
extern const BlockFormat kBlockFormats[kBlockTypes] = {
    kBlockFormat<Q4_K>, kBlockFormat<Q6_K>, kBlockFormat<Q8_0>,   kBlockFormat<Q4_0>,   kBlockFormat<Q5_K>,
    kBlockFormat<Q5_0>, kBlockFormat<Q5_1>, kBlockFormat<Q4_1>,   kBlockFormat<IQ4_NL>, kBlockFormat<IQ4_XS>,
    kBlockFormat<MXFP4>, kBlockFormat<Q2_K>, kBlockFormat<Q3_K>,
};

}  // namespace moefuse::MOEFUSE_ISA
