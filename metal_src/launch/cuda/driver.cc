#include "launch/cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <sstream>

namespace cuda {
namespace {

std::string& nvrtc_paths() {
  static std::string& paths = *new std::string;
  return paths;
}
std::string& folder() {
  static std::string& path = *new std::string;
  return path;
}

// The name of the first function that a loaded library lacks; null if it has all.
#define FIND(name, ...) \
  if (!(found->name = reinterpret_cast<Result (*)(__VA_ARGS__)>(dlsym(handle, #name)))) return #name;
const char* find(void* handle, Driver* found) {
  DRIVER_FUNCTIONS(FIND)
  return nullptr;
}
const char* find(void* handle, Nvrtc* found) {
  NVRTC_FUNCTIONS(FIND)
  return nullptr;
}
#undef FIND

Driver load_driver() {
  Driver found;
  const char* const instead = std::getenv("JAX_FUSEDNORM_CUDA_DRIVER");  // tests
  void* const handle = dlopen(instead ? instead : "libcuda.so.1", RTLD_NOW);
  if (!handle) return found;
  const char* const lacking = find(handle, &found);
  if (found.cuDriverGetVersion) found.cuDriverGetVersion(&found.version);
  if (lacking || found.version < oldest_driver) {
    found.why = "this machine's NVIDIA driver is for CUDA " + dotted(found.version) + ", and 12.0 or newer is needed: update the driver";
    return found;
  }
  int devices = 0;
  Result error = found.cuInit(0);
  if (!error) error = found.cuDeviceGetCount(&devices);
  if (error == no_device || (!error && !devices)) return found;
  found.present = !error;
  const char* words = nullptr;
  if (error) found.why = "no device can be used: " + std::string(!found.cuGetErrorString(error, &words) && words ? words : "the driver gave no reason");
  for (int d = 0; d < devices; ++d) {
    Device device = 0;
    int major = 0, minor = 0;
    found.cuDeviceGet(&device, d);
    found.cuDeviceGetAttribute(&major, 75, device);  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
    found.cuDeviceGetAttribute(&minor, 76, device);
    found.architectures.push_back(10 * major + minor);
    if (found.architectures.back() < oldest_architecture)
      found.why = "device " + std::to_string(d) + " is sm_" + std::to_string(found.architectures.back()) + ", and the kernels need sm_80 or newer";
  }
  return found;
}

Nvrtc load_nvrtc() {
  const std::string install = "`pip install nvidia-cuda-nvrtc`, or of CUDA 12 `pip install nvidia-cuda-nvrtc-cu12`, brings it, as jax[cuda13] and "
                              "jax[cuda12] do";
  std::string why = "NVRTC, CUDA's compiler of kernels, was not found: " + install;
  std::istringstream paths(nvrtc_paths());
  for (std::string path; std::getline(paths, path);) {
    Nvrtc found;
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) continue;
    int count = 0;
    if (find(handle, &found) || found.nvrtcVersion(&found.major, &found.minor) || found.nvrtcGetNumSupportedArchs(&count)) continue;
    if (found.major > driver().version / 1000) {
      why = "NVRTC " + std::to_string(found.major) + "." + std::to_string(found.minor) + ", in " + path + ", is newer than this machine's driver, for CUDA " +
            dotted(driver().version) + ": update the driver, or install an older NVRTC (" + install + ")";
      continue;
    }
    found.architectures.resize(count);
    found.nvrtcGetSupportedArchs(found.architectures.data());
    return found;
  }
  Nvrtc none;
  none.why = why;
  return none;
}

}  // namespace

void configure(const std::string& nvrtc, const std::string& cache) {
  nvrtc_paths() = nvrtc;
  folder() = cache;
}
const std::string& cache_folder() { return folder(); }

const Driver& driver() {
  static const Driver& found = *new Driver(load_driver());
  return found;
}

const Nvrtc& nvrtc() {
  static const Nvrtc& found = *new Nvrtc(load_nvrtc());
  return found;
}

std::string words_of(Result result) {
  const char *name = nullptr, *words = nullptr;
  if (driver().cuGetErrorName(result, &name) || driver().cuGetErrorString(result, &words) || !name || !words) return "error " + std::to_string(result);
  return std::string(name) + ", " + words;
}

}  // namespace cuda
