#include "launch/cuda/launcher.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "launch/cuda/compile.h"
#include "launch/text.h"

namespace launcher {
namespace {

namespace ffi = xla::ffi;
using cuda::driver;
using cuda::Target;

std::atomic<bool> poison{false};
thread_local bool preparing = false;

// Of a multiprocessor, at least: 128 registers a thread at most, or 64 of a kernel that streams.
int resident_threads(const Launch& launch, const Shape& shape) { return launch.streams && shape.r <= 2 ? 1024 : 512; }

// The kernel as CUDA takes one: its parameters one by one, then what Metal says by attributes.
std::string entry(const Launch& launch, const Shape& shape, const std::string& name) {
  const int threads = threads_of(shape), parameters = launch.buffer_count + 1;
  std::string types, values;
  for (int i = 0; i < parameters; ++i) {
    const std::string number = std::to_string(i), comma = i ? ", " : "";
    types += comma + "Parameter<decltype(" + name + "), " + number + ">::type p" + number;
    values += "p" + number + ", ";
  }
  return "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(threads) + ", " +
         std::to_string(resident_threads(launch, shape) / threads) + ") " + word_of(name) + "(" + types + ") {\n  extern __shared__ float scratch[];\n  " +
         name + "(" + values + "scratch, blockIdx.x, threadIdx.x % SIMD_WIDTH, simdgroup_of_thread<" + std::to_string(shape.sg) + ">());\n}\n";
}

// A kernel with all its template arguments for one architecture, compiled and loaded when first wanted. What failed once is not tried again.
struct Instance {
  std::mutex lock;
  std::atomic<cuda::Kernel> kernel{nullptr};
  std::string error;
};

// One library serves every device and context; the driver loads it into those where it is launched.
std::string load(const std::string& code, const std::string& function, cuda::Kernel* kernel) {
  int mode = 2;  // relaxed: a stream may be recorded meanwhile, and nothing here is part of that
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  cuda::Library library = nullptr;
  cuda::Result error = driver().cuLibraryLoadData(&library, code.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (!error) error = driver().cuLibraryGetKernel(kernel, library, function.c_str());
  driver().cuThreadExchangeStreamCaptureMode(&mode);
  return error ? "the driver does not load it: " + cuda::words_of(error) : "";
}

// The words that say what went wrong; empty if nothing did.
std::string ready(const Launch& launch, const Shape& shape, const Target& target, cuda::Kernel* kernel) {
  const std::string name = spelled(launch, shape);
  Instance& instance = named<Instance>(cuda::spelled(target) + " " + name);
  if ((*kernel = instance.kernel)) return "";
  std::lock_guard<std::mutex> guard(instance.lock);
  if (!instance.kernel && instance.error.empty()) {
    const char* const text = text_of(launch.kernel);
    std::string why, code;
    if (!text) why = "the library has no such kernel";
    else code = cuda::compile(text + entry(launch, shape, name), launch.kernel, target, &why);
    if (why.empty()) why = load(code, word_of(name), kernel);
    if (why.empty()) instance.kernel = *kernel;
    else instance.error = name + " for " + cuda::spelled(target) + ": " + why;
  }
  *kernel = instance.kernel;
  return instance.error;
}

ffi::Error failed(const std::string& why) { return ffi::Error(ffi::ErrorCode::kInternal, "jax_fusednorm: " + why); }

// For the devices there are; where there are none a program may well be lowered for another machine.
ffi::Error prepare(const Launch& launch) {
  for (int architecture : driver().architectures) {
    Target target;
    cuda::Kernel kernel;
    if (cuda::target_of(architecture, &target))
      if (const std::string why = ready(launch, shape_within(launch), target, &kernel); !why.empty()) return failed(why);
  }
  return ffi::Error::Success();
}

ffi::Error launch_one(Context stream, const Launch& launch) {
  const Shape shape = shape_within(launch);
  cuda::Device device = 0;
  Target target;
  cuda::Kernel kernel = nullptr;
  cuda::Result error = driver().cuCtxGetDevice(&device);
  if (error || size_t(device) >= driver().architectures.size() || !cuda::target_of(driver().architectures[device], &target))
    return failed(::spelled(launch) + ": there is no device for it");
  if (const std::string why = ready(launch, shape, target, &kernel); !why.empty()) return failed(why);
  if (poison)
    for (int i = 0; i < launch.buffer_count && !error; ++i)
      if (launch.fresh[i] && launch.buffer_bytes[i]) error = driver().cuMemsetD8Async(launch.buffers[i], 0xff, launch.buffer_bytes[i], stream);
  const unsigned groups = groups_of(launch, shape), threads = threads_of(shape);
  if (groups && !error) {
    void* arguments[17];
    std::transform(launch.buffers, launch.buffers + launch.buffer_count, arguments, [](void* const& buffer) { return const_cast<void**>(&buffer); });
    arguments[launch.buffer_count] = const_cast<void*>(launch.params);
    error = driver().cuLaunchKernel(kernel, groups, 1, 1, threads, 1, 1, scratch_of(shape), stream, arguments, nullptr);
  }
  if (!error) return ffi::Error::Success();
  return failed(spelled(launch, shape) + " on " + std::to_string(groups) + " blocks of " + std::to_string(threads) + " threads: " + cuda::words_of(error));
}

}  // namespace

ffi::Error run(Context stream, const Launch* launches, int count) {
  bool usable = false;
  const std::string about = status(&usable);
  if (!usable || !(preparing || driver().present)) return failed(about);
  for (int i = 0; i < count; ++i)
    if (ffi::Error error = preparing ? prepare(launches[i]) : launch_one(stream, launches[i]); error.failure()) return error;
  return ffi::Error::Success();
}

// Asked when a call is first lowered, never while the library is loaded. Without a driver nothing runs here, but a program may well be
// lowered for a machine that has one.
std::string status(bool* usable) {
  struct Found {
    bool usable;
    std::string text;
  };
  static const Found& found = *new Found([]() -> Found {
    if (!driver().why.empty()) return {false, driver().why};
    if (!driver().present) return {true, "there is no NVIDIA GPU here"};
    const cuda::Nvrtc& rtc = cuda::nvrtc();
    if (!rtc.why.empty()) return {false, rtc.why};
    const std::string version = "NVRTC " + std::to_string(rtc.major) + "." + std::to_string(rtc.minor);
    std::string targets;
    for (int architecture : driver().architectures) {
      Target target;
      if (!cuda::target_of(architecture, &target)) return {false, version + " compiles for no architecture up to sm_" + std::to_string(architecture)};
      const std::string word = cuda::spelled(target);
      if (targets.find(word) == std::string::npos) targets += (targets.empty() ? "" : ", ") + word;
    }
    return {true, "compiled by " + version + " for " + targets};
  }());
  *usable = found.usable;
  return found.text;
}

void poison_outputs(bool on) { poison = on; }

Preparing::Preparing() { preparing = true; }
Preparing::~Preparing() { preparing = false; }

}  // namespace launcher
