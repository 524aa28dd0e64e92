// The simulated GPU's memory: 64 slots of 4 GiB of address space, one buffer or threadgroup array each. An index that
// is wrong by less than 4 GiB lands in nobody's bytes, so an address tells what it belongs to. Part of runtime.cpp.
#pragma once

namespace {

constexpr u64 SLOT_SPAN = 1ul << 32;
constexpr u32 SLOTS = MEMORY_SPAN / SLOT_SPAN;
constexpr u32 FIRST_GROUP_SLOT = SLOTS / 2;  // buffers below, threadgroup arrays from here
constexpr u64 PAGE = 4096;
constexpr u64 KEEP = 1ul << 24;  // slots with more go back to the system after a dispatch

// Who last wrote and read a granule, and when.
struct Cell {
  u32 write_time, read_time;
  u16 writer, reader;
  bool written_atomically, read_atomically;
  bool read_by_lanes, read_by_simdgroups, read_by_groups;  // more readers than the one that is named
};

struct Slot {
  u64 start = 0, size = 0;  // of the bytes in use
  u64 committed = 0;        // bytes of the slot that have memory behind them
  u32 element = 0;          // bytes of one; 0: not in use
  u32 granule_log2 = 0;     // bytes that share a cell
  Cell* shadow = nullptr;   // null where nothing is written: then nothing can race
  const char* name = "";
  std::vector<Cell> cells;
};

Slot slots[SLOTS];

void reserve_memory() {
  void* reserved = mmap(nullptr, MEMORY_SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) abort();
  msl_memory = reinterpret_cast<u64>(reserved);
}

bool in_memory(u64 address) { return address - msl_memory < MEMORY_SPAN; }
u32 slot_of(u64 address) { return (address - msl_memory) / SLOT_SPAN; }
u64 slot_base(u32 index) { return msl_memory + index * SLOT_SPAN; }

void commit(u32 index, u64 bytes) {
  Slot& slot = slots[index];
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  if (bytes <= slot.committed) return;
  if (mprotect(reinterpret_cast<void*>(slot_base(index)), bytes, PROT_READ | PROT_WRITE) != 0) abort();
  slot.committed = bytes;
}

void* take(u32 index, u64 lead, u64 bytes, u32 element, const char* name) {
  Slot& slot = slots[index];
  commit(index, PAGE + lead + bytes);
  slot.start = slot_base(index) + PAGE + lead;
  slot.size = bytes;
  slot.element = element;
  slot.name = name;
  return reinterpret_cast<void*>(slot.start);
}

// Times only grow, so what an earlier use left in the cells is old, and need not be cleared.
void watch(Slot& slot, u32 granule) {
  slot.granule_log2 = granule >= 4 ? 2 : granule >= 2 ? 1 : 0;
  slot.cells.resize(std::max<u64>(slot.cells.size(), (slot.size >> slot.granule_log2) + 1));
  slot.shadow = slot.cells.data();
}

void release(u32 index) {
  Slot& slot = slots[index];
  if (slot.committed > KEEP) madvise(reinterpret_cast<void*>(slot_base(index)), slot.committed, MADV_DONTNEED);
  if (slot.cells.size() * sizeof(Cell) > KEEP) std::vector<Cell>().swap(slot.cells);
  slot.size = slot.element = 0;
  slot.shadow = nullptr;
}

// Where a library lies in memory: a shader's has its constants, our own the lanes that threads meet in.
struct Image {
  u64 first = 0, last = 0;
  bool holds(u64 address) const { return address >= first && address < last; }
};
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

}  // namespace
