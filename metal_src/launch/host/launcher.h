// Runs kernels on XLA's own intra-op thread pool: a team is one thread, and a task is a range of teams.
#pragma once
#include "launch/launch.h"
#include "xla/ffi/api/ffi.h"

#define LAUNCHER host
#define BIND() xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>()

namespace launcher {

using Context = xla::ffi::ThreadPool;

// A head is one thread's, and so are a token's heads.
constexpr int threads_a_team = 1;
constexpr uint32_t enough_teams = 1;

// Outputs that a team of vecmat makes: a thread reads that many elements of a row at a time.
constexpr uint32_t strip = 512;

xla::ffi::Error run(Context& pool, const Launch* launches, int count);
std::string status(bool* usable);  // what runs the kernels, for people; or why nothing does
void poison_outputs(bool on);      // tests: fill every result with NaN before the kernel runs

}  // namespace launcher
