// The block formats of GGUF: what the bytes of a block mean, for one weight row per lane.
//
// All come down to one form, w[k] = d * scale[g] * (q[k] - centre) + offset[g]: q is a byte, g the group of 16 or 32
// that k falls in, d a number per block, scale an integer or always 1, and either the centre or the offsets are zero. A
// format reads the block at `at` of each row and nothing beyond it: `head` its numbers; `chunk<C>` some slices of 16
// elements of rows in the file's order; `step<I>` elements 4 I to 4 I + 3 of interleaved ones, counted from one of the
// kRepeats parts of a block that are decoded alike.
#pragma once

#include "kernels.h"

namespace moefuse::MOEFUSE_ISA {

// Elements of K that are decoded at a time: one large block, or up to eight small ones.
constexpr int64_t kUnit = 256;

// The numbers of some groups of kLanes rows, one row per lane.
struct Numbers {
  Vec* d;
  Shorts* scale;  // in both halves of a lane
  Vec* offset;
};

// kLanes rows, kUnit elements of each.
struct Panel {
  Bytes q[kUnit / 4];
  Vec d[kUnit / 32];  // per block
  Shorts scale[kUnit / 16];
  Vec offset[kUnit / 16];
};

// Panels side by side and rows of a tile: nine sums, three weights and an activation fill 16 registers; of 16 lanes
// L1 holds two panels in f32.
constexpr int kStrips = kLanes == 16 ? 2 : 3;
constexpr int64_t kWidth = kStrips * kLanes;
constexpr int kTileHeight = kLanes == 16 ? 6 : 3;

inline Bytes repeat(uint8_t x) { return Bytes{} + x; }
inline Words words(Bytes v) { return reinterpret_cast<Words>(v); }
inline Bytes bytes(Words v) { return reinterpret_cast<Bytes>(v); }
inline Vec to_float(Ints v) { return __builtin_convertvector(v, Vec); }
inline Vec to_float(Words v) { return to_float(reinterpret_cast<Ints>(v)); }

// The low half of each lane, with its sign.
inline Ints low_halves(Shorts v) { return (reinterpret_cast<Ints>(v) << 16) >> 16; }

// Every byte shifted by a constant and masked. The mask must clear what comes from the neighbouring byte.
template <int Right>
inline Bytes bits(Bytes v, uint8_t mask) {
  Words shifted = Right >= 0 ? words(v) >> (Right >= 0 ? Right : 0) : words(v) << (Right < 0 ? -Right : 0);
  return bytes(shifted) & repeat(mask);
}

// A 16-bit or 32-bit field of every row, in the low bits of each lane.
template <class Field>
inline Words load_fields(const char* const* rows, int64_t at) {
  Words out;
#pragma GCC unroll 8
  for (int l = 0; l < kLanes; ++l) {
    Field field;
    __builtin_memcpy(&field, rows[l] + at, sizeof field);
    out[l] = field;
  }
  return out;
}

// Bits 4 I to 4 I + 3 of each lane as the fifth bits of its bytes.
inline Bytes fifth_bits(Words high, int i) {
  // The multiplication puts bit i of the nibble at the bottom of byte i.
  return bytes(((((high >> (4 * i)) & 0xfu) * 0x00204081u) & 0x01010101u) << 4);
}

// Rows of blocks, wherever each lies: their factors and fields, a lane to a row. They are those from w[n] on, where w[0]
// is row n0 of a task.
struct Rows {
  static constexpr bool kInterleaved = false;
  const char* const* rows = nullptr;

  Rows() = default;
  Rows(const char* const* w, int64_t n, int64_t) : rows(w + n) {}

  Vec halves(int64_t at) const { return load_halves(rows, at); }
  template <class Field>
  Words fields(int64_t at) const {
    return load_fields<Field>(rows, at);
  }
};

// Their bytes, transposed so that a lane is a row: q[4s + j] has elements 4j to 4j + 3 of slice s of 16.
struct Columns : Rows {
  using Rows::Rows;

  inline __attribute__((always_inline)) void load(int64_t at, Bytes* out) const { load_columns(rows, at, out); }
  void load_head(int64_t at, Bytes* out) const { load(at, out); }
  void load_again(int64_t at, Bytes* out) const { load(at, out); }
  void add_fifth_bits(int64_t at, Bytes* q) const {
    Words high = fields<uint32_t>(at);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) q[j] |= fifth_bits(high, j);
  }
};

