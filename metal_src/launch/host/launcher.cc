#include "launch/host/launcher.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "launch/host/entry.h"

namespace host {
namespace {

struct Finders {
  Finder at[LEVELS] = {};
};

std::map<std::string, Finders>& kernels() {
  static std::map<std::string, Finders> all;
  return all;
}

const char* const level_names[LEVELS] = {"v2", "v3", "v4"};

// The best level of this processor; JAX_FUSEDNORM_HOST_LEVEL may lower it.
Level best_level() {
  Level best = V2;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) best = V3;
  if (best == V3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    best = V4;
  const char* wanted = std::getenv("JAX_FUSEDNORM_HOST_LEVEL");
  for (int l = V2; wanted && l < best; ++l)
    if (!std::strcmp(wanted, level_names[l])) best = Level(l);
#endif
  return best;
}

Level level() {
  static const Level chosen = best_level();
  return chosen;
}

Entry find(const char* kernel, const Argument* variant, Level level) {
  const auto found = kernels().find(kernel);
  const Finder finder = found == kernels().end() ? nullptr : found->second.at[level];
  return finder ? finder(variant) : nullptr;
}

}  // namespace

Register::Register(const char* kernel, Level level, Finder finder) { kernels()[kernel].at[level] = finder; }

}  // namespace host

namespace launcher {
namespace {

namespace ffi = xla::ffi;
using host::Entry;

// A chunk smaller than this is done sooner than another thread wakes up (measured: 128 KiB made some calls slower than XLA's).
constexpr size_t chunk_bytes = 512 << 10;

// With fewer, one thread is alone with the last chunk for longer (measured: 4 made a projection 2 % slower).
constexpr uint64_t chunks_a_thread = 16;

// Being woken takes 20 to 40 us, more than what is mostly left to wait for; this many yields take about as long.
constexpr int yields = 200;

// Smaller results come from memory that the allocator keeps.
constexpr size_t large_bytes = 4 << 20;

std::atomic<bool> poison{false};

// XLA's allocator maps a large result anew at each execution, and then every first touch of a page is a fault: as dear as the
// kernel itself. Huge pages make them 512 times fewer.
void ask_for_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = 2 << 20;
  // outwards: a page counts only if it lies whole within the advised range
  const uintptr_t first = uintptr_t(data) & ~(page - 1), last = (uintptr_t(data) + bytes + page - 1) & ~(page - 1);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // advice: what cannot be followed is no error
#endif
}

// Memory for the rows that a thread keeps; it grows to the widest row seen.
float* scratch(size_t floats) {
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local size_t size = 0;
  if (size < floats) {
    memory.reset();
    size = 0;
    memory.reset(new (std::align_val_t(64), std::nothrow) float[floats]);
    if (memory) size = floats;
  }
  return memory.get();
}

// One launch under way. Chunks are claimed from a counter, and the caller claims too: it waits only for chunks that a running
// worker holds, so that a pool whose threads all sit in handlers cannot deadlock. A worker that comes late finds nothing left,
// and touches nothing of the caller's.
struct Work {
  Entry entry;
  void* buffers[16];
  size_t floats;
  uint64_t teams, chunks;
  std::atomic<uint64_t> next{0}, done{0};
  std::atomic<bool> out_of_memory{false};
  std::mutex mutex;
  std::condition_variable finished;

  void help() {
    uint64_t mine = 0;
    for (uint64_t i; (i = next.fetch_add(1)) < chunks; ++mine) {
      float* memory = scratch(floats);
      if (memory || !floats)
        entry(buffers, memory, unsigned(teams * i / chunks), unsigned(teams * (i + 1) / chunks));
      else
        out_of_memory = true;
    }
    if (mine && done.fetch_add(mine) + mine == chunks) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }
  void wait() {
    for (int i = 0; i < yields && done.load() != chunks; ++i) std::this_thread::yield();
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load() == chunks; });
  }
};

ffi::Error no_memory(const Launch& launch) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, spelled(launch) + ": no memory for the rows it keeps");
}

ffi::Error run(Context& pool, const Launch& launch) {
  const Entry entry = host::find(launch.kernel, launch.variant, host::level());
  if (!entry) return ffi::Error(ffi::ErrorCode::kUnimplemented, "the host library has no kernel " + spelled(launch));
  for (int i = 0; i < launch.buffer_count; ++i)
    if (launch.fresh[i] && launch.buffer_bytes[i] >= large_bytes) ask_for_huge_pages(launch.buffers[i], launch.buffer_bytes[i]);
  if (poison)
    for (int i = 0; i < launch.buffer_count; ++i)
      if (launch.fresh[i]) std::memset(launch.buffers[i], 0xff, launch.buffer_bytes[i]);
  if (launch.teams == 0) return ffi::Error::Success();

  void* buffers[16];
  std::copy(launch.buffers, launch.buffers + launch.buffer_count, buffers);
  buffers[launch.buffer_count] = const_cast<void*>(launch.params);
  const size_t floats = size_t(launch.kept) * launch.width;
  const uint64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const uint64_t chunks = std::min({chunks_a_thread * threads, uint64_t(launch.teams), uint64_t(launch.teams) * launch.bytes / chunk_bytes});
  if (threads == 1 || chunks <= 1) {
    float* memory = scratch(floats);
    if (floats && !memory) return no_memory(launch);
    entry(buffers, memory, 0, launch.teams);
    return ffi::Error::Success();
  }
  const auto work = std::make_shared<Work>();
  work->entry = entry;
  std::copy(buffers, buffers + launch.buffer_count + 1, work->buffers);
  work->floats = floats;
  work->teams = launch.teams;
  work->chunks = chunks;
  for (uint64_t t = 1; t < std::min(threads, chunks); ++t) pool.Schedule([work] { work->help(); });
  work->help();
  work->wait();
  return work->out_of_memory ? no_memory(launch) : ffi::Error::Success();
}

}  // namespace

ffi::Error run(Context& pool, const Launch* launches, int count) {
  for (int i = 0; i < count; ++i)
    if (ffi::Error error = run(pool, launches[i]); error.failure()) return error;
  return ffi::Error::Success();
}

std::string status(bool* usable) {
  *usable = true;
#if defined(__x86_64__)
  return std::string("compiled for x86-64-") + host::level_names[host::level()];
#else
  return "compiled for this machine's baseline";
#endif
}

void poison_outputs(bool on) { poison = on; }

}  // namespace launcher

// For tests: runs the teams [first, last) of one kernel in the calling thread, at one level, on buffers that may lie anywhere. Returns 0
// where the processor or the library has it not.
extern "C" __attribute__((visibility("default"))) int jax_fusednorm_run_host_teams(const char* kernel, const unsigned char* variant,
                                                                                   const char* level, void* const* buffers, float* scratch,
                                                                                   unsigned first, unsigned last) {
  for (int l = host::V2; l <= host::best_level(); ++l) {
    if (std::strcmp(level, host::level_names[l])) continue;
    const auto entry = host::find(kernel, reinterpret_cast<const Argument*>(variant), host::Level(l));
    if (entry) entry(buffers, scratch, first, last);
    return entry != nullptr;
  }
  return 0;
}

// The same of all of them.
extern "C" __attribute__((visibility("default"))) int jax_fusednorm_run_host_kernel(const char* kernel, const unsigned char* variant,
                                                                                    const char* level, void* const* buffers,
                                                                                    float* scratch, unsigned teams) {
  return jax_fusednorm_run_host_teams(kernel, variant, level, buffers, scratch, 0, teams);
}
