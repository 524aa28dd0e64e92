// The simulated GPU: schedules the threads of a group, and watches every access to memory. Shaders are compiled with
// -fsanitize=thread, and the __tsan_* functions that the compiler then calls at each access are the ones below.
#include "runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

using namespace msl;

#include "fibers.h"
#include "memory.h"

namespace {

enum Space : u8 { DEVICE, THREADGROUP };

struct Simdgroup {
  u32 first, size, arrived;
  u32 parity;           // the two sets of lanes take turns: a fast lane must not overwrite what a slow one reads
  Lanes lanes[2];
  Fiber* first_to_come;
  u32 barrier_time[2];  // last simdgroup_barrier, by Space
};

constexpr u32 MAX_THREADS = 1024;

Fiber fibers[MAX_THREADS];
Simdgroup simdgroups[MAX_THREADS / SIMD_WIDTH];
u32 group_threads, group_simdgroups, barrier_arrived;
Fiber* running;
Fiber* first_at_barrier;
void* scheduler_stack_pointer;
void (*entry)();

// Time moves on at every barrier and every threadgroup; what happened at one time is in no order.
u32 now = 1, dispatch_start, group_start;
u32 barrier_time[2];  // last threadgroup_barrier, by Space
std::vector<std::pair<u32, Three>> groups_begun;
Image own_image, shader_image;

struct Report {
  char kind[32];
  char text[1024];
  u64 program_counter;  // where the access is, if the line is not known
  int line;
};
Report report;
bool faulted;

void to_scheduler() { msl_switch(&running->stack_pointer, scheduler_stack_pointer); }

void fiber_main() {
  for (;;) {
    entry();
    running->state = GONE;
    to_scheduler();
  }
}

// `running` did what is said; the dispatch ends here.
void record(const char* kind, int line, u64 program_counter, const char* format, va_list arguments) {
  vsnprintf(report.text, sizeof report.text, format, arguments);
  snprintf(report.kind, sizeof report.kind, "%s", kind);
  report.line = line;
  report.program_counter = program_counter;
  msl_place = running->place;
  faulted = true;
}

[[noreturn]] void fault_at(const char* kind, int line, u64 program_counter, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(kind, line, program_counter, format, arguments);
  va_end(arguments);
  to_scheduler();  // the fiber is never resumed
  abort();
}

// The same from the scheduler, for a thread that waits or is gone.
void fault_of(Fiber& fiber, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  running = &fiber;
  record("divergence", fiber.line, 0, format, arguments);
  va_end(arguments);
}

Three group_at(u32 time) {
  Three found{};
  for (auto& [begun, group] : groups_begun)
    if (begun <= time) found = group;
  return found;
}

const char* plural(u64 n) { return n == 1 ? "" : "s"; }

[[noreturn]] void out_of_bounds(u64 address, u64 bytes, bool writes, u64 pc) {
  const char* verb = writes ? "writes" : "reads";
  if (!in_memory(address))
    fault_at("out of bounds", 0, pc, "%s %lu byte%s at an address outside every buffer, array and variable", verb, bytes,
             plural(bytes));
  // Which buffer was meant is not known; the nearest one most likely.
  u32 index = 0;
  u64 nearest = ~0ul;
  for (u32 i = 0; i < SLOTS; ++i) {
    if (!slots[i].element) continue;
    const u64 end = slots[i].start + slots[i].size;
    const u64 distance = address < slots[i].start ? slots[i].start - address : address - std::min(address, end);
    if (distance < nearest) nearest = distance, index = i;
  }
  Slot& slot = slots[index];
  long at = long(address) - long(slot.start);
  long element = at >= 0 ? at / long(slot.element) : -((-at + long(slot.element) - 1) / long(slot.element));
  fault_at("out of bounds", 0, pc, "%s %lu byte%s at %s[%ld], which has %lu element%s of %u byte%s", verb, bytes,
           plural(bytes), slot.name, element, slot.size / slot.element, plural(slot.size / slot.element), slot.element,
           plural(slot.element));
}

[[noreturn]] void race(const Slot& slot, u64 offset, const char* mine, const char* theirs, u32 thread, u32 time, bool many,
                       u64 pc, int line) {
  const u64 element = offset / slot.element;
  if (time < group_start) {
    Three group = group_at(time);
    fault_at("data race", line, pc, "%s %s[%lu], which thread %u of threadgroup (%u, %u, %u) %s in the same dispatch", mine,
             slot.name, element, thread, group.x, group.y, group.z, theirs);
  }
  fault_at("data race", line, pc, "%s %s[%lu], which thread %u%s %s with no barrier for this memory in between", mine,
           slot.name, element, thread, many ? " and others" : "", theirs);
}

// Whether an access of another thread at `time` may happen at once with one of this thread now.
inline bool unordered(u32 time, u32 thread, Space space) {
  if (time < dispatch_start) return false;
  if (time < group_start) return space == DEVICE;
  if (time < barrier_time[space]) return false;
  const u32 mine = running->place.simdgroup_index_in_threadgroup;
  return thread / SIMD_WIDTH != mine || time >= simdgroups[mine].barrier_time[space];
}

template <bool WRITES>
void shadowed(Slot& slot, Space space, u64 offset, u64 bytes, bool atomic, u64 pc, int line) {
  const u32 me = running->place.thread_index_in_threadgroup;
  const u64 last = (offset + bytes - 1) >> slot.granule_log2;
  for (u64 granule = offset >> slot.granule_log2; granule <= last; ++granule) {
    Cell& cell = slot.shadow[granule];
    const u64 at = granule << slot.granule_log2;
    if (!WRITES && space == THREADGROUP && cell.write_time < group_start)
      fault_at("uninitialised read", line, pc, "reads %s[%lu], which no thread of this threadgroup has written", slot.name,
               at / slot.element);
    const bool stranger = cell.writer != me || cell.write_time < group_start;
    if (stranger && !(atomic && cell.written_atomically) && unordered(cell.write_time, cell.writer, space))
      race(slot, at, WRITES ? "writes" : "reads", "wrote", cell.writer, cell.write_time, false, pc, line);
    if (WRITES) {
      const bool others = cell.reader != me || cell.read_by_lanes || cell.read_by_simdgroups || cell.read_time < group_start;
      const bool overlap = cell.read_by_simdgroups && cell.read_time >= group_start
                               ? cell.read_time >= barrier_time[space]
                               : unordered(cell.read_time, cell.reader, space);
      if (others && !(atomic && cell.read_atomically) && overlap)
        race(slot, at, "writes", "read", cell.reader, cell.read_time, cell.read_by_lanes || cell.read_by_simdgroups, pc,
             line);
      if (space == DEVICE && cell.read_by_groups && cell.read_time >= dispatch_start && !(atomic && cell.read_atomically))
        fault_at("data race", line, pc, "writes %s[%lu], which threads of other threadgroups read in the same dispatch",
                 slot.name, at / slot.element);
      cell.write_time = now;
      cell.writer = me;
      cell.written_atomically = atomic;
    } else {
      const bool known = cell.read_time >= dispatch_start;
      const bool earlier_group = known && cell.read_time < group_start;
      const bool at_once = known && !earlier_group && unordered(cell.read_time, cell.reader, space);
      cell.read_by_groups = known && (cell.read_by_groups || earlier_group);
      cell.read_atomically = atomic && (!(at_once || cell.read_by_groups) || cell.read_atomically);
      if (!at_once) cell.read_by_lanes = cell.read_by_simdgroups = false;
      if (at_once && cell.reader != me) {
        if (cell.reader / SIMD_WIDTH == me / SIMD_WIDTH)
          cell.read_by_lanes = true;
        else
          cell.read_by_simdgroups = true;
      }
      cell.read_time = now;
      cell.reader = me;
    }
  }
}

template <bool WRITES>
inline void touch(const void* pointer, u64 bytes, bool atomic, u64 pc, int line = 0) {
  const u64 address = reinterpret_cast<u64>(pointer);
  if (in_memory(address)) {
    const u32 index = slot_of(address);
    Slot& slot = slots[index];
    const u64 offset = address - slot.start;
    if (offset >= slot.size || slot.size - offset < bytes) out_of_bounds(address, bytes, WRITES, pc);
    if (slot.shadow)
      shadowed<WRITES>(slot, index < FIRST_GROUP_SLOT ? DEVICE : THREADGROUP, offset, bytes, atomic, pc, line);
    return;
  }
  if (!running) return;  // the library is being loaded
  // A variable of the thread itself, or a constant of the program.
  if (address - reinterpret_cast<u64>(running->stack) < STACK) return;
  if (own_image.holds(address) || (!WRITES && shader_image.holds(address))) return;
  out_of_bounds(address, bytes, WRITES, pc);
}

void wait(State state, const char* what, int line) {
  running->state = state;
  running->what = what;
  running->line = line;
  to_scheduler();
}

void check_same_place(const Fiber& other, const char* what, int line) {
  if (other.line != line || strcmp(other.what, what) != 0)
    fault_at("divergence", line, 0, "is at %s in line %d while thread %u is at %s in line %d", what, line,
             other.place.thread_index_in_threadgroup, other.what, other.line);
}

// A lane that took part in other calls than lane 0 among those that do not wait, or null.
Fiber* parted(const Simdgroup& simdgroup) {
  for (u32 i = simdgroup.first + 1; i < simdgroup.first + simdgroup.size; ++i)
    if (fibers[i].trail != fibers[simdgroup.first].trail) return &fibers[i];
  return nullptr;
}

const char* const PARTED = "skipped, or did alone, a simdgroup_load, _store or make_filled call of its simdgroup";

void check_together(const Simdgroup& simdgroup, int line) {
  if (Fiber* other = parted(simdgroup)) {
    running = other;
    fault_at("divergence", line, 0, PARTED);
  }
}

// After a round in which nobody could go on: some wait for threads that are elsewhere, or gone.
void explain_deadlock() {
  for (u32 i = 0; i < group_threads; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.state == GONE) continue;
    const bool collective = fiber.state == AT_COLLECTIVE;
    const Simdgroup& simdgroup = simdgroups[i / SIMD_WIDTH];
    const u32 first = collective ? simdgroup.first : 0, count = collective ? simdgroup.size : group_threads;
    for (u32 other = first; other < first + count; ++other) {
      const Fiber& elsewhere = fibers[other];
      if (elsewhere.state == fiber.state) continue;
      if (elsewhere.state == GONE)
        return fault_of(fiber, "waits at %s in line %d for thread %u, which has left the kernel", fiber.what, fiber.line,
                        other);
      return fault_of(fiber, "waits at %s in line %d for thread %u, which is at %s in line %d", fiber.what, fiber.line,
                      other, elsewhere.what, elsewhere.line);
    }
  }
}

