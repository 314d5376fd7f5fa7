// Runs kernels on XLA's CUDA stream. A launch allocates nothing and waits for nothing, so XLA may record it in a command buffer.
#pragma once
#include "launch/cuda/driver.h"
#include "launch/launch.h"
#include "xla/ffi/api/ffi.h"

#define LAUNCHER cuda
#define BIND() xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cuda::Stream>>()
#define TRAITS {xla::ffi::Traits::kCmdBufferCompatible}

namespace launcher {

using Context = cuda::Stream;

// Fewer teams than this do not fill a GPU.
constexpr int threads_a_team = 32;
constexpr uint32_t enough_teams = 4096;

// Outputs that a team of vecmat makes: what threads side by side read of a row is a whole sector of memory.
constexpr uint32_t strip = 16;

xla::ffi::Error run(Context stream, const Launch* launches, int count);
std::string status(bool* usable);  // what runs the kernels, for people; or why nothing does
void poison_outputs(bool on);      // tests: fill every result with NaN before the kernel runs

// While one lives, this thread's calls compile and load what they would launch, for every device, and launch nothing.
struct Preparing {
  Preparing();
  ~Preparing();
};

}  // namespace launcher