// The same where kStripRows rows lie interleaved: of every field all rows' first words, then all their second ones. A
// field of a half or a byte is a word of that size.
struct Interleaved {
  static constexpr bool kInterleaved = true;
  const char* strip = nullptr;
  int64_t lane = 0;  // the first of the rows

  Interleaved() = default;
  Interleaved(const char* const* w, int64_t n, int64_t n0) : strip(w[n]), lane((n0 + n) % kStripRows) {}

  inline __attribute__((always_inline)) Bytes word(int64_t at) const {
    Bytes out;
    __builtin_memcpy(&out, strip + kStripRows * at + 4 * lane, sizeof out);
    return out;
  }
  void load_head(int64_t at, Bytes* out) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) out[j] = word(at + 4 * j);
  }

  Vec halves(int64_t at) const { return load_f16(strip + kStripRows * at + 2 * lane); }
  template <class Field>
  Words fields(int64_t at) const {
    typedef Field Fields __attribute__((vector_size(kLanes * sizeof(Field))));
    Fields raw;
    __builtin_memcpy(&raw, strip + kStripRows * at + static_cast<int64_t>(sizeof(Field)) * lane, sizeof raw);
    return __builtin_convertvector(raw, Words);
  }
};

// Bytes as they lie: q[4s + j] has slice s of row j and, in longer vectors, of row j + 4 behind it.
struct Slices : Rows {
  using Rows::Rows;

  void load(int64_t at, Bytes* out) const { load_slices(rows, at, out); }
  void load_head(int64_t at, Bytes* out) const { load_columns(rows, at, out); }
  void load_again(int64_t at, Bytes* out) const { load_slices(rows, at, out); }

  void add_fifth_bits(int64_t at, Bytes* q) const {
    Bytes high[8];
    load_bits(rows, at, high);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) q[j] |= high[j] & repeat(0x10);
  }
};

// Group: elements that share a scale. Span: steps of four elements whose products with activations of at most 127
// add up in 16 bits, which may wrap around on the way where a centre is taken off at the end. Centre: 0 where q is
// int8; kOffsets where every group has an offset instead. Scales: whether groups have integer scales.
constexpr int kOffsets = -1;

template <int64_t BlockSize, int64_t BlockBytes, int Group, int Span, int Centre, bool Scales>
struct Block {
  static constexpr int64_t kSize = BlockSize;
  static constexpr int64_t kBytes = BlockBytes;
  static constexpr int kGroup = Group;
  static constexpr int kSpan = Span;
  static constexpr int kCentre = Centre;
  static constexpr bool kScales = Scales;
  static constexpr bool kSigned = Centre == 0;
  static constexpr bool kHasOffsets = Centre == kOffsets;

  // Small blocks begin with d and then their offset, and are one chunk.
  template <class Source>
  static void head(Source& from, int64_t at, Numbers to) {
    if constexpr (kHasOffsets) {
      Words both = from.template fields<uint32_t>(at);
      to.d[0] = from_f16(both);
      to.offset[0] = from_f16(both >> 16);
    } else {
      to.d[0] = from.halves(at);
    }
  }
  static constexpr int kRepeats = 1;
  static constexpr int kChunks = 1;
  static constexpr int kChunkSlices = 2;
  static constexpr int kChunkStep = 1;  // from slice to slice
  static constexpr int first_slice(int) { return 0; }
};

// run.template operator()<I>() for every I below End.
template <int End, int I = 0, class Run>
inline __attribute__((always_inline)) void each(const Run& run) {
  if constexpr (I < End) {
    run.template operator()<I>();
    each<End, I + 1>(run);
  }
}

// run(part) for every part of a block. Not unrolled: code for a whole block does not stay in the caches of instructions,
// and a Zen 5, whose two threads share them, took up to 1.6 times as long.
template <class F, class Run>
inline __attribute__((always_inline)) void each_repeat(const Run& run) {
  int64_t repeats = F::kRepeats;
  if (F::kRepeats > 1) asm("" : "+r"(repeats));
  for (int64_t part = 0; part < repeats; ++part) run(part);
}

