// What the parts of the stand-in share.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/kernel.h"
#include "emulator/standin.h"

namespace standin {

constexpr unsigned simd_lanes = 32, most_threads = 1024, most_buffers = 31, most_threadgroup_bytes = 32768;

// ---- complaints.cc: what is wrong, and what is asked for. The lock guards it, and all objects.
std::recursive_mutex& lock();
bool complain(const char* checker, const char* format, ...) __attribute__((format(printf, 2, 3)));  // false: the checker is off
size_t complaint_count();
std::string complaints_after(size_t count);
void forget_after(size_t count);
bool misbehaves(const char* how, const std::string& kernel = "");
std::string asked_of(const char* how);  // what it is asked to befall; "" too where it is not asked for
void count(const std::string& what);
long counted(const std::string& what);
void forget_complaints();

// ---- lanes.cc: runs one dispatch. One runs at a time.

// Memory that a kernel may touch, and what it did there.
struct Region {
  std::string name;
  uintptr_t base;
  size_t bytes;
  bool writable, shared;         // shared: threadgroup memory
  standin_bytes moved = {};
  std::shared_ptr<uint8_t> touched;  // for each byte: 1 read, 2 written. Zeros that take no memory, for an array may be of gigabytes

  Region(std::string name_, const void* data, size_t bytes_, bool writable_, bool shared_ = false)
      : name(std::move(name_)), base(uintptr_t(data)), bytes(bytes_), writable(writable_), shared(shared_),
        touched(static_cast<uint8_t*>(mmap(nullptr, bytes_ + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
                [n = bytes_ + 1](uint8_t* p) { munmap(p, n); }) {}
  bool holds(uintptr_t a, size_t n) const { return a >= base && n <= bytes && a - base <= bytes - n; }
};

struct Dispatch {
  const EmulatedKernel* kernel;
  std::vector<Region> regions;   // the buffers', in order; run() adds threadgroup memory
  unsigned groups, threads, threadgroup_bytes;
  uint64_t barriers = 0, exchanges = 0;
};

struct Seed {
  uint64_t seed = 1;
  unsigned switch_every = 0;
};

struct Some {
  unsigned first = 0, count = ~0u;  // of a dispatch's threadgroups
};

void run(Dispatch& dispatch, Seed seed, Some some);
void new_wave();  // what ran before is ordered before what follows: a memory barrier, or a new command buffer
const Emulator* emulator_functions();

// ---- memory.cc: the checks of every access. Within a lane.

// Time orders accesses. It moves on at barriers, and wherever a threadgroup, a dispatch or a wave begins.
struct Clock {
  uint32_t now = 0, wave = 0, dispatch = 0, group = 0, groups = 0;
  uint32_t barrier[2] = {};  // the threadgroup's last barrier for device memory, for threadgroup memory
  uint32_t simdgroup_barrier[most_threads / simd_lanes][2] = {};  // each simdgroup's
};

struct Running {
  Dispatch* dispatch = nullptr;
  Clock clock;
  unsigned group = 0, thread = 0;
  uintptr_t stack = 0, stack_bytes = 0;  // the lane's
};
extern Running running;

void access(const void* address, size_t bytes, bool write, bool aligned, const void* pc);
void forget_accesses();
[[noreturn]] void stop();  // nothing more can be said of this dispatch
void maybe_switch();

// ---- source.cc: from a text to kernels that can be run
struct Source {
  std::map<std::string, const EmulatedKernel*> kernels;  // by host_name
  std::string error;                                      // why the text is refused; else empty
};
Source compile(const std::string& text);

}  // namespace standin
