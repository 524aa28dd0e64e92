// The simulated GPU: fibers for the threads of a group, memory with guards around every buffer, and a shadow of that
// memory which remembers who touched what since which barrier. Shaders are compiled with -fsanitize=thread, and the
// __tsan_* functions that the compiler then calls at every access to memory are the ones below.
#include "runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

using namespace msl;

namespace {

// -- Memory: 64 slots of 4 GiB of address space, one buffer or threadgroup array each; what is not in use is fenced off.
constexpr u64 SLOT_SPAN = 1ul << 32;
constexpr u32 SLOTS = MEMORY_SPAN / SLOT_SPAN;
constexpr u32 FIRST_GROUP_SLOT = 32;
constexpr u64 PAGE = 4096;
constexpr u64 KEEP = 1ul << 24;  // pages beyond this go back to the system after a dispatch

enum Space : u8 { DEVICE, THREADGROUP };

// Who last wrote and read a granule, at which time. Time moves on at every barrier and every threadgroup.
struct Cell {
  u32 write_time, read_time;
  u16 writer, reader;
  bool written_atomically, read_atomically;
  bool read_by_lanes, read_by_simdgroups, read_by_groups;  // more readers than one can name
};

struct Slot {
  u64 start = 0, size = 0;  // of the usable bytes
  u64 committed = 0;        // of address space that has memory
  Cell* shadow = nullptr;   // null where nothing is written: then nothing can race
  u32 granule_log2 = 0;
  u32 element = 0;          // bytes of one; 0: not in use
  const char* name = "";
  std::vector<Cell> cells;
};

Slot slots[SLOTS];

bool in_memory(u64 address) { return address - msl_memory < MEMORY_SPAN; }

u64 slot_base(u32 index) { return msl_memory + index * SLOT_SPAN; }

void commit(u32 index, u64 bytes) {
  Slot& slot = slots[index];
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  if (bytes <= slot.committed) return;
  if (mprotect(reinterpret_cast<void*>(slot_base(index)), bytes, PROT_READ | PROT_WRITE) != 0) abort();
  slot.committed = bytes;
}

void watch(Slot& slot, u32 granule) {
  slot.granule_log2 = granule >= 4 ? 2 : granule >= 2 ? 1 : 0;
  slot.cells.resize(std::max<u64>(slot.cells.size(), (slot.size >> slot.granule_log2) + 1));
  slot.shadow = slot.cells.data();
}

// -- Threads.
enum State : u8 { READY, AT_COLLECTIVE, AT_BARRIER, GONE };

struct Fiber {
  void* stack_pointer;
  u8* stack;
  Place place;
  State state;
  int line;          // where it waits
  const char* what;  // what it waits for
  u32 trail;         // hash of the collectives it took part in without waiting
};

struct Simdgroup {
  u32 first, size, arrived;
  u32 parity;                // the two sets of lanes take turns: a fast lane must not overwrite what a slow one reads
  Lanes lanes[2];
  u32 barrier_time[2];       // last simdgroup_barrier, by Space
};

constexpr u64 STACK = 1ul << 18;
constexpr u32 MAX_THREADS = 1024;

Fiber fibers[MAX_THREADS];
Simdgroup simdgroups[MAX_THREADS / SIMD_WIDTH];
u32 group_threads, group_simdgroups, barrier_arrived;
Fiber* running;
void* scheduler_stack_pointer;
void (*entry)();

// -- Time.
u32 now = 1, dispatch_start, group_start;
u32 barrier_time[2];  // last threadgroup_barrier, by Space
std::vector<std::pair<u32, Three>> groups_begun;

// -- Faults.
struct Report {
  char kind[32];
  char text[1024];
  u64 program_counter;
  int line;
};
Report report;
bool faulted;
// Where a library lies in memory: a shader's has its constants, our own the lanes that threads meet in.
struct Image {
  u64 first = 0, last = 0;
  bool holds(u64 address) const { return address >= first && address < last; }
};
Image own_image, shader_image;

Image image_of(void* symbol) {
  Image found;
  Dl_info info;
  if (!dladdr(symbol, &info)) return found;
  found.first = reinterpret_cast<u64>(info.dli_fbase);
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* data) {
        Image& image = *static_cast<Image*>(data);
        if (library->dlpi_addr != image.first) return 0;
        for (int i = 0; i < library->dlpi_phnum; ++i)
          if (library->dlpi_phdr[i].p_type == PT_LOAD)
            image.last = std::max<u64>(
                image.last, image.first + library->dlpi_phdr[i].p_vaddr + library->dlpi_phdr[i].p_memsz);
        return 1;
      },
      &found);
  return found;
}


