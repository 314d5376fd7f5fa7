// A stand-in for libobjc and Metal on x86-64 Linux, for tests. Loaded in place of the real driver, it answers the launcher's messages,
// runs every kernel lane by lane, and complains of what Apple's API validation or a GPU would make the user suffer for.
// -[MTLBuffer addDebugMarker:range:] tells it where an array in a buffer begins and ends; without one, whole pages are in bounds.
// The environment variable STANDIN_MAX_THREADS lowers maxTotalThreadsPerThreadgroup.
// This is what tests ask of it, from any thread.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Forgets complaints, counts and dispatches, forgives leaks; every checker is on, the seed is 1, and
// nothing misbehaves but what the environment asks for.
void standin_reset(void);

// The complaints so far, one a line, each "checker: what is wrong". Waits for work under way, then looks for leaks.
const char* standin_complaints(void);

// The checkers' names, separated by commas; and one turned off or on. Returns 0 if there is none of that name.
const char* standin_checkers(void);
int standin_check(const char* checker, int on);

// The random order of lanes and threadgroups. switch_every: lanes also change at one access in this many; 0: only where they meet.
void standin_seed(uint64_t seed, unsigned switch_every);

// Until the next reset dispatches run only these of their threadgroups, so that one may be of more than would ever end.
void standin_run_some(unsigned first, unsigned count);

// Misbehaves on demand; `of` null: no longer. First what befalls the kernels whose instantiation ("rms_norm<float, ...") begins with `of`:
//   refuse source, refuse pipeline           newLibraryWithSource, newComputePipelineStateWithFunction return an NSError
//   hang, fail                               the command buffer does not end while this is asked for, ends with an NSError and wrong results
//   wrong, wrong last                        the first element of every result, of the last result, is wrong
// Then what is so for all of them:
//   no device, nil wrapper, short wrapper    instead of a device, a no-copy buffer, a whole one
//   region wrapper                           no-copy buffers only over what is of one mapping, and not malloc's heap
//   nil                                      the message, or class, of the name `of` is answered with nil
//   longest buffer, simd width               maxBufferLength, threadExecutionWidth are the number `of`
//   separate memory, macOS 14                no unified memory; MTLCompileOptions that know no math mode
// Returns 0 if it knows no such misbehaviour. The environment variable STANDIN_MISBEHAVE="how:of;how:of" asks for some, which outlast a reset.
int standin_misbehave(const char* how, const char* of);

// How many: "live CLASS" (objects that the launcher has references to) or "sent SELECTOR" (messages).
long standin_count(const char* what);

// What ran since the last reset, in order. Null when there is no such dispatch; valid until the next reset.
struct standin_bytes {
  uint64_t read, written, unique_read, unique_written;
};
struct standin_dispatch {
  char kernel[128];  // the instantiation
  uint64_t groups, threads, threadgroup_bytes, barriers, exchanges;
  struct standin_bytes buffers[31], threadgroup_memory;
};
const struct standin_dispatch* standin_dispatched(int number);

// launch/shape.h's answer for a row or a head: V, R, SG, TEAMS.
void standin_shape(uint32_t width, int element_bytes, int head, int shape[4]);

#ifdef __cplusplus
}
#endif
