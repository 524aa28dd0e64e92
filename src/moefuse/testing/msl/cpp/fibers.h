// A fiber: a thread of the shader, with a stack of its own, that runs until it must wait. Switching costs a dozen
// instructions and no system call. Part of runtime.cpp.
#pragma once

namespace {

constexpr u64 STACK = 1ul << 18;

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

// Saves the registers that a call must keep, and goes on where `to` was saved.
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

// The next switch to this fiber starts `main`, which must not return.
void prepare(Fiber& fiber, void (*main)()) {
  if (!fiber.stack) {
    fiber.stack = static_cast<u8*>(
        mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (fiber.stack == MAP_FAILED) abort();
  }
  void** top = reinterpret_cast<void**>(fiber.stack + STACK - 64);
#if defined(__x86_64__)
  *--top = nullptr;  // keeps the stack aligned as a call would
  *--top = reinterpret_cast<void*>(main);
  top -= SAVED;
#else
  top -= SAVED + 1;
  top[SAVED] = reinterpret_cast<void*>(main);
#endif
  fiber.stack_pointer = top;
}

}  // namespace
