// The block formats of GGUF: what the bytes of a block mean, for one weight row per lane.
//
// All come down to one form, w[k] = scale[g] * (q[k] - centre) + offset[g], where q is a byte, g the group of 16 or 32
// that k falls in, and either the centre or the offsets are zero. `decode` reads the block at `at` of each row and
// nothing beyond it.
#pragma once

#include "kernels.h"

namespace moefuse::MOEFUSE_ISA {

// Elements of K that are decoded at a time: one large block, or up to eight small ones.
constexpr int64_t kUnit = 256;

// kLanes rows, kUnit elements of each.
struct Panel {
  Bytes q[kUnit / 4];  // elements 4i to 4i + 3 of every row
  Vec scale[kUnit / 16];
  Vec offset[kUnit / 16];
};

// Group: elements that share a scale. Span: steps of four elements whose products with activations of at most 127
// add up in 16 bits. Centre: 0 where q is int8; kOffsets where every group has an offset instead.
constexpr int kOffsets = -1;

template <int64_t BlockSize, int64_t BlockBytes, int Group, int Span, int Centre>
struct Block {
  static constexpr int64_t kSize = BlockSize;
  static constexpr int64_t kBytes = BlockBytes;
  static constexpr int kGroup = Group;
  static constexpr int kSpan = Span;
  static constexpr int kCentre = Centre;
  static constexpr bool kSigned = Centre == 0;
  static constexpr bool kHasOffsets = Centre == kOffsets;
};

// One weight row per lane, and what to fetch while they are read: as many bytes, where the next rows usually lie.
struct Source {
  const char* const* rows;
  uintptr_t ahead;
};

inline void load_columns(Source& from, int64_t at, Bytes* out) {
  constexpr int64_t kRead = 16 * kLanes;
#pragma GCC unroll 2
  for (int64_t line = 0; line < kRead; line += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(from.ahead + static_cast<uintptr_t>(line)), 0, 3);
  }
  from.ahead += kRead;
  load_columns(from.rows, at, out);
}

inline Bytes repeat(uint8_t x) { return Bytes{} + x; }
inline Words words(Bytes v) { return reinterpret_cast<Words>(v); }
inline Bytes bytes(Words v) { return reinterpret_cast<Bytes>(v); }
inline Vec to_float(Ints v) { return __builtin_convertvector(v, Vec); }
inline Vec to_float(Words v) { return to_float(reinterpret_cast<Ints>(v)); }

// Every byte shifted by a constant and masked. The mask must clear what comes from the neighbouring byte.
template <int Right>
inline Bytes bits(Bytes v, uint8_t mask) {
  Words shifted = Right >= 0 ? words(v) >> (Right >= 0 ? Right : 0) : words(v) << (Right < 0 ? -Right : 0);
  return bytes(shifted) & repeat(mask);
}

inline Vec byte_of(Words v, int i) { return to_float((v >> (8 * i)) & 0xffu); }
inline Vec signed_byte_of(Words v, int i) { return to_float((reinterpret_cast<Ints>(v) << (24 - 8 * i)) >> 24); }

// A 16-bit or 32-bit field of every row, in the low bits of each lane.
template <class Field>
inline Words load_fields(Source& rows, int64_t at) {
  Words out;
#pragma GCC unroll 8
  for (int l = 0; l < kLanes; ++l) {
    Field field;
    __builtin_memcpy(&field, rows.rows[l] + at, sizeof field);
    out[l] = field;
  }
  return out;
}

// 16 bytes of each row: elements 0 to 15 of a group of 32 in the low nibbles, 16 to 31 in the high ones.
inline void load_nibbles(Source& rows, int64_t at, Bytes* q) {
  Bytes raw[4];
  load_columns(rows, at, raw);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    q[j] = raw[j] & repeat(0x0f);
    q[4 + j] = bits<4>(raw[j], 0x0f);
  }
}

// Adds bit k of `high` to element k of a group of 32 as its fifth bit.
inline void add_fifth_bits(Words high, Bytes* q) {
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    // The multiplication puts bit i of the nibble at the bottom of byte i.
    Words spread = (((high >> (4 * j)) & 0xfu) * 0x00204081u) & 0x01010101u;
    q[j] |= bytes(spread << 4);
  }
}

struct Q4_0 : Block<32, 18, 32, 8, 8> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    scale[0] = from_f16(load_fields<uint16_t>(rows, at));
    load_nibbles(rows, at + 2, q);
  }
};

struct Q4_1 : Block<32, 20, 32, 8, kOffsets> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec* offset) {
    Words pair = load_fields<uint32_t>(rows, at);
    scale[0] = from_f16(pair);
    offset[0] = from_f16(pair >> 16);
    load_nibbles(rows, at + 4, q);
  }
};