// Runs all threads that can run, simdgroup by simdgroup, until none is left. The orders are permutations.
void run_group(const u16* simdgroup_order, const u16* lane_order) {
  for (;;) {
    bool progress = false, waiting = false;
    for (u32 s = 0; s < group_simdgroups; ++s) {
      const Simdgroup& simdgroup = simdgroups[simdgroup_order[s]];
      for (bool again = true; again;) {
        again = false;
        for (u32 lane = 0; lane < SIMD_WIDTH; ++lane) {
          if (lane_order[lane] >= simdgroup.size) continue;
          Fiber& fiber = fibers[simdgroup.first + lane_order[lane]];
          if (fiber.state != READY) continue;
          again = progress = true;
          running = &fiber;
          msl_place = fiber.place;
          msl_switch(&scheduler_stack_pointer, fiber.stack_pointer);
          if (faulted) return;
        }
      }
    }
    for (u32 i = 0; i < group_threads; ++i) waiting |= fibers[i].state != GONE;
    if (!waiting) break;
    if (!progress) return explain_deadlock();
  }
  for (u32 s = 0; s < group_simdgroups; ++s)
    if (Fiber* other = parted(simdgroups[s])) {
      other->line = 0;
      return fault_of(*other, PARTED);
    }
}

u32 ceil_divide(u32 a, u32 b) { return (a + b - 1) / b; }

