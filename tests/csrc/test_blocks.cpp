// Products with weights in blocks against a plain reading of the formats in double, value by value.
//
// The last block of every weight stands right before a page that cannot be read.
#include <sys/mman.h>
#include <unistd.h>

#include "harness.h"

namespace moefuse::test {
namespace {

struct Kind {
  const char* name;
  WeightType type;
  int64_t size, bytes;
  std::vector<int64_t> scales;  // where its f16 fields are
  std::vector<int64_t> fields;  // where its fields begin and the last ends; none where rows are never interleaved
};

const Kind kKinds[] = {
    {"Q4_K", WeightType::q4_k, 256, 144, {0, 2}, {0, 16, 144}},
    {"Q6_K", WeightType::q6_k, 256, 210, {208}, {0, 128, 192, 208, 210}},
    {"Q8_0", WeightType::q8_0, 32, 34, {0}, {0, 2, 34}},
    {"Q4_0", WeightType::q4_0, 32, 18, {0}, {0, 2, 18}},
    {"Q5_K", WeightType::q5_k, 256, 176, {0, 2}, {0, 16, 48, 176}},
    {"Q5_0", WeightType::q5_0, 32, 22, {0}, {0, 2, 6, 22}},
    {"Q5_1", WeightType::q5_1, 32, 24, {0, 2}, {0, 4, 8, 24}},
    {"Q4_1", WeightType::q4_1, 32, 20, {0, 2}, {0, 4, 20}},
    {"IQ4_NL", WeightType::iq4_nl, 32, 18, {0}, {0, 2, 18}},
    {"IQ4_XS", WeightType::iq4_xs, 256, 136, {0}, {0, 8, 136}},
    {"MXFP4", WeightType::mxfp4, 32, 17, {}, {0, 1, 17}},
    {"Q2_K", WeightType::q2_k, 256, 84, {80, 82}, {0, 16, 80, 84}},
    {"Q3_K", WeightType::q3_k, 256, 110, {108}, {0, 32, 96, 108, 110}},
    {"FP8", WeightType::fp8, 128, 132, {}, {}},
};

// A weight as scale * q + offset.
struct Term {
  double scale, q, offset;

