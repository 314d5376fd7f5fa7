#include "launch/cuda/launcher.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "launch/cuda/entry.h"
#include "launch/shape.h"

namespace cuda {
namespace {

struct Finders {
  Finder at[step_count][2] = {};  // by element size: 2 and 4 bytes
};

std::map<std::string, Finders>& kernels() {
  static std::map<std::string, Finders> all;
  return all;
}

Entry find(const Launch& launch, int step) {
  const auto found = kernels().find(launch.kernel);
  const Finder finder = found == kernels().end() ? nullptr : found->second.at[step][launch.element_bytes == 4];
  return finder ? finder(launch.variant) : nullptr;
}

}  // namespace

Register::Register(const char* kernel, int step, int element_bytes, Finder finder) {
  kernels()[kernel].at[step][element_bytes == 4] = finder;
}

}  // namespace cuda

namespace launcher {
namespace {

namespace ffi = xla::ffi;

std::atomic<bool> poison{false};

std::string dotted(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

struct Status {
  bool usable;
  std::string text;
};

// Asked when a call is first lowered, never while the library is loaded. Without a driver nothing runs here, but a program may well be
// lowered for a machine that has one.
Status ask() {
  const std::string built = "compiled for " ARCHITECTURES " with CUDA " + dotted(CUDART_VERSION);
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return {true, built + "; there is no NVIDIA driver here"};
  if (driver / 1000 < CUDART_VERSION / 1000)
    return {false, "the kernels are " + built + ", and this machine's driver is for CUDA " + dotted(driver) + ": update the driver, or build with its CUDA"};
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess && error != cudaErrorNoDevice) return {false, std::string("no device can be used: ") + cudaGetErrorString(error)};
  for (int d = 0; d < devices; ++d) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, d);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, d);
    if (10 * major + minor < OLDEST_ARCHITECTURE)
      return {false, "the kernels are " + built + ", and device " + std::to_string(d) + " is sm_" + std::to_string(10 * major + minor)};
  }
  return {true, built};
}

ffi::Error run(Context stream, const Launch& launch) {
  const int step = launch.heads ? head_step_of(launch.width, launch.element_bytes) : step_of(launch.width, launch.element_bytes, launch.aligned);
  const Shape shape = shape_at(step, launch.element_bytes);
  const cuda::Entry kernel = cuda::find(launch, step);
  if (!kernel) return ffi::Error(ffi::ErrorCode::kUnimplemented, "the cuda library has no kernel " + spelled(launch));
  const unsigned blocks = unsigned((uint64_t(launch.teams) + shape.teams - 1) / shape.teams), threads = shape.sg * shape.teams * simd_width;
  cudaError_t error = cudaSuccess;
  if (poison)
    for (int i = 0; i < launch.buffer_count && error == cudaSuccess; ++i)
      if (launch.fresh[i] && launch.buffer_bytes[i]) error = cudaMemsetAsync(launch.buffers[i], 0xff, launch.buffer_bytes[i], stream);
  if (blocks && error == cudaSuccess) {
    void* arguments[17];
    std::transform(launch.buffers, launch.buffers + launch.buffer_count, arguments, [](void* const& buffer) { return const_cast<void**>(&buffer); });
    arguments[launch.buffer_count] = const_cast<void*>(launch.params);
    error = cudaLaunchKernel(kernel, blocks, threads, arguments, scratch_of(shape), stream);
  }
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, "jax_fusednorm: " + spelled(launch) + " on " + std::to_string(blocks) + " blocks of " +
                                                   std::to_string(threads) + " threads: " + cudaGetErrorString(error));
}

}  // namespace

ffi::Error run(Context stream, const Launch* launches, int count) {
  for (int i = 0; i < count; ++i)
    if (ffi::Error error = run(stream, launches[i]); error.failure()) return error;
  return ffi::Error::Success();
}

std::string status(bool* usable) {
  static const Status found = ask();
  *usable = found.usable;
  return found.text;
}

void poison_outputs(bool on) { poison = on; }

}  // namespace launcher