struct Q5_0 : Block<32, 22, 32, 4, 16> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    scale[0] = from_f16(load_fields<uint16_t>(rows, at));
    load_nibbles(rows, at + 6, q);
    add_fifth_bits(load_fields<uint32_t>(rows, at + 2), q);
  }
};

struct Q5_1 : Block<32, 24, 32, 4, kOffsets> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec* offset) {
    Words pair = load_fields<uint32_t>(rows, at);
    scale[0] = from_f16(pair);
    offset[0] = from_f16(pair >> 16);
    load_nibbles(rows, at + 8, q);
    add_fifth_bits(load_fields<uint32_t>(rows, at + 4), q);
  }
};

struct Q8_0 : Block<32, 34, 32, 1, 0> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    scale[0] = from_f16(load_fields<uint16_t>(rows, at));
    load_columns(rows, at + 2, q);
    load_columns(rows, at + 18, q + 4);
  }
};

constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline void load_non_linear(Source& rows, int64_t at, Bytes* q) {
  load_nibbles(rows, at, q);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) q[j] = look_up(reinterpret_cast<const uint8_t*>(kNonLinear), q[j]);
}

struct IQ4_NL : Block<32, 18, 32, 1, 0> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    scale[0] = from_f16(load_fields<uint16_t>(rows, at));
    load_non_linear(rows, at + 2, q);
  }
};

struct IQ4_XS : Block<256, 136, 32, 1, 0> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    Words head = load_fields<uint32_t>(rows, at), low = load_fields<uint32_t>(rows, at + 4);
    Vec d = from_f16(head);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      Words six = ((low >> (4 * g)) & 0xfu) | (((head >> (16 + 2 * g)) & 3u) << 4);
      scale[g] = d * (to_float(six) - splat(32));
      load_non_linear(rows, at + 8 + 16 * g, q + 8 * g);
    }
  }
};

// The values of the 4-bit floats, doubled and raised by 12 to be positive.
constexpr uint8_t kFloat4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct MXFP4 : Block<32, 17, 32, 4, 12> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    // Half of 2**(e - 127), as the table is doubled; it is subnormal for e below 2.
    Words e = load_fields<uint8_t>(rows, at), normal = (e - 1u) << 23, subnormal = (Words{} + 0x00200000u) << e;
    scale[0] = reinterpret_cast<Vec>(e < 2u ? subnormal : normal);
    load_nibbles(rows, at + 1, q);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) q[j] = look_up(kFloat4, q[j]);
  }
};

// The head that Q4_K and Q5_K share: d and dmin, then eight 6-bit scales and eight 6-bit mins in 12 bytes.
inline void load_scales_and_mins(Source& rows, int64_t at, Vec* scale, Vec* offset) {
  Bytes head[4];
  load_columns(rows, at, head);
  Vec d = from_f16(words(head[0])), dmin = from_f16(words(head[0]) >> 16) * splat(-1);
  Bytes scales[2] = {head[1] & repeat(0x3f), (head[3] & repeat(0x0f)) | bits<2>(head[1], 0x30)};
  Bytes mins[2] = {head[2] & repeat(0x3f), bits<4>(head[3], 0x0f) | bits<2>(head[2], 0x30)};
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    scale[g] = d * byte_of(words(scales[g / 4]), g % 4);
    offset[g] = dmin * byte_of(words(mins[g / 4]), g % 4);
  }
}

struct Q4_K : Block<256, 144, 32, 8, kOffsets> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec* offset) {
    load_scales_and_mins(rows, at, scale, offset);
    for (int pair = 0; pair < 4; ++pair) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Bytes raw[4];
        load_columns(rows, at + 16 + 32 * pair + 16 * half, raw);
        Bytes* to = q + 16 * pair + 4 * half;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          to[j] = raw[j] & repeat(0x0f);
          to[8 + j] = bits<4>(raw[j], 0x0f);
        }
      }
    }
  }
};

struct Q5_K : Block<256, 176, 32, 4, kOffsets> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec* offset) {
    load_scales_and_mins(rows, at, scale, offset);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Bytes high[4];
      load_columns(rows, at + 16 + 16 * half, high);
      add_pair<0>(rows, at + 16 * half, high, q + 4 * half);
      add_pair<1>(rows, at + 16 * half, high, q + 4 * half);
      add_pair<2>(rows, at + 16 * half, high, q + 4 * half);
      add_pair<3>(rows, at + 16 * half, high, q + 4 * half);
    }
  }

  // Half of groups 2 Pair and 2 Pair + 1, whose fifth bits are those two bits of `high`.
  template <int Pair>
  static void add_pair(Source& rows, int64_t at, const Bytes* high, Bytes* q) {
    Bytes raw[4];
    load_columns(rows, at + 48 + 32 * Pair, raw);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      q[16 * Pair + j] = (raw[j] & repeat(0x0f)) | bits<2 * Pair - 4>(high[j], 0x10);
      q[16 * Pair + 8 + j] = bits<4>(raw[j], 0x0f) | bits<2 * Pair - 3>(high[j], 0x10);
    }
  }
};

