// A switch between stacks: nine instructions where we know the machine, else ucontext, which is
// several times slower but which sanitizers understand (CUSIM_UCONTEXT asks for it).
#ifndef CUSIM_FIBER_H
#define CUSIM_FIBER_H

#include <cstddef>
#include <cstdint>

#if !defined(CUSIM_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUSIM_UCONTEXT
#endif

#ifdef CUSIM_UCONTEXT

#include <ucontext.h>

namespace fiber {

using Context = ucontext_t;

// The first switch to it calls entry, which must never return.
inline void prepare(Context *context, void *stack, std::size_t bytes, void (*entry)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
}

// Goes on where `to` stopped; returns when something switches back to `from`.
inline void go(Context *from, Context *to) { swapcontext(from, to); }

}  // namespace fiber

#else

// Keeps what the calling convention says a function must keep, on the stack, and changes the stack.
extern "C" void cusim_switch(void **from, void *to);

#if defined(__x86_64__)
asm(R"(
.text
.type cusim_switch, @function
cusim_switch:
  endbr64
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size cusim_switch, .-cusim_switch
)");
#else
asm(R"(
.text
.type cusim_switch, %function
cusim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cusim_switch, .-cusim_switch
)");
#endif

namespace fiber {

using Context = void *;  // the stack pointer

inline void prepare(Context *context, void *stack, std::size_t bytes, void (*entry)()) {
  auto *top = reinterpret_cast<void **>((reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~15ul);
#if defined(__x86_64__)
  constexpr int slots = 8, address = 6;  // six registers, where to return to, alignment at entry
#else
  constexpr int slots = 20, address = 11;  // x30 is the twelfth register kept
#endif
  top -= slots;
  for (int i = 0; i < slots; ++i) top[i] = nullptr;
  top[address] = reinterpret_cast<void *>(entry);
  *context = top;
}

inline void go(Context *from, Context *to) { cusim_switch(from, *to); }

}  // namespace fiber

#endif

#endif
