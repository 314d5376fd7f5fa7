// Between the emulator and a kernel that is compiled for it.
#pragma once
#include <cstddef>

// What the emulator does for a lane. file and line: where a lane meets others.
struct Emulator {
  void (*access)(const void* address, size_t bytes, bool write, bool aligned, const void* pc);
  void (*barrier)(int mem_flags, const char* file, int line);
  void (*simdgroup_barrier)(int mem_flags, const char* file, int line);
  unsigned (*exchange)(float mine, float* all, const char* file, int line);  // the 32 lanes' values, in order; returns this lane's number
};

// A kernel as the emulator sees it.
struct EmulatedKernel {
  struct Buffer {
    size_t bytes;  // of an element, or of the params
    bool writable;
  };
  const char* name;  // the instantiation
  void (*run)(void* const* buffers, float* scratch, unsigned group, unsigned lane, unsigned simdgroup);
  const Buffer* buffers;
  size_t buffer_count;
};