extern "C" void msl_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch,.-msl_switch
)");
constexpr u32 SAVED = 6;  // registers below the return address
#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch
.type msl_switch,%function
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp d8, d9, [sp, #80]
  stp d10, d11, [sp, #96]
  stp d12, d13, [sp, #112]
  stp d14, d15, [sp, #128]
  stp x29, x30, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp d8, d9, [sp, #80]
  ldp d10, d11, [sp, #96]
  ldp d12, d13, [sp, #112]
  ldp d14, d15, [sp, #128]
  ldp x29, x30, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch,.-msl_switch
)");
constexpr u32 SAVED = 19;
#else
#error "the simulator switches between fibers on x86-64 and arm64 only"
#endif

void to_scheduler() { msl_switch(&running->stack_pointer, scheduler_stack_pointer); }

void fiber_main() {
  for (;;) {
    entry();
    running->state = GONE;
    to_scheduler();
  }
}

void prepare(Fiber& fiber) {
  void** top = reinterpret_cast<void**>(fiber.stack + STACK - 64);
#if defined(__x86_64__)
  *--top = nullptr;  // keeps the stack aligned as a call would
  *--top = reinterpret_cast<void*>(fiber_main);
  top -= SAVED;
#else
  top -= SAVED + 1;
  top[SAVED] = reinterpret_cast<void*>(fiber_main);
#endif
  fiber.stack_pointer = top;
}

[[noreturn]] void fault_at(const char* kind, int line, u64 program_counter, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(report.text, sizeof report.text, format, arguments);
  va_end(arguments);
  snprintf(report.kind, sizeof report.kind, "%s", kind);
  report.line = line;
  report.program_counter = program_counter;
  faulted = true;
  to_scheduler();  // the fiber is never resumed
  abort();
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
    const u32 index = (address - msl_memory) / SLOT_SPAN;
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

void check_same_trail(const Simdgroup& simdgroup, int line) {
  const u32 first = fibers[simdgroup.first].trail;
  for (u32 lane = 1; lane < simdgroup.size; ++lane)
    if (fibers[simdgroup.first + lane].trail != first)
      fault_at("divergence", line, 0,
               "threads %u and %u of one simdgroup did not take part in the same simdgroup_load, _store or make_filled calls",
               simdgroup.first, simdgroup.first + lane);
}

void wait(State state, const char* what, int line) {
  running->state = state;
  running->what = what;
  running->line = line;
  to_scheduler();
}

[[noreturn]] void diverged(const Fiber& other, const char* what, int line) {
  fault_at("divergence", line, 0, "is at %s in line %d while thread %u is at %s in line %d", what, line,
           other.place.thread_index_in_threadgroup, other.what, other.line);
}

// After a round in which nobody could go on: some wait for threads that are elsewhere, or gone.
void explain_deadlock() {
  for (u32 i = 0; i < group_threads; ++i) {
    if (fibers[i].state != AT_COLLECTIVE && fibers[i].state != AT_BARRIER) continue;
    const bool alone = fibers[i].state == AT_COLLECTIVE;
    const Simdgroup& simdgroup = simdgroups[i / SIMD_WIDTH];
    const u32 first = alone ? simdgroup.first : 0, count = alone ? simdgroup.size : group_threads;
    for (u32 other = first; other < first + count; ++other) {
      const Fiber& elsewhere = fibers[other];
      if (elsewhere.state == fibers[i].state) continue;
      running = &fibers[i];
      msl_place = running->place;
      snprintf(report.kind, sizeof report.kind, "divergence");
      report.line = fibers[i].line;
      report.program_counter = 0;
      if (elsewhere.state == GONE)
        snprintf(report.text, sizeof report.text, "waits at %s in line %d for thread %u, which has left the kernel",
                 fibers[i].what, fibers[i].line, other);
      else
        snprintf(report.text, sizeof report.text, "waits at %s in line %d for thread %u, which is at %s in line %d",
                 fibers[i].what, fibers[i].line, other, elsewhere.what, elsewhere.line);
      faulted = true;
      return;
    }
  }
}

void run_group(std::mt19937_64* shuffle) {
  static u16 order[MAX_THREADS];
  for (u32 i = 0; i < group_threads; ++i) order[i] = i;
  // Simdgroups in any order, lanes in any order inside them.
  static u16 groups_order[MAX_THREADS / SIMD_WIDTH];
  for (u32 s = 0; s < group_simdgroups; ++s) groups_order[s] = s;
  if (shuffle) {
    std::shuffle(groups_order, groups_order + group_simdgroups, *shuffle);
    for (u32 s = 0; s < group_simdgroups; ++s)
      std::shuffle(order + simdgroups[s].first, order + simdgroups[s].first + simdgroups[s].size, *shuffle);
  }
  for (;;) {
    bool progress = false, waiting = false;
    for (u32 s = 0; s < group_simdgroups; ++s) {
      const Simdgroup& simdgroup = simdgroups[groups_order[s]];
      for (bool again = true; again;) {
        again = false;
        for (u32 lane = 0; lane < simdgroup.size; ++lane) {
          Fiber& fiber = fibers[order[simdgroup.first + lane]];
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
    if (!waiting) {
      for (u32 s = 0; s < group_simdgroups; ++s)
        for (u32 lane = 1; lane < simdgroups[s].size; ++lane)
          if (fibers[simdgroups[s].first + lane].trail != fibers[simdgroups[s].first].trail) {
            running = &fibers[simdgroups[s].first + lane];
            snprintf(report.kind, sizeof report.kind, "divergence");
            snprintf(report.text, sizeof report.text,
                     "and thread %u of one simdgroup did not take part in the same simdgroup_load, _store or make_filled "
                     "calls", simdgroups[s].first);
            report.line = 0;
            report.program_counter = 0;
            faulted = true;
            return;
          }
      return;
    }
    if (!progress) return explain_deadlock();
  }
}

u32 ceil_divide(u32 a, u32 b) { return (a + b - 1) / b; }

// The threads of the group at `group`, narrower at the edge of the grid.
void begin_group(Three group, Three threads, Three size, Three count) {
  group_start = ++now;
  groups_begun.push_back({group_start, group});
  barrier_time[DEVICE] = barrier_time[THREADGROUP] = group_start;
  barrier_arrived = 0;
  for (u32 i = FIRST_GROUP_SLOT; i < SLOTS; ++i) slots[i].size = slots[i].element = 0;
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
    if (!fiber.stack) {
      fiber.stack = static_cast<u8*>(
          mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (fiber.stack == MAP_FAILED) abort();
      prepare(fiber);
    }
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

void start_up() {
  void* reserved = mmap(nullptr, MEMORY_SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) abort();
  msl_memory = reinterpret_cast<u64>(reserved);
}

}  // namespace

namespace msl {
extern "C" {

Place msl_place;
void* msl_bound[MAX_BUFFERS + 1];
u64 msl_memory;

void msl_fault(const char* kind, const char* text, int line) { fault_at(kind, line, 0, "%s", text); }

void msl_threadgroup_barrier(u32 memory, int line) {
  for (u32 i = 0; barrier_arrived && i < group_threads; ++i)
    if (fibers[i].state == AT_BARRIER && fibers[i].line != line) diverged(fibers[i], "threadgroup_barrier", line);
  if (++barrier_arrived < group_threads) return wait(AT_BARRIER, "threadgroup_barrier", line);
  barrier_arrived = 0;
  for (u32 s = 0; s < group_simdgroups; ++s) check_same_trail(simdgroups[s], line);
  ++now;
  for (u32 space = 0; space < 2; ++space)
    if (memory >> space & 1) barrier_time[space] = now;
  for (u32 i = 0; i < group_threads; ++i)
    if (fibers[i].state == AT_BARRIER) fibers[i].state = READY;
}

Lanes& msl_exchange(const char* name, int line, const void* mine, u32 bytes, Finish finish) {
  Simdgroup& simdgroup = simdgroups[running->place.simdgroup_index_in_threadgroup];
  Lanes& lanes = simdgroup.lanes[simdgroup.parity];
  if (simdgroup.arrived)
    for (u32 lane = 0; lane < simdgroup.size; ++lane) {
      const Fiber& other = fibers[simdgroup.first + lane];
      if (other.state != AT_COLLECTIVE) continue;
      if (other.line != line || strcmp(other.what, name) != 0) diverged(other, name, line);
      break;
    }
  memcpy(lanes.slot[running->place.thread_index_in_simdgroup], mine, bytes);
  if (++simdgroup.arrived < simdgroup.size) {
    wait(AT_COLLECTIVE, name, line);
    return lanes;
  }
  check_same_trail(simdgroup, line);
  simdgroup.arrived = 0;
  simdgroup.parity ^= 1;
  lanes.count = simdgroup.size;
  if (finish) finish(lanes);
  for (u32 lane = 0; lane < simdgroup.size; ++lane)
    if (fibers[simdgroup.first + lane].state == AT_COLLECTIVE) fibers[simdgroup.first + lane].state = READY;
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
  if (!slot.element) {  // the first thread of the group to come by
    commit(index, PAGE + bytes);
    slot.start = slot_base(index) + PAGE;
    slot.size = bytes;
    slot.element = element;
    slot.name = name;
    memset(reinterpret_cast<void*>(slot.start), 0xff, bytes);  // a NaN in every type
    watch(slot, granule);
  }
  return reinterpret_cast<void*>(slot.start);
}

void msl_wrong_space(const volatile void* pointer, const char* name, int line) {
  const u64 address = reinterpret_cast<u64>(pointer);
  const bool group = in_memory(address) && (address - msl_memory) / SLOT_SPAN >= FIRST_GROUP_SLOT;
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
    Slot& slot = slots[(pointer - msl_memory) / SLOT_SPAN];
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

// Runs every group. Returns 0, or 1 with the fault in msl_report.
int msl_run(const Launch* launch) {
  if (!msl_memory) start_up();
  own_image = image_of(reinterpret_cast<void*>(msl_run));
  shader_image = image_of(reinterpret_cast<void*>(launch->entry));
  // Times in the shadow outlive a dispatch; long before they would wrap, forget them.
  if (now > 1u << 30) {
    for (Slot& slot : slots) std::fill(slot.cells.begin(), slot.cells.end(), Cell{});
    now = 1;
  }
  for (Slot& slot : slots) slot.size = slot.element = 0, slot.shadow = nullptr;
  for (void*& bound : msl_bound) bound = nullptr;

  // Views that overlap share a slot, so that a race through two names is a race.
  struct Region {
    u8* host;
    u64 bytes;
    u32 granule;
    bool writable;
  };
  std::vector<Region> regions;
  std::vector<u32> by_address(launch->buffers);
  for (u32 i = 0; i < launch->buffers; ++i) by_address[i] = i;
  // Empty ones first: they lie nowhere, and must not part two that overlap.
  std::sort(by_address.begin(), by_address.end(), [&](u32 a, u32 b) {
    const BufferArgument &x = launch->buffer[a], &y = launch->buffer[b];
    return std::make_pair(x.bytes != 0, x.host) < std::make_pair(y.bytes != 0, y.host);
  });
  for (u32 i : by_address) {
    const BufferArgument& argument = launch->buffer[i];
    u8* host = static_cast<u8*>(argument.host);
    if (regions.empty() || regions.back().bytes == 0 || host >= regions.back().host + regions.back().bytes) {
      Slot& slot = slots[regions.size()];
      slot.start = slot_base(regions.size()) + PAGE + argument.storage_offset % 256;
      slot.element = argument.element;
      slot.name = argument.name;
      regions.push_back({host, argument.bytes, argument.element, false});
    }
    Region& region = regions.back();
    const u64 offset = argument.bytes ? host - region.host : 0;
    region.bytes = std::max(region.bytes, offset + argument.bytes);
    region.granule = std::min(region.granule, argument.element);
    region.writable |= argument.writable;
    msl_bound[i] = reinterpret_cast<void*>(slots[regions.size() - 1].start + offset);
  }
  dispatch_start = ++now;
  groups_begun.clear();
  for (u32 i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    Slot& slot = slots[i];
    slot.size = region.bytes;
    commit(i, slot.start - slot_base(i) + region.bytes);
    if (region.bytes) memcpy(reinterpret_cast<void*>(slot.start), region.host, region.bytes);
    if (region.writable) watch(slot, region.granule);
  }

  entry = launch->entry;
  faulted = false;
  std::mt19937_64 random(launch->seed);
  const Three threads = launch->threads, size = launch->group_size;
  const Three count{ceil_divide(threads.x, size.x), ceil_divide(threads.y, size.y), ceil_divide(threads.z, size.z)};
  const u64 groups = u64(count.x) * count.y * count.z;
  std::vector<u64> order(launch->seed ? groups : 0);
  for (u64 i = 0; i < order.size(); ++i) order[i] = i;
  if (launch->seed) std::shuffle(order.begin(), order.end(), random);
  for (u64 i = 0; i < groups && !faulted; ++i) {
    const u64 g = launch->seed ? order[i] : i;
    begin_group({u32(g % count.x), u32(g / count.x % count.y), u32(g / count.x / count.y)}, threads, size, count);
    run_group(launch->seed ? &random : nullptr);
  }
  running = nullptr;
  if (faulted)
    for (Fiber& fiber : fibers)
      if (fiber.stack) prepare(fiber);
  for (u32 i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    Slot& slot = slots[i];
    if (region.writable && region.bytes) memcpy(region.host, reinterpret_cast<void*>(slot.start), region.bytes);
    if (slot.committed > KEEP) {
      madvise(reinterpret_cast<void*>(slot_base(i)), slot.committed, MADV_DONTNEED);
      if (slot.cells.size() * sizeof(Cell) > KEEP) slot.cells = {}, slot.shadow = nullptr;
    }
  }
  return faulted;
}

const Report* msl_report() { return &report; }
u64 msl_image() { return shader_image.first; }
}
}  // namespace msl