  double value() const { return scale * q + offset; }
  double size() const { return std::fabs(scale * q) + std::fabs(offset); }
};

double half_at(const uint8_t* at) { return widen(Dtype::f16, at); }

double float_at(const uint8_t* at) { return widen(Dtype::f32, at); }

double e4m3(uint8_t code) {
  int e = (code >> 3) & 15, m = code & 7;
  double size = (code & 127) == 127 ? NAN : e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
  return code < 128 ? size : -size;
}

int nibble(const uint8_t* qs, int64_t k) { return k < 16 ? qs[k] & 15 : qs[k - 16] >> 4; }

int fifth(const uint8_t* qh, int64_t k) { return ((qh[k / 8] >> (k % 8)) & 1) << 4; }

// The 6-bit scale (or, at 4, the min) of a group of Q4_K and Q5_K.
int six_bits(const uint8_t* packed, int64_t g, int64_t from) {
  if (g < 4) return packed[from + g] & 63;
  int low = from == 0 ? packed[4 + g] & 15 : packed[4 + g] >> 4;
  return low | ((packed[from + g - 4] >> 6) << 4);
}

Term term(WeightType type, const uint8_t* b, int64_t k) {
  static const int kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static const int kFloat4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  int64_t g = k / 32, l = k % 32, half = k / 128, quarter = k % 128 / 32;
  switch (type) {
    case WeightType::q4_0: return {half_at(b), nibble(b + 2, k) * 1.0, -8 * half_at(b)};
    case WeightType::q4_1: return {half_at(b), nibble(b + 4, k) * 1.0, half_at(b + 2)};
    case WeightType::q5_0: return {half_at(b), nibble(b + 6, k) + fifth(b + 2, k) * 1.0, -16 * half_at(b)};
    case WeightType::q5_1: return {half_at(b), nibble(b + 8, k) + fifth(b + 4, k) * 1.0, half_at(b + 2)};
    case WeightType::q8_0: return {half_at(b), static_cast<int8_t>(b[2 + k]) * 1.0, 0};
    case WeightType::iq4_nl: return {half_at(b), kNonLinear[nibble(b + 2, k)] * 1.0, 0};
    case WeightType::mxfp4: return {std::ldexp(0.5, b[0] - 127), kFloat4[nibble(b + 1, k)] * 1.0, 0};
    case WeightType::iq4_xs: {
      int high = ((b[2] | b[3] << 8) >> (2 * g)) & 3, low = (b[4 + g / 2] >> (g % 2 * 4)) & 15;
      return {half_at(b) * ((low | high << 4) - 32), kNonLinear[nibble(b + 8 + 16 * g, l)] * 1.0, 0};
    }
    case WeightType::q4_k:
    case WeightType::q5_k: {
      bool five = type == WeightType::q5_k;
      uint8_t both = b[(five ? 48 : 16) + g / 2 * 32 + l];
      int q = (g % 2 == 0 ? both & 15 : both >> 4) | (five ? ((b[16 + l] >> g) & 1) << 4 : 0);
      return {half_at(b) * six_bits(b + 4, g, 0), q * 1.0, -half_at(b + 2) * six_bits(b + 4, g, 4)};
    }
    case WeightType::q6_k: {
      uint8_t both = b[64 * half + 32 * (quarter % 2) + l];
      int low = quarter < 2 ? both & 15 : both >> 4, high = (b[128 + 32 * half + l] >> (2 * quarter)) & 3;
      double scale = half_at(b + 208) * static_cast<int8_t>(b[192 + k / 16]);
      return {scale, (low | high << 4) * 1.0, -32 * scale};
    }
    case WeightType::q2_k: {
      uint8_t scales = b[k / 16];
      int q = (b[16 + 32 * half + l] >> (2 * quarter)) & 3;
      return {half_at(b + 80) * (scales & 15), q * 1.0, -half_at(b + 82) * (scales >> 4)};
    }
    case WeightType::q3_k: {
      int64_t s = k / 16;
      int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4, high = (b[104 + s % 4] >> (s / 4 * 2)) & 3;
      int q = ((b[32 + 32 * half + l] >> (2 * quarter)) & 3) | ((b[l] >> g) & 1) << 2;
      double scale = half_at(b + 108) * ((low | high << 4) - 32);
      return {scale, q * 1.0, -4 * scale};
    }
    case WeightType::fp8: return {float_at(b), e4m3(b[4 + k]), 0};
    default: return {};
  }
}

// Memory that ends where a page without access begins.
class Guarded {
 public:
  explicit Guarded(int64_t size) {
    int64_t page = sysconf(_SC_PAGESIZE);
    mapped_ = (size + page - 1) / page * page + page;
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, static_cast<size_t>(mapped_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) std::abort();
    mprotect(base_ + mapped_ - page, static_cast<size_t>(page), PROT_NONE);
    data_ = base_ + mapped_ - page - size;
  }
  Guarded(Guarded&&) = delete;
  ~Guarded() { munmap(base_, static_cast<size_t>(mapped_)); }

  uint8_t* data() const { return data_; }

