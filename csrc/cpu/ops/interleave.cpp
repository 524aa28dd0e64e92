// interleave: rows of blocks in turns, as moefuse.quant.arrange has them, or back in the file's order.
//
// Tasks: strips of kStripRows rows. A field's words are of 4 bytes; a shorter field is one word.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "ops/rows.h"
#include "runtime/pool.h"

namespace moefuse {
namespace {

template <int Size>
void copy_words(const char* from, int64_t from_row, int64_t from_word, char* to, int64_t to_row, int64_t to_word,
                int64_t words) {
  for (int64_t w = 0; w < words; ++w, from += from_word, to += to_word) {
    for (int64_t l = 0; l < kStripRows; ++l) std::memcpy(to + l * to_row, from + l * from_row, Size);
  }
}

// Memory that nothing was written to yet. Weights are read from one end to the other: Q4_K at T=1 took 850 us with pages
// of 4 KiB and 650 with these, on two Zen 4 cores.
void ask_for_huge_pages(const void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

void interleave(const Weight& from, const Weight& to, Indices fields, int threads) {
  int64_t block_bytes = fields[fields.size - 1], row_bytes = from.stride_n;
  int64_t strips = from.N / kStripRows, blocks = row_bytes / block_bytes;
  if (to.interleaved) ask_for_huge_pages(to.data, to.E * to.N * row_bytes);
  auto run = [&](int64_t task, int64_t, int) {
    int64_t expert = task / strips, row = task % strips * kStripRows;
    const char* source = row_of(from, expert, row);
    char* target = const_cast<char*>(row_of(to, expert, row));
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t f = 0; f + 1 < fields.size; ++f) {
        int64_t at = b * block_bytes + fields[f], bytes = fields[f + 1] - fields[f], word = std::min<int64_t>(4, bytes);
        auto copy = word == 4 ? copy_words<4> : word == 2 ? copy_words<2> : copy_words<1>;
        if (to.interleaved) {
          copy(source + at, row_bytes, word, target + at * kStripRows, word, word * kStripRows, bytes / word);
        } else {
          copy(source + at * kStripRows, word, word * kStripRows, target + at, row_bytes, word, bytes / word);
        }
      }
    }
  };
  run_phases({{from.E * strips, run}}, worth(threads, from.E * from.N * row_bytes));
}

}  // namespace moefuse
