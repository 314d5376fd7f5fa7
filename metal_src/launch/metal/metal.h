// Compiles and runs Metal kernels. Plain C and no SDK: Metal and the Objective-C runtime are looked up in the process that runs.
// Any number of threads may call at once. What returns char* returns null on success, else what went wrong, for the caller to free().
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

// Null where kernels can run, else why not. Loads the driver when first called.
const char* metal_unavailable(void);

// The device and what it can do, for people; only where kernels can run.
const char* metal_device(void);

// Bytes that an array may have; 0 where kernels cannot run.
size_t metal_longest(void);

typedef struct {
  void* state;           // null: not compiled
  uint32_t max_threads;  // that a threadgroup of this kernel may have
} MetalPipeline;

// Compiles `text`, which must define a kernel named `function`. Pipelines live as long as the process.
char* metal_compile(const char* text, const char* function, MetalPipeline* pipeline);

// Memory that is bound as buffer(n). Arrays that start at one address are one; others must not overlap.
typedef struct {
  void* data;
  size_t bytes;
  bool written;
} MetalArray;

typedef struct {
  MetalPipeline pipeline;
  const MetalArray* arrays;  // buffer(0) .. buffer(array_count - 1)
  int array_count;
  const void* params;        // buffer(array_count), up to 4 KiB
  size_t params_bytes;
  uint32_t groups, threads;  // a grid of `groups` threadgroups of `threads` threads
  size_t scratch_bytes;      // threadgroup(0)
} MetalDispatch;

// Runs the dispatches one after the other, as one command buffer, and waits for it.
char* metal_run(const MetalDispatch* dispatches, int count);

#ifdef __cplusplus
}
#endif
