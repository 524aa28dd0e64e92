// The table of functions each instruction set exports. Everything above it is blind to the instruction set.
//
// kernels.cpp is compiled once per set, so this header must hold no inline function with a body that the
// linker could merge across sets: constants and plain structs only.
#pragma once

#include <cstdint>

namespace moefuse {

enum class Dtype : int { f32, bf16, f16 };
// The dtypes, then the block formats of blocks.h, then that of fp8.h.
enum class WeightType : int {
  f32, bf16, f16, q4_k, q6_k, q8_0, q4_0, q5_k, q5_0, q5_1, q4_1, iq4_nl, iq4_xs, mxfp4, q2_k, q3_k, fp8
};
constexpr int kPlainTypes = 3;
constexpr int kIntegerTypes = 13;
enum class Score : int { softmax, sigmoid, sqrtsoftplus };
enum class Act : int { silu, gelu_tanh, gelu, relu, relu2, swiglu_oai, swiglu_clamp };
// Their names to Python, in the same order.
constexpr const char* kFormatNames[] = {"Q4_K", "Q6_K", "Q8_0",   "Q4_0",   "Q5_K",  "Q5_0", "Q5_1",
                                        "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "FP8"};
constexpr const char* kScoreNames[] = {"softmax", "sigmoid", "sqrtsoftplus"};
constexpr const char* kActNames[] = {"silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp"};

struct Activation {
  Act kind;
  bool gated;
  float alpha;
  float limit;
};

// Packed activation rows are zero-padded to whole chunks, so that no product has an activation tail.
constexpr int64_t kChunk = 32;

// K is summed this much at a time: six f32 rows take 24 KiB of L1 and leave room for weight rows streaming past them.
constexpr int64_t kDepth = 1024;

// Rows and weight rows one call of `Format::dots` may get: what its callers' stack buffers hold.
constexpr int64_t kMaxRows = 60;
constexpr int64_t kMaxColumns = 128;

// Weight rows that may lie interleaved, blocks at the same place of all of them together: those of the longest vectors.
constexpr int64_t kStripRows = 16;

// Whether this processor wants what it reads soon in L2; others take it into L1 at once (runtime/isa.cpp).
extern const bool kFetchIntoL2;

// z[m, n] = dot(a[m], w[n]) for m < M, n < N. The order of the sum depends on K alone.
struct Dots {
  const char* const* a;  // [M] packed rows of K, padded to kChunk
  const char* const* w;  // [N] weight rows of K, not padded; of interleaved ones, whole strips, where their strip begins
  int64_t M, N, K;
  float* z;  // [M, ldz]
  int64_t ldz;
  const char* next;  // the first weight row of the caller's next task, to prefetch; may be null
};

// How a weight type is multiplied: the form its activations must be packed in, and the product.
struct Format {
  int64_t pack_unit;  // a packed row may be written in pieces that start at multiples of this
  int64_t act_bytes;  // of pack_unit packed elements
  int64_t block;      // elements of a weight row that stand together
  int64_t block_bytes;
  // Packs n elements of x and zeroes up to `padded`, a multiple of pack_unit. Weights in blocks need no padding.
  void (*pack)(Dtype dtype, const void* x, int64_t n, int64_t padded, char* out);
  void (*dots)(const Dots& args);
};

// A block format with activations rounded to 8 bits in groups of 32, and with activations in f32. Where codes are no
// integers the former is for bf16 activations alone, and rounds to that or not at all.
struct BlockFormat {
  Format rounded, exact;
  // The numbers of n elements, whole blocks, of each of `count` rows: out [count, pitch]. Interleaved rows begin with
  // that of a strip.
  void (*decode)(const char* const* rows, int64_t count, int64_t n, float* out, int64_t pitch);
};

struct Kernels {
  const char* name;
  Format formats[kPlainTypes][2];  // [weight dtype][1 where bf16 activations are exact enough]
  const BlockFormat* blocks;       // [kIntegerTypes]
  const BlockFormat* interleaved;  // [kIntegerTypes]
  BlockFormat fp8;

  void (*decode)(Dtype dtype, const void* x, float* out, int64_t n);
  void (*encode)(const float* x, Dtype dtype, void* out, int64_t n);
  void (*axpy)(float scale, Dtype dtype, const void* x, float* acc, int64_t n);  // acc += scale * x
  // Neither `activate` nor `scores` works in place.
  void (*activate)(const Activation& act, const float* gate, const float* up, float* out, int64_t n);
  void (*scores)(Score score, const float* logits, float* out, int64_t n);
  // acc[n, k] += sum over p in order of g[p, n] * x[p, k]; `fresh`: from zero; k % kChunk == 0.
  void (*outer)(const float* g, int64_t ldg, const float* x, int64_t ldx, int64_t rows, int64_t n, int64_t k,
                float* acc, int64_t lda, bool fresh);
  // The derivatives of `activate` by gate and by up (which may be null, and by_up with it).
  void (*derivatives)(const Activation& act, const float* gate, const float* up, float* by_gate, float* by_up,
                      int64_t n);
  float (*dot)(const float* x, const float* y, int64_t n);
  // (a, b) -> (a cos - b sin, b cos + a sin), each of n.
  void (*rotate)(float* a, float* b, const float* cos, const float* sin, int64_t n);
  // x -> e**(scale * x - top) with top the largest of scale * x, which is returned; `total` gets their sum.
  float (*powers)(float scale, float* x, int64_t n, float* total);
};

}  // namespace moefuse