// run.template operator()<C>() for every chunk C of a block.
template <class F, int C = 0, class Run>
inline __attribute__((always_inline)) void each_chunk(const Run& run) {
  run.template operator()<C>();
  if constexpr (C + 1 < F::kChunks) each_chunk<F, C + 1>(run);
}

// 16 bytes of each row: elements 0 to 15 of a group of 32 in the low nibbles, 16 to 31 in the high ones.
template <class Source>
inline void load_nibbles(Source& from, int64_t at, Bytes* q) {
  Bytes raw[4];
  from.load(at, raw);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    q[j] = raw[j] & repeat(0x0f);
    q[4 + j] = bits<4>(raw[j], 0x0f);
  }
}

// Elements 4 I to 4 I + 3 of 16 bytes of nibbles.
template <int I>
inline Bytes nibbles(const Interleaved& from, int64_t at) {
  Bytes raw = from.word(at + 4 * (I % 4));
  return I < 4 ? raw & repeat(0x0f) : bits<4>(raw, 0x0f);
}

struct Q4_0 : Block<32, 18, 32, 8, 8, false> {
  template <int, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_nibbles(from, at + 2, q);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t) {
    return nibbles<I>(from, at + 2);
  }
};

struct Q4_1 : Block<32, 20, 32, 8, kOffsets, false> {
  template <int, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_nibbles(from, at + 4, q);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t) {
    return nibbles<I>(from, at + 4);
  }
};

struct Q5_0 : Block<32, 22, 32, 8, 16, false> {
  template <int, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_nibbles(from, at + 6, q);
    from.add_fifth_bits(at + 2, q);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t) {
    return nibbles<I>(from, at + 6) | fifth_bits(from.fields<uint32_t>(at + 2), I);
  }
};

struct Q5_1 : Block<32, 24, 32, 4, kOffsets, false> {
  template <int, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_nibbles(from, at + 8, q);
    from.add_fifth_bits(at + 4, q);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t) {
    return nibbles<I>(from, at + 8) | fifth_bits(from.fields<uint32_t>(at + 4), I);
  }
};

struct Q8_0 : Block<32, 34, 32, 1, 0, false> {
  template <int, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    from.load(at + 2, q);
    from.load(at + 18, q + 4);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t) {
    return from.word(at + 2 + 4 * I);
  }
};

constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <class Source>
inline void load_non_linear(Source& from, int64_t at, Bytes* q) {
  load_nibbles(from, at, q);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) q[j] = look_up(reinterpret_cast<const uint8_t*>(kNonLinear), q[j]);
}

struct IQ4_NL : Block<32, 18, 32, 1, 0, false> {
  template <int, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_non_linear(from, at + 2, q);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t) {
    return look_up(reinterpret_cast<const uint8_t*>(kNonLinear), nibbles<I>(from, at + 2));
  }
};

struct IQ4_XS : Block<256, 136, 32, 1, 0, true> {
  static constexpr int kRepeats = 8;
  static constexpr int kChunks = 8;
  static constexpr int first_slice(int c) { return 2 * c; }

  template <class Source>
  static void head(Source& from, int64_t at, Numbers to) {
    Words head = from.template fields<uint32_t>(at), low = from.template fields<uint32_t>(at + 4);
    to.d[0] = from_f16(head);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      Words six = ((low >> (4 * g)) & 0xfu) | (((head >> (16 + 2 * g)) & 3u) << 4);
      to.scale[g] = byte_in_halves(six, 0) - 32;
    }
  }
  template <int C, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_non_linear(from, at + 8 + 16 * C, q);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t part) {
    return look_up(reinterpret_cast<const uint8_t*>(kNonLinear), nibbles<I>(from, at + 8 + 16 * part));
  }
};

// The values of the 4-bit floats, doubled and raised by 12 to be positive.
constexpr uint8_t kFloat4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct MXFP4 : Block<32, 17, 32, 8, 12, false> {
  template <class Source>
  static void head(Source& from, int64_t at, Numbers to) {
    // Half of 2**(e - 127), as the table is doubled; it is subnormal for e below 2.
    Words e = from.template fields<uint8_t>(at), normal = (e - 1u) << 23, subnormal = (Words{} + 0x00200000u) << e;
    to.d[0] = reinterpret_cast<Vec>(e < 2u ? subnormal : normal);
  }
  template <int, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_nibbles(from, at + 1, q);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) q[j] = look_up(kFloat4, q[j]);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t) {
    return look_up(kFloat4, nibbles<I>(from, at + 1));
  }
};