 private:
  uint8_t* base_;
  uint8_t* data_;
  int64_t mapped_;
};

enum class Scales { usual, subnormal, largest };

void fill(const Kind& kind, Scales scales, uint8_t* blocks, int64_t count) {
  for (int64_t i = 0; i < count * kind.bytes; ++i) blocks[i] = static_cast<uint8_t>(below(256));
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* b = blocks + i * kind.bytes;
    for (int64_t at : kind.scales) {
      uint16_t h = static_cast<uint16_t>(0x2000 + below(0x800));  // 2**-7 to 2**-5
      if (scales == Scales::subnormal) h = static_cast<uint16_t>(below(0x400));
      if (scales == Scales::largest) h = 0x7bff;
      h = static_cast<uint16_t>(h | (below(2) << 15));
      std::memcpy(b + at, &h, 2);
    }
    if (kind.type == WeightType::mxfp4) {
      b[0] = static_cast<uint8_t>(scales == Scales::usual ? 118 + below(6) : scales == Scales::largest ? 200 : below(3));
    }
    if (kind.type == WeightType::fp8) {
      float scale = std::ldexp(1 + 0.01f * static_cast<float>(below(100)), scales == Scales::usual ? -12 : -110);
      if (scales == Scales::largest) scale = 65504;
      std::memcpy(b, &scale, 4);
      for (int64_t at = 4; at < kind.bytes; ++at) {
        if ((b[at] & 127) == 127 || (scales == Scales::largest && i % 2 == 0)) b[at] = 0xfe;
      }
      continue;
    }
    // All bits set: the largest products a group can have.
    if (scales == Scales::largest) {
      for (int64_t at = 0; at < kind.bytes; ++at) {
        bool scale = kind.type == WeightType::mxfp4 && at == 0;
        for (int64_t field : kind.scales) scale = scale || at == field || at == field + 1;
        if (!scale && i % 2 == 0) b[at] = 0xff;
      }
    }
  }
}

// Rows [N] in turns, kStripRows of them: word by word of each field, where short ones are a word.
std::unique_ptr<Guarded> interleave(const Kind& kind, const uint8_t* rows, int64_t N, int64_t row_bytes) {
  auto made = std::make_unique<Guarded>(N * row_bytes);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t i = 0; i < row_bytes; ++i) {
      int64_t at = i % kind.bytes, field = 0;
      while (kind.fields[static_cast<size_t>(field + 1)] <= at) ++field;
      int64_t start = kind.fields[static_cast<size_t>(field)], stop = kind.fields[static_cast<size_t>(field + 1)];
      int64_t word = std::min<int64_t>(4, stop - start), place = at - start;
      int64_t to = start * kStripRows + (place / word * kStripRows + n % kStripRows) * word + place % word;
      made->data()[n / kStripRows * kStripRows * row_bytes + i / kind.bytes * kind.bytes * kStripRows + to] = rows[n * row_bytes + i];
    }
  }
  return made;
}

// The same bits from interleaved rows, forwards and backwards.
void test_interleaved(const Kind& kind, bool exact, int64_t rows, int64_t E, int64_t N, int64_t K) {
  context = kernels().name + std::string(" ") + kind.name + " interleaved M=" + std::to_string(rows) + " N=" +
            std::to_string(N) + " K=" + std::to_string(K);
  int64_t row_bytes = K / kind.size * kind.bytes;
  Guarded blocks(E * N * row_bytes);
  fill(kind, Scales::usual, blocks.data(), E * N * K / kind.size);
  auto strips = interleave(kind, blocks.data(), E * N, row_bytes);
  auto x = random_buffer(Dtype::f32, rows * K), grad = random_buffer(Dtype::f32, rows * N);
  std::vector<int32_t> offsets, order;
  for (int64_t e = 0; e <= E; ++e) offsets.push_back(static_cast<int32_t>(rows * e / E));
  for (int64_t r = 0; r < rows; ++r) order.push_back(static_cast<int32_t>(r));
  Plan plan{indices(offsets), indices(order), {}};
  Buffer y(Dtype::f32, rows * N), d_x(Dtype::f32, rows * K);
  Buffer want(Dtype::f32, rows * N), want_d_x(Dtype::f32, rows * K);
  Weight weight{blocks.data(), kind.type, E, N, K, N * row_bytes, row_bytes, exact};
  grouped_linear(x->tensor(K), weight, {}, plan, false, false, want.output(N), 1);
  grouped_linear_transposed(grad->tensor(N), weight, plan, false, false, want_d_x.output(K), 1);
  weight.data = strips->data(), weight.interleaved = true;
  grouped_linear(x->tensor(K), weight, {}, plan, false, false, y.output(N), 2);
  grouped_linear_transposed(grad->tensor(N), weight, plan, false, false, d_x.output(K), 2);
  check(y.same_bits(want), "interleaved rows give other results");
  check(d_x.same_bits(want_d_x), "interleaved rows give other gradients");
}