struct Q6_K : Block<256, 210, 16, 2, 32> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    Vec d = from_f16(load_fields<uint16_t>(rows, at + 208));
    Bytes scales[4];
    load_columns(rows, at + 192, scales);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) scale[g] = d * signed_byte_of(words(scales[g / 4]), g % 4);
    for (int part = 0; part < 4; ++part) {  // 16 of each group of 32 in half of the block
      int64_t half = part / 2, l = part % 2 * 16;
      Bytes first[4], second[4], high[4];
      load_columns(rows, at + 64 * half + l, first);
      load_columns(rows, at + 64 * half + 32 + l, second);
      load_columns(rows, at + 128 + 32 * half + l, high);
      Bytes* to = q + 32 * half + l / 4;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        to[j] = (first[j] & repeat(0x0f)) | bits<-4>(high[j], 0x30);
        to[8 + j] = (second[j] & repeat(0x0f)) | bits<-2>(high[j], 0x30);
        to[16 + j] = bits<4>(first[j], 0x0f) | (high[j] & repeat(0x30));
        to[24 + j] = bits<4>(second[j], 0x0f) | bits<2>(high[j], 0x30);
      }
    }
  }
};

// 16 bytes whose pairs of bits are 16 elements of each of four groups of 32.
inline void load_crumbs(Source& rows, int64_t at, Bytes* q) {
  Bytes raw[4];
  load_columns(rows, at, raw);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    q[j] = raw[j] & repeat(0x03);
    q[8 + j] = bits<2>(raw[j], 0x03);
    q[16 + j] = bits<4>(raw[j], 0x03);
    q[24 + j] = bits<6>(raw[j], 0x03);
  }
}

struct Q2_K : Block<256, 84, 16, 4, kOffsets> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec* offset) {
    Words pair = load_fields<uint32_t>(rows, at + 80);
    Vec d = from_f16(pair), dmin = from_f16(pair >> 16) * splat(-1);
    Bytes scales[4];
    load_columns(rows, at, scales);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
      Words both = words(scales[g / 4]) >> (8 * (g % 4));
      scale[g] = d * to_float(both & 0xfu);
      offset[g] = dmin * to_float((both >> 4) & 0xfu);
    }
    for (int part = 0; part < 4; ++part) {
      int64_t half = part / 2, l = part % 2 * 16;
      load_crumbs(rows, at + 16 + 32 * half + l, q + 32 * half + l / 4);
    }
  }
};

struct Q3_K : Block<256, 110, 16, 4, 4> {
  static void decode(Source& rows, int64_t at, Bytes* q, Vec* scale, Vec*) {
    Vec d = from_f16(load_fields<uint16_t>(rows, at + 108));
    Bytes a = bytes(load_fields<uint32_t>(rows, at + 96)), b = bytes(load_fields<uint32_t>(rows, at + 100));
    Bytes c = bytes(load_fields<uint32_t>(rows, at + 104));
    Bytes scales[4] = {(a & repeat(0x0f)) | bits<-4>(c, 0x30), (b & repeat(0x0f)) | bits<-2>(c, 0x30),
                       bits<4>(a, 0x0f) | (c & repeat(0x30)), bits<4>(b, 0x0f) | bits<2>(c, 0x30)};
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) scale[g] = d * (byte_of(words(scales[g / 4]), g % 4) - splat(32));
#pragma GCC unroll 2
    for (int l = 0; l < 32; l += 16) {
      Bytes high[4];
      load_columns(rows, at + l, high);
      load_crumbs(rows, at + 32 + l, q + l / 4);
      load_crumbs(rows, at + 64 + l, q + 32 + l / 4);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) add_third_bits(high[j], q + l / 4 + j);
    }
  }

  // Bit g of `high` belongs to group g of 32.
  static void add_third_bits(Bytes high, Bytes* q) {
    q[0] |= bits<-2>(high, 0x04);
    q[8] |= bits<-1>(high, 0x04);
    q[16] |= high & repeat(0x04);
    q[24] |= bits<1>(high, 0x04);
    q[32] |= bits<2>(high, 0x04);
    q[40] |= bits<3>(high, 0x04);
    q[48] |= bits<4>(high, 0x04);
    q[56] |= bits<5>(high, 0x04);
  }
};

}  // namespace moefuse::MOEFUSE_ISA
