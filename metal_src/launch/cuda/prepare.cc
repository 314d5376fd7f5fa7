// What Python asks of this library alone.

#include <exception>

#include "launch/cuda/frame.h"
#include "launch/cuda/launcher.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void jax_fusednorm_configure(const char* nvrtc, const char* cache) { cuda::configure(nvrtc, cache); }

// Compiles and loads the kernels that a call (frame.h) would launch. Null, or what keeps them from it, valid until the thread asks again.
EXPORTED const char* jax_fusednorm_prepare(XLA_FFI_Handler* handler, const char* line) {
  static thread_local std::string why;
  try {
    const launcher::Preparing here;
    why = frame::parse(line).make(handler);
  } catch (const std::exception& error) {
    why = error.what();
  }
  return why.empty() ? nullptr : why.c_str();
}
