#include "launch/metal/launcher.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "launch/metal/metal.h"
#include "launch/metal/trial.h"
#include "launch/text.h"

namespace launcher {
namespace {

namespace ffi = xla::ffi;

std::atomic<bool> poison{false};

ffi::Error failed(ffi::ErrorCode code, const std::string& what, char* why) {
  const std::string message = what + ": " + why;
  std::free(why);
  return ffi::Error(code, message);
}

// A kernel with all its template arguments, compiled when first wanted.
struct Instance {
  std::mutex lock;
  MetalPipeline pipeline = {};
};

// Kernels of some width that run in one call, and whether they once have.
struct Together {
  std::mutex lock;
  std::atomic<bool> proven{false};
};

ffi::Error compile(const Launch& launch, const std::string& name, MetalPipeline* pipeline) {
  const char* const text = text_of(launch.kernel);
  if (!text) return ffi::Error(ffi::ErrorCode::kUnimplemented, "the Metal library has no kernel " + name);
  const std::string function = word_of(name);
  const std::string line = "template [[host_name(\"" + function + "\")]] [[kernel]] decltype(" + name + ") " + name + ";\n";
  char* const error = metal_compile((text + line).c_str(), function.c_str(), pipeline);
  return error ? failed(ffi::ErrorCode::kInternal, "Metal does not compile " + name, error) : ffi::Error::Success();
}

// A compiled kernel and its shape: the one that the width wants, or one with fewer threads if the kernel's registers allow no more.
ffi::Error prepare(const Launch& launch, Shape* shape, std::string* name, MetalPipeline* pipeline) {
  for (int most = most_simdgroups, allowed;; most = allowed) {
    *shape = shape_within(launch, most);
    *name = spelled(launch, *shape);
    Instance& instance = named<Instance>(*name);
    std::lock_guard<std::mutex> guard(instance.lock);
    if (!instance.pipeline.state)
      if (ffi::Error error = compile(launch, *name, &instance.pipeline); error.failure()) return error;
    *pipeline = instance.pipeline;
    if (threads_of(*shape) <= int(pipeline->max_threads)) return ffi::Error::Success();
    allowed = int(pipeline->max_threads) / simd_width;
    if (allowed == 0 || allowed >= most)
      return ffi::Error(ffi::ErrorCode::kInternal, *name + ": Metal allows it " + std::to_string(pipeline->max_threads) + " threads");
  }
}

ffi::Error attempt(const Launch* launches, int count) {
  MetalDispatch dispatches[most_launches];
  MetalArray arrays[most_launches][16];
  int dispatched = 0;
  std::string names;
  for (const Launch* launch = launches; launch < launches + count; ++launch) {
    if (poison)
      for (int i = 0; i < launch->buffer_count; ++i)
        if (launch->fresh[i]) std::memset(launch->buffers[i], 0xff, launch->buffer_bytes[i]);
    if (launch->teams == 0) continue;

    Shape shape;
    std::string name;
    MetalPipeline pipeline;
    if (ffi::Error error = prepare(*launch, &shape, &name, &pipeline); error.failure()) return error;
    for (int i = 0; i < launch->buffer_count; ++i) arrays[dispatched][i] = {launch->buffers[i], launch->buffer_bytes[i], launch->written[i]};
    dispatches[dispatched] = {pipeline, arrays[dispatched], launch->buffer_count, launch->params, launch->params_bytes,
                              groups_of(*launch, shape), uint32_t(threads_of(shape)), size_t(scratch_of(shape))};
    names += (dispatched++ ? ", " : "") + name;
  }
  char* const error = dispatched ? metal_run(dispatches, dispatched) : nullptr;
  return error ? failed(ffi::ErrorCode::kInternal, names, error) : ffi::Error::Success();
}

}  // namespace

ffi::Error run(Context&, const Launch* launches, int count) {
  if (const char* why = metal_unavailable()) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, ::spelled(launches[0]) + ": " + why);
  std::string names;
  for (const Launch* launch = launches; launch < launches + count; ++launch)
    if (launch->teams)
      names += (names.empty() ? "" : ", ") + spelled(*launch, shape_within(*launch)) + " of width " + std::to_string(launch->width);
  if (names.empty() || !trial_seconds()) return attempt(launches, count);
  Together& together = named<Together>(names);
  if (together.proven) return attempt(launches, count);
  std::lock_guard<std::mutex> one(together.lock);
  if (together.proven) return attempt(launches, count);
  ffi::Error error = on_trial(attempt, names, launches, count);
  together.proven = error.success();
  return error;
}

std::string status(bool* usable) {
  const char* const why = metal_unavailable();
  const char* const hung = trial_hung();
  *usable = !why && !hung;
  return why ? why : hung ? hung : metal_device();
}

void poison_outputs(bool on) { poison = on; }

}  // namespace launcher

// Python asks before it gives Metal a call: bytes that an array may have.
extern "C" __attribute__((visibility("default"))) uint64_t jax_fusednorm_longest_array() { return metal_longest(); }