// The row as the rounded kernels see it: 8 bits in groups of 32.
std::vector<double> rounded(const Buffer& x, int64_t row, int64_t K) {
  std::vector<double> out;
  for (int64_t k0 = 0; k0 < K; k0 += 32) {
    float most = 0;
    for (int64_t k = k0; k < k0 + 32; ++k) most = std::max(most, std::fabs(static_cast<float>(x[row * K + k])));
    float inverse = most > 0 ? 127 / most : 0, scale = most / 127;
    for (int64_t k = k0; k < k0 + 32; ++k) {
      out.push_back(scale * static_cast<double>(std::nearbyint(static_cast<float>(x[row * K + k]) * inverse)));
    }
  }
  return out;
}

void test_product(const Kind& kind, bool exact, Scales scales, int64_t rows, int64_t E, int64_t N, int64_t K,
                  Dtype dtype = Dtype::f32) {
  context = kernels().name + std::string(" ") + kind.name + (exact ? " exact" : " rounded") +
            (dtype == Dtype::bf16 ? " bf16" : "") + " M=" + std::to_string(rows) + " N=" + std::to_string(N) + " K=" +
            std::to_string(K);
  int64_t row_bytes = K / kind.size * kind.bytes;
  Guarded blocks(E * N * row_bytes);
  fill(kind, scales, blocks.data(), E * N * K / kind.size);
  auto x = random_buffer(dtype, rows * K);
  for (int64_t k = 0; k < std::min<int64_t>(K, 64) && rows > 0; ++k) x->set(k, k < 32 ? 0 : 3);  // zeros; all at 127
  std::vector<int32_t> offsets, order;
  for (int64_t e = 0; e <= E; ++e) offsets.push_back(static_cast<int32_t>(rows * e / E));
  for (int64_t r = 0; r < rows; ++r) order.push_back(static_cast<int32_t>(r));

  Buffer y(Dtype::f32, rows * N);
  Weight weight{blocks.data(), kind.type, E, N, K, N * row_bytes, row_bytes, exact};
  grouped_linear(x->tensor(K), weight, {}, {indices(offsets), indices(order), {}}, false, false, y.output(N), 2);
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e + 1)]; ++r) {
      std::vector<double> in;
      for (int64_t k = 0; k < K; ++k) in.push_back((*x)[r * K + k]);
      if (!exact && kind.type != WeightType::fp8) in = rounded(*x, r, K);
      for (int64_t n = 0; n < N; ++n) {
        double want = 0, size = 0;
        for (int64_t k = 0; k < K; ++k) {
          const uint8_t* b = blocks.data() + (e * N + n) * row_bytes + k / kind.size * kind.bytes;
          Term t = term(kind.type, b, k % kind.size);
          want += t.value() * in[static_cast<size_t>(k)];
          size += t.size() * std::fabs(in[static_cast<size_t>(k)]);
        }
        if (std::fabs(y[r * N + n] - want) <= 1e-6 * size + 1e-44) continue;
        char text[120];
        std::snprintf(text, sizeof text, "y[%ld, %ld]: got %g, want %g, terms %g", static_cast<long>(r),
                      static_cast<long>(n), y[r * N + n], want, size);
        return fail(text);
      }
    }
  }
}

// A row's bits do not depend on the rows beside it, nor on the number of threads.
void test_batches(const Kind& kind, bool exact, Dtype dtype = Dtype::f32) {
  context = kernels().name + std::string(" ") + kind.name + (exact ? " exact" : " rounded") + " batches";
  int64_t rows = 70, N = 1 + below(150), K = kind.size * (1 + below(4)), row_bytes = K / kind.size * kind.bytes;
  Guarded blocks(N * row_bytes);
  fill(kind, Scales::usual, blocks.data(), N * K / kind.size);
  auto x = random_buffer(dtype, rows * K);
  Weight weight{blocks.data(), kind.type, 1, N, K, 0, row_bytes, exact};
  auto product = [&](int64_t from, int64_t count, int threads) {
    std::vector<int32_t> offsets = {0, static_cast<int32_t>(count)}, order;
    for (int64_t r = 0; r < count; ++r) order.push_back(static_cast<int32_t>(r));
    Tensor some{static_cast<const char*>(x->data()) + from * K * bytes_of(dtype), dtype, count, K};
    auto y = std::make_unique<Buffer>(Dtype::f32, count * N);
    grouped_linear(some, weight, {}, {indices(offsets), indices(order), {}}, false, false, y->output(N), threads);
    return y;
  };
  auto whole = product(0, rows, 1);
  for (int threads : {2, 8, 16}) check(product(0, rows, threads)->same_bits(*whole), "bits depend on the threads");
  for (int64_t count : {1, 2, 3, 4, 5, 6, 15, 16, 17, 60}) {
    int64_t from = below(rows - count + 1);
    auto alone = product(from, count, 1);
    for (int64_t i = 0; i < count * N; ++i) {
      double want = (*whole)[from * N + i];
      if ((*alone)[i] != want) return fail("a row depends on its batch of " + std::to_string(count));
    }
  }
}