// The threads of the group at `group`, narrower at the edge of the grid.
void begin_group(Three group, Three threads, Three size, Three count) {
  group_start = ++now;
  groups_begun.push_back({group_start, group});
  barrier_time[DEVICE] = barrier_time[THREADGROUP] = group_start;
  barrier_arrived = 0;
  for (u32 i = FIRST_GROUP_SLOT; i < SLOTS; ++i) release(i);
  const Three here{std::min(size.x, threads.x - group.x * size.x), std::min(size.y, threads.y - group.y * size.y),
                   std::min(size.z, threads.z - group.z * size.z)};
  group_threads = here.x * here.y * here.z;
  group_simdgroups = ceil_divide(group_threads, SIMD_WIDTH);
  for (u32 s = 0; s < group_simdgroups; ++s) {
    Simdgroup& simdgroup = simdgroups[s];
    simdgroup.first = s * SIMD_WIDTH;
    simdgroup.size = std::min(SIMD_WIDTH, group_threads - simdgroup.first);
    simdgroup.arrived = simdgroup.parity = 0;
    simdgroup.barrier_time[DEVICE] = simdgroup.barrier_time[THREADGROUP] = group_start;
  }
  for (u32 i = 0; i < group_threads; ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) prepare(fiber, fiber_main);
    fiber.state = READY;
    fiber.trail = 0;
    const Three at{i % here.x, i / here.x % here.y, i / (here.x * here.y)};
    Place& place = fiber.place;
    place.thread_position_in_threadgroup = at;
    place.threadgroup_position_in_grid = group;
    place.thread_position_in_grid = {group.x * size.x + at.x, group.y * size.y + at.y, group.z * size.z + at.z};
    place.threads_per_grid = threads;
    place.threads_per_threadgroup = here;
    place.dispatch_threads_per_threadgroup = size;
    place.threadgroups_per_grid = count;
    place.thread_index_in_threadgroup = i;
    place.thread_index_in_simdgroup = i % SIMD_WIDTH;
    place.simdgroup_index_in_threadgroup = i / SIMD_WIDTH;
    place.threads_per_simdgroup = SIMD_WIDTH;
    place.simdgroups_per_threadgroup = group_simdgroups;
    place.thread_index_in_quadgroup = i % 4;
    place.quadgroup_index_in_threadgroup = i / 4;
  }
}

