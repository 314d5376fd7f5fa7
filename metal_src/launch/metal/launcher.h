// Runs kernels on an Apple GPU, over the memory that it shares with the CPU: a team is one simdgroup, or the simdgroups of a threadgroup.
#pragma once
#include "launch/launch.h"
#include "xla/ffi/api/ffi.h"

#define LAUNCHER metal
#define BIND() xla::ffi::Ffi::Bind().Ctx<xla::ffi::Context>()

namespace launcher {

using Context = xla::ffi::Context;  // nothing of it is needed

// Fewer teams than this do not fill a GPU.
constexpr int threads_a_team = 32;
constexpr uint32_t enough_teams = 2048;

// Outputs that a team of vecmat makes: what threads side by side read of a row is a whole sector of memory.
constexpr uint32_t strip = 16;

xla::ffi::Error run(Context&, const Launch* launches, int count);
std::string status(bool* usable);  // what runs the kernels, for people; or why nothing does
void poison_outputs(bool on);      // tests: fill every result with NaN before the kernel runs

}  // namespace launcher
