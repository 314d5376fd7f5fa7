// Host kernels by name and instruction set. kernels.cc is compiled once a level and once a kernel file; each copy registers itself.
#pragma once
#include "launch/launch.h"

namespace host {

enum Level { V2, V3, V4, LEVELS };

// Runs the teams [first, last) in one thread. scratch: launch.kept * launch.width floats.
typedef void (*Entry)(void* const* buffers, float* scratch, unsigned first, unsigned last);
typedef Entry (*Finder)(const Argument* variant);  // null: there is no such instantiation

struct Register {
  Register(const char* kernel, Level level, Finder finder);
};

}  // namespace host