struct BufferArgument {
  void* host;
  u64 bytes;           // of the view
  u64 storage_offset;  // in bytes: how the view is aligned on a GPU, where storages are
  u32 element;
  u32 writable;
  const char* name;
};

struct Launch {
  void (*entry)();
  Three threads, group_size;
  u64 seed;  // 0: threads run in order
  u32 buffers;
  BufferArgument* buffer;
};

// What a slot holds of the host's memory: a buffer, or several that overlap, so that a race through two names is a race.
struct Region {
  u8* host;
  u64 bytes, lead;
  u32 element, granule;
  bool writable;
  const char* name;
};

// Copies every buffer into its slot, and says where it came to lie.
std::vector<Region> bind_buffers(const Launch& launch) {
  std::vector<u32> by_address(launch.buffers);
  for (u32 i = 0; i < launch.buffers; ++i) by_address[i] = i;
  // Empty ones first: they lie nowhere, and must not part two that overlap.
  std::sort(by_address.begin(), by_address.end(), [&](u32 a, u32 b) {
    const BufferArgument &x = launch.buffer[a], &y = launch.buffer[b];
    return std::make_pair(x.bytes != 0, x.host) < std::make_pair(y.bytes != 0, y.host);
  });
  std::vector<Region> regions;
  std::vector<std::pair<u32, u64>> placed(launch.buffers);  // region and offset of each buffer
  for (u32 i : by_address) {
    const BufferArgument& argument = launch.buffer[i];
    u8* host = static_cast<u8*>(argument.host);
    if (regions.empty() || regions.back().bytes == 0 || host >= regions.back().host + regions.back().bytes)
      regions.push_back({host, 0, argument.storage_offset % 256, argument.element, argument.element, false, argument.name});
    Region& region = regions.back();
    const u64 offset = argument.bytes ? host - region.host : 0;
    region.bytes = std::max(region.bytes, offset + argument.bytes);
    region.granule = std::min(region.granule, argument.element);
    region.writable |= argument.writable != 0;
    placed[i] = {regions.size() - 1, offset};
  }
  for (u32 r = 0; r < regions.size(); ++r) {
    const Region& region = regions[r];
    void* memory = take(r, region.lead, region.bytes, region.element, region.name);
    if (region.bytes) memcpy(memory, region.host, region.bytes);
    if (region.writable) watch(slots[r], region.granule);
  }
  for (u32 i = 0; i < launch.buffers; ++i)
    msl_bound[i] = reinterpret_cast<void*>(slots[placed[i].first].start + placed[i].second);
  return regions;
}

}  // namespace

