#include "runtime/isa.h"

#include <atomic>
#include <stdexcept>

#ifdef MOEFUSE_X86
#include <cpuid.h>
#endif

namespace moefuse {

namespace portable {
extern const Kernels kKernels;
}
#ifdef MOEFUSE_X86
namespace avx2 {
extern const Kernels kKernels;
}
namespace avxvnni {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512vnni {
extern const Kernels kKernels;
}
namespace avx512bf16 {
extern const Kernels kKernels;
}
#endif

namespace {

std::vector<const Kernels*> find_available() {
  std::vector<const Kernels*> found;  // best first
#ifdef MOEFUSE_X86
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  // All that have bf16 have VBMI, too, but Cooper Lake.
  bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (has_bf16) found.push_back(&avx512bf16::kKernels);
  if (has_vnni) found.push_back(&avx512vnni::kKernels);
  if (has_avx512) found.push_back(&avx512::kKernels);
  if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&avxvnni::kKernels);
  if (has_avx2) found.push_back(&avx2::kKernels);
#endif
  found.push_back(&portable::kKernels);
  return found;
}

// AMD's processors before Zen 5 (family 1Ah): a Zen 4 core waits for what it fetches into L1, of which few lines may be
// on their way.
bool fetches_into_l2() {
#ifdef MOEFUSE_X86
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__builtin_cpu_is("amd") || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  unsigned family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
  return family < 0x1a;
#else
  return false;
#endif
}

const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> found = find_available();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const bool kFetchIntoL2 = fetches_into_l2();

const Kernels& kernels() {
  const Kernels* now = chosen.load(std::memory_order_relaxed);
  return now != nullptr ? *now : *available().front();
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* k : available()) names.emplace_back(k->name);
  return names;
}

void set_isa(const std::string& name) {
  std::string has;
  for (const Kernels* k : available()) {
    if (name == k->name) {
      chosen.store(k, std::memory_order_relaxed);
      return;
    }
    has += has.empty() ? "" : ", ";
    has += k->name;
  }
  throw std::invalid_argument("instruction set '" + name + "' cannot run here; this machine has: " + has);
}

}  // namespace moefuse
