// What a translated shader and the simulator's runtime know of each other. A shader includes no system header, so that
// Metal's names (uint, exp, min) are free; compiler builtins stand in for <cmath>.
#pragma once

namespace msl {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long;

constexpr u32 SIMD_WIDTH = 32;
constexpr u32 MAX_BUFFERS = 31;

struct Three {
  u32 x, y, z;
};

// Where the running thread stands: the values of the attributes of kernel parameters.
struct Place {
  Three thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Three threads_per_grid, threads_per_threadgroup, threadgroups_per_grid, dispatch_threads_per_threadgroup;
  u32 thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  u32 threads_per_simdgroup, simdgroups_per_threadgroup, thread_index_in_quadgroup, quadgroup_index_in_threadgroup;
};

#pragma GCC visibility push(default)
extern "C" {
extern Place msl_place;                   // of the thread that runs now
extern void* msl_bound[MAX_BUFFERS + 1];  // what [[buffer(i)]] points at
extern u64 msl_memory;                    // first address of the simulated GPU's memory
constexpr u64 MEMORY_SPAN = 1ul << 38;

[[noreturn]] void msl_fault(const char* kind, const char* text, int line);
void msl_threadgroup_barrier(u32 memory, int line);
void msl_simdgroup_barrier(u32 memory, int line);

// Every lane of the simdgroup brings `bytes`; the last one to come runs `finish` once, then each takes its slot home.
struct Lanes {
  alignas(16) u8 slot[SIMD_WIDTH][64];
  u32 count;  // lanes of this simdgroup: fewer than 32 in the last one of a ragged group
};
using Finish = void (*)(Lanes&);
Lanes& msl_exchange(const char* name, int line, const void* mine, u32 bytes, Finish finish);
// Executed by all lanes together, but nothing is exchanged: a lane that skips it is found at the next meeting.
void msl_together(const char* name, int line);

void msl_atomic_access(const void* address, u32 bytes, bool reads, bool writes, int line);
// One array of threadgroup memory: the same storage for every thread of the group that comes by its declaration.
void* msl_threadgroup_array(u32 site, const char* name, u64 bytes, u32 element, u32 granule, int line);
[[noreturn]] void msl_wrong_space(const volatile void* pointer, const char* name, int line);
}
#pragma GCC visibility pop

}  // namespace msl