// The same blocks turned round: grad [rows, N] -> d_x [rows, K], with the same bits for any number of threads.
void test_transposed(const Kind& kind, Scales scales, int64_t rows, int64_t E, int64_t N, int64_t K) {
  context = kernels().name + std::string(" ") + kind.name + " transposed M=" + std::to_string(rows) + " N=" +
            std::to_string(N) + " K=" + std::to_string(K);
  int64_t row_bytes = K / kind.size * kind.bytes;
  Guarded blocks(E * N * row_bytes);
  fill(kind, scales, blocks.data(), E * N * K / kind.size);
  auto grad = random_buffer(Dtype::f32, rows * N);
  std::vector<int32_t> offsets, order;
  for (int64_t e = 0; e <= E; ++e) offsets.push_back(static_cast<int32_t>(rows * e / E));
  for (int64_t r = 0; r < rows; ++r) order.push_back(static_cast<int32_t>(r));

  Buffer d_x(Dtype::f32, rows * K), again(Dtype::f32, rows * K);
  Weight weight{blocks.data(), kind.type, E, N, K, N * row_bytes, row_bytes};
  Plan plan{indices(offsets), indices(order), {}};
  grouped_linear_transposed(grad->tensor(N), weight, plan, false, false, d_x.output(K), 1);
  grouped_linear_transposed(grad->tensor(N), weight, plan, false, false, again.output(K), 3);
  check(d_x.same_bits(again), "bits depend on the number of threads");
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e + 1)]; ++r) {
      for (int64_t k = 0; k < K; ++k) {
        double want = 0, size = 0;
        for (int64_t n = 0; n < N; ++n) {
          const uint8_t* b = blocks.data() + (e * N + n) * row_bytes + k / kind.size * kind.bytes;
          Term t = term(kind.type, b, k % kind.size);
          want += t.value() * (*grad)[r * N + n];
          size += t.size() * std::fabs((*grad)[r * N + n]);
        }
        if (std::fabs(d_x[r * K + k] - want) <= 1e-6 * size + 1e-44) continue;
        return fail("d_x is not the sum of its terms");
      }
    }
  }
}

// A scale or an activation that is not finite spoils the results it touches and no other.
void test_not_finite(const Kind& kind, bool exact, Dtype dtype = Dtype::f32) {
  context = kernels().name + std::string(" ") + kind.name + " not finite";
  int64_t N = 20, K = 256, row_bytes = K / kind.size * kind.bytes;
  Guarded blocks(N * row_bytes);
  fill(kind, Scales::usual, blocks.data(), N * K / kind.size);
  uint16_t infinity = 0x7c00;
  bool spoilt = !kind.scales.empty();
  if (spoilt) std::memcpy(blocks.data() + 3 * row_bytes + kind.scales[0], &infinity, 2);
  if (kind.type == WeightType::fp8) {
    // A NaN among the codes instead: whatever it is multiplied with.
    blocks.data()[3 * row_bytes + 4 + 127] = 0xff;
    spoilt = true;
  }
  auto x = random_buffer(dtype, 3 * K);
  x->set(K + 7, NAN), x->set(2 * K + 50, kInf);
  std::vector<int32_t> offsets = {0, 3}, order = {0, 1, 2};
  Buffer y(Dtype::f32, 3 * N);
  Weight weight{blocks.data(), kind.type, 1, N, K, 0, row_bytes, exact};
  grouped_linear(x->tensor(K), weight, {}, {indices(offsets), indices(order), {}}, false, false, y.output(N), 1);
  for (int64_t n = 0; n < N; ++n) {
    check(std::isfinite(y[n]) == (n != 3 || !spoilt), "an infinite scale shows in its row and nowhere else");
    check(std::isnan(y[N + n]), "NaN comes through");
    check(!std::isfinite(y[2 * N + n]), "an infinity comes through");
  }
}