// What Q4_K and Q5_K share: d and dmin, then eight 6-bit scales and eight 6-bit mins in 12 bytes; chunks of two groups.
template <int64_t BlockBytes, int Span>
struct ScalesAndMins : Block<256, BlockBytes, 32, Span, kOffsets, true> {
  static constexpr int kRepeats = 4;
  static constexpr int kChunks = 4;
  static constexpr int kChunkSlices = 4;
  static constexpr int first_slice(int c) { return 4 * c; }

  template <class Source>
  static void head(Source& from, int64_t at, Numbers to) {
    Bytes head[4];
    from.load_head(at, head);
    to.d[0] = from_f16(words(head[0]));
    Vec dmin = from_f16(words(head[0]) >> 16) * splat(-1);
    Bytes scales[2] = {head[1] & repeat(0x3f), (head[3] & repeat(0x0f)) | bits<2>(head[1], 0x30)};
    Bytes mins[2] = {head[2] & repeat(0x3f), bits<4>(head[3], 0x0f) | bits<2>(head[2], 0x30)};
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      to.scale[g] = byte_in_halves(words(scales[g / 4]), g % 4);
      to.offset[g] = dmin * to_float((words(mins[g / 4]) >> (8 * (g % 4))) & 0xffu);
    }
  }
};

struct Q4_K : ScalesAndMins<144, 8> {
  // Groups 2 C and 2 C + 1: the low and the high nibbles of 32 bytes.
  template <int C, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Bytes raw[4];
      from.load(at + 16 + 32 * C + 16 * half, raw);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        q[4 * half + j] = raw[j] & repeat(0x0f);
        q[4 * half + 8 + j] = bits<4>(raw[j], 0x0f);
      }
    }
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t part) {
    Bytes raw = from.word(at + 16 + 32 * part + 4 * (I % 8));
    return I < 8 ? raw & repeat(0x0f) : bits<4>(raw, 0x0f);
  }
};

struct Q5_K : ScalesAndMins<176, 4> {
  // As in Q4_K; the fifth bits of the two groups are those two bits of 32 bytes of their own.
  template <int C, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Bytes raw[4], high[4];
      from.load(at + 48 + 32 * C + 16 * half, raw);
      C == 0 ? from.load(at + 16 + 16 * half, high) : from.load_again(at + 16 + 16 * half, high);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        q[4 * half + j] = (raw[j] & repeat(0x0f)) | bits<2 * C - 4>(high[j], 0x10);
        q[4 * half + 8 + j] = bits<4>(raw[j], 0x0f) | bits<2 * C - 3>(high[j], 0x10);
      }
    }
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t part) {
    Bytes raw = from.word(at + 48 + 32 * part + 4 * (I % 8));
    Bytes high = bytes(words(from.word(at + 16 + 4 * (I % 8))) >> (2 * static_cast<uint32_t>(part)));
    return I < 8 ? (raw & repeat(0x0f)) | bits<-4>(high, 0x10) : bits<4>(raw, 0x0f) | bits<-3>(high, 0x10);
  }
};

// What Q6_K, Q2_K and Q3_K share: a chunk is 16 of each group of 32 in half of the block.
template <int64_t BlockBytes, int Centre>
struct Groups16 : Block<256, BlockBytes, 16, 4, Centre, true> {
  static constexpr int kRepeats = 2;
  static constexpr int kChunks = 4;
  static constexpr int kChunkSlices = 4;
  static constexpr int kChunkStep = 2;
  static constexpr int first_slice(int c) { return 8 * (c / 2) + c % 2; }
};

