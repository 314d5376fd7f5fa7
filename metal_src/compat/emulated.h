// MSL words for the stand-in driver: a text is compiled as the code of one lane, and what lanes do together goes to the emulator.
// Compiled with -fsanitize=thread and linked without its runtime: before every access to memory the compiler then calls one of the
// functions at the end, which hand it to the emulator. Needs nothing from the library that loads the result but its Emulator.
#pragma once
#include "compat/call.h"
#include "compat/cpp.h"
#include "emulator/kernel.h"

extern "C" {
__attribute__((visibility("default"))) const Emulator* emulator;  // whoever loads this sets it
}

namespace {

template <typename All, typename Numbers>
struct Buffers;
template <typename... P, std::size_t... I>
struct Buffers<void (*)(P...), std::index_sequence<I...>> {
  template <std::size_t N>
  using Pointee = typename Bound<std::tuple_element_t<N, std::tuple<P...>>>::Pointee;
  static constexpr EmulatedKernel::Buffer all[] = {{sizeof(Pointee<I>), !std::is_const<Pointee<I>>::value}...};
};

template <auto K>
constexpr EmulatedKernel emulated(const char* name) {
  constexpr std::size_t count = buffers_of(K);
  return {name, &call<K>, Buffers<decltype(K), std::make_index_sequence<count>>::all, count};
}

// What lanes do together. Their own accesses are the emulator's, not the kernel's.
#define TOGETHER __attribute__((no_sanitize("thread"))) inline
#define HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace metal {

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

TOGETHER void threadgroup_barrier(mem_flags flags, HERE) { emulator->barrier(int(flags), file, line); }

TOGETHER void simdgroup_barrier(mem_flags flags, HERE) { emulator->simdgroup_barrier(int(flags), file, line); }

// Neighbours first: one order of the many that a GPU may use.
TOGETHER float simd_sum(float x, HERE) {
  float all[32];
  emulator->exchange(x, all, file, line);
  for (int step = 1; step < 32; step *= 2)
    for (int i = 0; i < 32; i += 2 * step) all[i] += all[i + step];
  return all[0];
}

TOGETHER float simd_shuffle_xor(float x, ushort mask, HERE) {
  float all[32];
  return all[emulator->exchange(x, all, file, line) ^ mask];
}

TOGETHER int simd_min(int x, HERE) {
  float all[32];
  emulator->exchange(as_type<float>(x), all, file, line);
  for (float other : all) x = as_type<int>(other) < x ? as_type<int>(other) : x;
  return x;
}

}  // namespace metal
}  // namespace

extern "C" {
#define HOOK(name, parameters, bytes, write, aligned)                                                   \
  __attribute__((no_sanitize("thread"), visibility("hidden"))) void __tsan_##name parameters {          \
    emulator->access(address, bytes, write, aligned, __builtin_return_address(0));                      \
  }
#define HOOKS(n)                                      \
  HOOK(read##n, (void* address), n, false, true)      \
  HOOK(write##n, (void* address), n, true, true)      \
  HOOK(unaligned_read##n, (void* address), n, false, false) \
  HOOK(unaligned_write##n, (void* address), n, true, false)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
HOOK(read_range, (void* address, size_t bytes), bytes, false, false)
HOOK(write_range, (void* address, size_t bytes), bytes, true, false)
__attribute__((visibility("hidden"))) void __tsan_init() {}
__attribute__((visibility("hidden"))) void __tsan_func_entry(void*) {}
__attribute__((visibility("hidden"))) void __tsan_func_exit() {}
}

// What the library that comes of this text is asked for, beside `emulator`.
#define EMULATED_KERNELS extern "C" __attribute__((visibility("default"))) constexpr EmulatedKernel emulated_kernels[]

#define SCRATCH scratch
#define kernel
#define device
#define constant const
#define threadgroup
#define thread
