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
  NSUInteger offset;    // of the array in the buffer
  size_t copy_bytes;    // of the pooled buffer that holds a copy; 0: the buffer lies over the array
} Bound;

// Fills in buffer, offset and copy_bytes. Null, or what went wrong.
char* bind_array(Bound* array);

// Before a call returns, for XLA may then free or move the memory. `finished`: the kernels ran, and copies are written back.
void unbind_array(Bound* array, bool finished);