struct Q6_K : Groups16<210, 32> {
  template <class Source>
  static void head(Source& from, int64_t at, Numbers to) {
    to.d[0] = from.halves(at + 208);
    Bytes scales[4];
    from.load_head(at + 192, scales);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) to.scale[g] = signed_byte_in_halves(words(scales[g / 4]), g % 4);
  }
  template <int C, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    constexpr int64_t kHalf = C / 2, kLine = C % 2 * 16;
    Bytes first[4], second[4], high[4];
    from.load(at + 64 * kHalf + kLine, first);
    from.load(at + 64 * kHalf + 32 + kLine, second);
    from.load(at + 128 + 32 * kHalf + kLine, high);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      q[j] = (first[j] & repeat(0x0f)) | bits<-4>(high[j], 0x30);
      q[8 + j] = (second[j] & repeat(0x0f)) | bits<-2>(high[j], 0x30);
      q[16 + j] = bits<4>(first[j], 0x0f) | (high[j] & repeat(0x30));
      q[24 + j] = bits<4>(second[j], 0x0f) | bits<2>(high[j], 0x30);
    }
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t part) {
    constexpr int kQuarter = I / 8;
    Bytes raw = from.word(at + 64 * part + 32 * (kQuarter % 2) + 4 * (I % 8));
    Bytes high = from.word(at + 128 + 32 * part + 4 * (I % 8));
    return (kQuarter < 2 ? raw & repeat(0x0f) : bits<4>(raw, 0x0f)) | bits<2 * kQuarter - 4>(high, 0x30);
  }
};

// 16 bytes whose pairs of bits are 16 elements of each of four groups of 32.
template <class Source>
inline void load_crumbs(Source& from, int64_t at, Bytes* q) {
  Bytes raw[4];
  from.load(at, raw);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    q[j] = raw[j] & repeat(0x03);
    q[8 + j] = bits<2>(raw[j], 0x03);
    q[16 + j] = bits<4>(raw[j], 0x03);
    q[24 + j] = bits<6>(raw[j], 0x03);
  }
}

struct Q2_K : Groups16<84, kOffsets> {
  template <class Source>
  static void head(Source& from, int64_t at, Numbers to) {
    Words factors = from.template fields<uint32_t>(at + 80);
    to.d[0] = from_f16(factors);
    Vec dmin = from_f16(factors >> 16) * splat(-1);
    Bytes scales[4];
    from.load_head(at, scales);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
      Words both = words(scales[g / 4]) >> (8 * (g % 4));
      to.scale[g] = byte_in_halves(both & 0xfu, 0);
      to.offset[g] = dmin * to_float((both >> 4) & 0xfu);
    }
  }
  template <int C, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    load_crumbs(from, at + 16 + 16 * C, q);
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t part) {
    return bits<2 * (I / 8)>(from.word(at + 16 + 32 * part + 4 * (I % 8)), 0x03);
  }
};

struct Q3_K : Groups16<110, 4> {
  template <class Source>
  static void head(Source& from, int64_t at, Numbers to) {
    to.d[0] = from.halves(at + 108);
    Bytes a = bytes(from.template fields<uint32_t>(at + 96)), b = bytes(from.template fields<uint32_t>(at + 100));
    Bytes c = bytes(from.template fields<uint32_t>(at + 104));
    Bytes scales[4] = {(a & repeat(0x0f)) | bits<-4>(c, 0x30), (b & repeat(0x0f)) | bits<-2>(c, 0x30),
                       bits<4>(a, 0x0f) | (c & repeat(0x30)), bits<4>(b, 0x0f) | bits<2>(c, 0x30)};
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) to.scale[g] = byte_in_halves(words(scales[g / 4]), g % 4) - 32;
  }
  // As in Q2_K; bit g of 32 bytes of their own belongs to group g of 32.
  template <int C, class Source>
  static void chunk(Source& from, int64_t at, Bytes* q) {
    constexpr int kGroup0 = C / 2 * 4;
    Bytes high[4];
    load_crumbs(from, at + 32 + 16 * C, q);
    C < 2 ? from.load(at + C * 16, high) : from.load_again(at + C % 2 * 16, high);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      q[j] |= bits<kGroup0 - 2>(high[j], 0x04);
      q[8 + j] |= bits<kGroup0 - 1>(high[j], 0x04);
      q[16 + j] |= bits<kGroup0>(high[j], 0x04);
      q[24 + j] |= bits<kGroup0 + 1>(high[j], 0x04);
    }
  }
  template <int I>
  static Bytes step(const Interleaved& from, int64_t at, int64_t part) {
    Bytes low = bits<2 * (I / 8)>(from.word(at + 32 + 32 * part + 4 * (I % 8)), 0x03);
    Bytes high = bytes(words(from.word(at + 4 * (I % 8))) >> (4 * static_cast<uint32_t>(part)));
    return low | bits<I / 8 - 2>(high, 0x04);
  }
};

}  // namespace moefuse::MOEFUSE_ISA
