// The first run of a kernel in a process: nothing has shown yet that the driver compiles it, and that the GPU finishes it.
#pragma once
#include <string>

#include "launch/metal/launcher.h"

// Seconds that it may take: JAX_FUSEDNORM_SELF_CHECK in the environment. 0: a first run is as any other.
double trial_seconds();

// Why nothing is tried any more, or null: a trial was not finished in time, and what waits behind it may wait for ever.
const char* trial_hung();

// attempt(launches, count) in a thread of its own, and on copies of all arrays: if its time is up, it is left to itself.
xla::ffi::Error on_trial(xla::ffi::Error (*attempt)(const Launch*, int), const std::string& names, const Launch* launches, int count);
