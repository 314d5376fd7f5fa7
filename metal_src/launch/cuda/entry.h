// CUDA kernels by name, step of launch/shape.h and element size. kernels.cu is compiled once for each and for each kernel file; each
// object registers itself.
#pragma once
#include "launch/launch.h"

namespace cuda {

typedef const void* Entry;                         // a __global__ function: every buffer's address, then the params by value
typedef Entry (*Finder)(const Argument* variant);  // null: there is no such instantiation

struct Register {
  Register(const char* kernel, int step, int element_bytes, Finder finder);
};

}  // namespace cuda
