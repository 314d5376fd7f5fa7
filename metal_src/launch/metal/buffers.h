// Arrays that XLA allocated, as Metal buffers: over their own memory where that can be done, else copies.
#pragma once
#include <stdbool.h>
#include <stddef.h>

#include "launch/metal/driver.h"

typedef struct {
  void* data;
  size_t bytes;
  bool written;
  id buffer;
  NSUInteger offset;  // of the array in the buffer
  char* memory;       // of a buffer that holds a copy; null: the buffer lies over the array
  size_t copy_bytes;  // of that buffer
} Bound;

// Fills in all that follows `written`. Null, or what went wrong.
char* bind_array(Bound* array);

// Before a call returns, for XLA may then free or move the memory. `finished`: the kernels ran, and copies are written back.
void unbind_array(Bound* array, bool finished);