// Every code of FP8 times one, by each way of decoding it: few rows and many, of f32 and of bf16.
void test_every_code() {
  context = kernels().name + std::string(" every code");
  constexpr int64_t K = 128;
  Guarded blocks(256 * 132);
  float one = 1;
  for (int code = 0; code < 256; ++code) {
    uint8_t* b = blocks.data() + code * 132;
    std::memset(b, 0, 132);
    std::memcpy(b, &one, 4);
    b[4 + code * 37 % K] = static_cast<uint8_t>(code);  // among zeros, in every place
  }
  Weight weight{blocks.data(), WeightType::fp8, 1, 256, K, 0, 132, false};
  for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (int64_t rows : {1, 6, 20}) {
      Buffer x(dtype, rows * K), y(Dtype::f32, rows * 256);
      for (int64_t i = 0; i < rows * K; ++i) x.set(i, 1);
      std::vector<int32_t> offsets = {0, static_cast<int32_t>(rows)}, order;
      for (int64_t r = 0; r < rows; ++r) order.push_back(static_cast<int32_t>(r));
      grouped_linear(x.tensor(K), weight, {}, {indices(offsets), indices(order), {}}, false, false, y.output(256), 1);
      for (int64_t i = 0; i < rows * 256; ++i) {
        double want = e4m3(static_cast<uint8_t>(i % 256));
        check(std::isnan(want) ? std::isnan(y[i]) : y[i] == want, "a code is another number");
      }
    }
  }
}

}  // namespace

void test_blocks() {
  for (const Kind& kind : kKinds) {
    for (bool exact : {false, true}) {
      for (int64_t rows : {1, 2, 3, 4, 7, 64}) {
        test_product(kind, exact, Scales::usual, rows, 1, 1 + below(40), kind.size * (1 + below(3)));
      }
      test_product(kind, exact, Scales::usual, 5, 2, 130, kind.size * 10);
      test_product(kind, exact, Scales::subnormal, 5, 1, 17, 512);
      test_product(kind, exact, Scales::largest, 5, 1, 17, 512);
      test_product(kind, exact, Scales::usual, 0, 1, 9, 256);
      test_not_finite(kind, exact);
      test_batches(kind, exact);
      for (int64_t rows : {1, 2, 5, 17, 64}) {
        if (kind.fields.empty()) continue;
        test_interleaved(kind, exact, rows, 1 + below(2), 32 * (1 + below(6)), kind.size * (1 + below(3)));
      }
    }
    if (kind.type == WeightType::fp8) {
      for (int64_t rows : {1, 2, 3, 5, 6, 7, 64}) {
        test_product(kind, false, Scales::usual, rows, 1, 1 + below(40), 128 * (1 + below(20)), Dtype::bf16);
      }
      test_product(kind, false, Scales::subnormal, 5, 1, 17, 512, Dtype::bf16);
      test_product(kind, false, Scales::largest, 5, 1, 17, 512, Dtype::bf16);
      test_not_finite(kind, false, Dtype::bf16);
      test_batches(kind, false, Dtype::bf16);
      test_every_code();
    }
    for (int64_t rows : {1, 7, 100}) {
      test_transposed(kind, Scales::usual, rows, 1, 1 + below(140), kind.size * (1 + below(3)));
    }
    test_transposed(kind, Scales::usual, 5, 2, 9, kind.size * 10);
    test_transposed(kind, Scales::subnormal, 5, 1, 17, 512);
    test_transposed(kind, Scales::largest, 5, 1, 17, 512);
  }
}

}  // namespace moefuse::test