#pragma GCC visibility push(default)
namespace msl {
extern "C" {

Place msl_place;
void* msl_bound[MAX_BUFFERS + 1];
u64 msl_memory;

void msl_fault(const char* kind, const char* text, int line) { fault_at(kind, line, 0, "%s", text); }

void msl_threadgroup_barrier(u32 memory, int line) {
  if (barrier_arrived == 0) first_at_barrier = running;
  if (barrier_arrived) check_same_place(*first_at_barrier, "threadgroup_barrier", line);
  if (++barrier_arrived < group_threads) return wait(AT_BARRIER, "threadgroup_barrier", line);
  barrier_arrived = 0;
  for (u32 s = 0; s < group_simdgroups; ++s) check_together(simdgroups[s], line);
  ++now;
  for (u32 space = 0; space < 2; ++space)
    if (memory >> space & 1) barrier_time[space] = now;
  for (u32 i = 0; i < group_threads; ++i)
    if (fibers[i].state == AT_BARRIER) fibers[i].state = READY;
}

Lanes& msl_exchange(const char* name, int line, const void* mine, u32 bytes, Finish finish) {
  Simdgroup& simdgroup = simdgroups[running->place.simdgroup_index_in_threadgroup];
  Lanes& lanes = simdgroup.lanes[simdgroup.parity];
  if (simdgroup.arrived == 0) simdgroup.first_to_come = running;
  if (simdgroup.arrived) check_same_place(*simdgroup.first_to_come, name, line);
  memcpy(lanes.slot[running->place.thread_index_in_simdgroup], mine, bytes);
  if (++simdgroup.arrived < simdgroup.size) {
    wait(AT_COLLECTIVE, name, line);
    return lanes;
  }
  check_together(simdgroup, line);
  simdgroup.arrived = 0;
  simdgroup.parity ^= 1;
  lanes.count = simdgroup.size;
  if (finish) finish(lanes);
  for (u32 i = simdgroup.first; i < simdgroup.first + simdgroup.size; ++i)
    if (fibers[i].state == AT_COLLECTIVE) fibers[i].state = READY;
  return lanes;
}

void msl_simdgroup_barrier(u32 memory, int line) {
  // Time must move when the last lane comes, before any goes on.
  msl_exchange("simdgroup_barrier", line, &memory, sizeof memory, [](Lanes& lanes) {
    u32 flags;
    memcpy(&flags, lanes.slot[0], sizeof flags);
    ++now;
    Simdgroup& simdgroup = simdgroups[running->place.simdgroup_index_in_threadgroup];
    for (u32 space = 0; space < 2; ++space)
      if (flags >> space & 1) simdgroup.barrier_time[space] = now;
  });
}

void msl_together(const char*, int line) { running->trail = running->trail * 31 + line; }

void msl_atomic_access(const void* address, u32 bytes, bool reads, bool writes, int line) {
  if (reads) touch<false>(address, bytes, true, 0, line);
  if (writes) touch<true>(address, bytes, true, 0, line);
}

void* msl_threadgroup_array(u32 site, const char* name, u64 bytes, u32 element, u32 granule, int line) {
  const u32 index = FIRST_GROUP_SLOT + site;
  if (index >= SLOTS) fault_at("threadgroup memory", line, 0, "declares more than %u arrays", SLOTS - FIRST_GROUP_SLOT);
  Slot& slot = slots[index];
  if (!slot.element) {                                       // the first thread of the group to come by
    memset(take(index, 0, bytes, element, name), 0xff, bytes);  // a NaN in every type
    watch(slot, granule);
  }
  return reinterpret_cast<void*>(slot.start);
}

void msl_wrong_space(const volatile void* pointer, const char* name, int line) {
  const u64 address = reinterpret_cast<u64>(pointer);
  const bool group = in_memory(address) && slot_of(address) >= FIRST_GROUP_SLOT;
  fault_at("address space", line, 0, "gets %s, a pointer to %s memory, where another address space is declared", name,
           group ? "threadgroup" : in_memory(address) ? "device or constant" : "thread");
}

// What the compiler calls. It passes the address; where the access is in the source, its return address tells.
#define MSL_PC reinterpret_cast<u64>(__builtin_return_address(0)) - 1
#define MSL_HOOKS(BYTES)                                                                       \
  void __tsan_read##BYTES(void* p) { touch<false>(p, BYTES, false, MSL_PC); }                  \
  void __tsan_write##BYTES(void* p) { touch<true>(p, BYTES, false, MSL_PC); }                  \
  void __tsan_unaligned_read##BYTES(void* p) { touch<false>(p, BYTES, false, MSL_PC); }        \
  void __tsan_unaligned_write##BYTES(void* p) { touch<true>(p, BYTES, false, MSL_PC); }        \
  void __tsan_volatile_read##BYTES(void* p) { touch<false>(p, BYTES, false, MSL_PC); }         \
  void __tsan_volatile_write##BYTES(void* p) { touch<true>(p, BYTES, false, MSL_PC); }
MSL_HOOKS(1)
MSL_HOOKS(2)
MSL_HOOKS(4)
MSL_HOOKS(8)
MSL_HOOKS(16)
void __tsan_read_range(void* p, u64 bytes) { touch<false>(p, bytes, false, MSL_PC); }
void __tsan_write_range(void* p, u64 bytes) { touch<true>(p, bytes, false, MSL_PC); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// The undefined behaviour sanitizer's, for arrays of the thread itself, alignment and division. Their first argument
// begins with the place in the source.
struct SourceLocation {
  const char* file;
  u32 line, column;
};
struct TypeDescriptor {
  u16 kind, info;
  char name[1];
};
struct Mismatch {
  SourceLocation location;
  TypeDescriptor* type;
  u8 log2_alignment, kind;
};
struct OutOfBounds {
  SourceLocation location;
  TypeDescriptor* array;
  TypeDescriptor* index;
};
void __ubsan_handle_type_mismatch_v1_abort(Mismatch* data, u64 pointer) {
  if (!pointer) fault_at("out of bounds", data->location.line, 0, "follows a null pointer");
  const char* name = "an address";
  u64 at = pointer;
  if (in_memory(pointer)) {
    Slot& slot = slots[slot_of(pointer)];
    name = slot.name;
    at = pointer - slot.start;
  }
  fault_at("misaligned", data->location.line, 0, "takes %s at byte %lu of %s, which is no multiple of %u", data->type->name,
           at, name, 1u << data->log2_alignment);
}
void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, u64 index) {
  fault_at("out of bounds", data->location.line, 0, "indexes %s with %ld", data->array->name, long(index));
}
void __ubsan_handle_divrem_overflow_abort(SourceLocation* location, u64, u64) {
  fault_at("division", location->line, 0, "divides an integer by zero, or the least one by -1");
}

// Runs every group. Returns 0, or 1 with the fault in msl_report.
int msl_run(const Launch* launch) {
  if (!msl_memory) reserve_memory();
  own_image = image_of(reinterpret_cast<void*>(msl_run));
  shader_image = image_of(reinterpret_cast<void*>(launch->entry));
  // Long before times would wrap, forget them.
  if (now > 1u << 30) {
    for (Slot& slot : slots) std::fill(slot.cells.begin(), slot.cells.end(), Cell{});
    now = 1;
  }
  const std::vector<Region> regions = bind_buffers(*launch);
  dispatch_start = ++now;
  groups_begun.clear();
  entry = launch->entry;
  faulted = false;

  const Three threads = launch->threads, size = launch->group_size;
  const Three count{ceil_divide(threads.x, size.x), ceil_divide(threads.y, size.y), ceil_divide(threads.z, size.z)};
  std::mt19937_64 random(launch->seed);
  std::vector<u32> groups(u64(count.x) * count.y * count.z);
  u16 simdgroup_order[MAX_THREADS / SIMD_WIDTH], lane_order[SIMD_WIDTH];
  for (u64 i = 0; i < groups.size(); ++i) groups[i] = i;
  for (u32 i = 0; i < SIMD_WIDTH; ++i) lane_order[i] = i;
  if (launch->seed) std::shuffle(groups.begin(), groups.end(), random);
  for (const u32 group : groups) {
    begin_group({group % count.x, group / count.x % count.y, group / count.x / count.y}, threads, size, count);
    for (u32 i = 0; i < group_simdgroups; ++i) simdgroup_order[i] = i;
    if (launch->seed) {
      std::shuffle(simdgroup_order, simdgroup_order + group_simdgroups, random);
      std::shuffle(lane_order, lane_order + SIMD_WIDTH, random);
    }
    run_group(simdgroup_order, lane_order);
    if (faulted) break;
  }
  running = nullptr;
  if (faulted)
    for (Fiber& fiber : fibers)
      if (fiber.stack) prepare(fiber, fiber_main);
  for (u32 r = 0; r < regions.size(); ++r) {
    if (regions[r].writable && regions[r].bytes)
      memcpy(regions[r].host, reinterpret_cast<void*>(slots[r].start), regions[r].bytes);
    release(r);
  }
  return faulted;
}

const Report* msl_report() { return &report; }
u64 msl_image() { return shader_image.first; }
}
}  // namespace msl
#pragma GCC visibility pop
