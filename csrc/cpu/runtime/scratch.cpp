#include "runtime/scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace moefuse {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kKeep = int64_t{256} << 20;

struct Buffer {
  char* data = nullptr;
  int64_t size = 0;

  ~Buffer() { release(); }

  void release() {
    std::free(data);
    data = nullptr;
    size = 0;
  }

  void reserve(int64_t bytes) {
    if (bytes <= size) return;
    release();
    // A quarter more, so that slowly growing batches do not allocate each time.
    bytes += bytes / 4;
    int64_t unit = bytes >= kHugePage ? kHugePage : 4096;
    bytes = (bytes + unit - 1) / unit * unit;
    data = static_cast<char*>(std::aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(bytes)));
    if (data == nullptr) throw std::bad_alloc();
    size = bytes;
#ifdef MADV_HUGEPAGE
    if (unit == kHugePage) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
  }
};

thread_local Buffer buffers[static_cast<int>(Slot::count)];

}  // namespace

char* scratch(Slot slot, int64_t bytes) {
  Buffer& buffer = buffers[static_cast<int>(slot)];
  buffer.reserve(bytes > 0 ? bytes : 1);
  return buffer.data;
}

void trim_scratch() {
  for (Buffer& buffer : buffers) {
    if (buffer.size > kKeep) buffer.release();
  }
}

}  // namespace moefuse
