// What is used of CUDA's driver and of NVRTC, its compiler of kernels: both declared here and loaded when first wanted, so that nothing of
// CUDA is needed to build the library or to load it.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace cuda {

typedef int Result;  // of the driver and of NVRTC: 0 is success
typedef int Device;
typedef struct CUstream_st* Stream;
typedef struct CUlib_st* Library;
typedef struct CUkern_st* Kernel;
typedef struct _nvrtcProgram* Program;

constexpr int oldest_driver = 12000;     // the first whose libraries serve every device and every context
constexpr int oldest_architecture = 80;  // the first that converts to bfloat16
constexpr int no_device = 100;           // a Result

#define DRIVER_FUNCTIONS(F)                                                                                                             \
  F(cuInit, unsigned)                                                                                                                   \
  F(cuDriverGetVersion, int*)                                                                                                           \
  F(cuGetErrorName, Result, const char**)                                                                                               \
  F(cuGetErrorString, Result, const char**)                                                                                             \
  F(cuDeviceGetCount, int*)                                                                                                             \
  F(cuDeviceGet, Device*, int)                                                                                                          \
  F(cuDeviceGetAttribute, int*, int, Device)                                                                                            \
  F(cuCtxGetDevice, Device*)                                                                                                            \
  F(cuThreadExchangeStreamCaptureMode, int*)                                                                                            \
  F(cuLibraryLoadData, Library*, const void*, void*, void*, unsigned, void*, void*, unsigned)                                           \
  F(cuLibraryGetKernel, Kernel*, Library, const char*)                                                                                  \
  F(cuLaunchKernel, Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**)               \
  F(cuMemsetD8Async, void*, unsigned char, size_t, Stream)

#define NVRTC_FUNCTIONS(F)                                                               \
  F(nvrtcVersion, int*, int*)                                                            \
  F(nvrtcGetNumSupportedArchs, int*)                                                     \
  F(nvrtcGetSupportedArchs, int*)                                                        \
  F(nvrtcCreateProgram, Program*, const char*, const char*, int, const char**, const char**) \
  F(nvrtcDestroyProgram, Program*)                                                       \
  F(nvrtcCompileProgram, Program, int, const char**)                                     \
  F(nvrtcGetProgramLogSize, Program, size_t*)                                            \
  F(nvrtcGetProgramLog, Program, char*)                                                  \
  F(nvrtcGetCUBINSize, Program, size_t*)                                                 \
  F(nvrtcGetCUBIN, Program, char*)                                                       \
  F(nvrtcGetPTXSize, Program, size_t*)                                                   \
  F(nvrtcGetPTX, Program, char*)

#define MEMBER(name, ...) Result (*name)(__VA_ARGS__) = nullptr;

struct Driver {
  DRIVER_FUNCTIONS(MEMBER)
  bool present = false;            // else there is none, or no device, and nothing is to be run here
  int version = 0;
  std::vector<int> architectures;  // of each device: 90 is sm_90
  std::string why;                 // nothing can be run, although there is a driver; else empty
};

struct Nvrtc {
  NVRTC_FUNCTIONS(MEMBER)
  int major = 0, minor = 0;
  std::vector<int> architectures;  // that it knows, in ascending order
  std::string why;                 // it cannot be used; else empty
};

#undef MEMBER

// Where NVRTC may lie, one path a line, and the folder of the compiled kernels, or nothing: said once, before anything is asked.
void configure(const std::string& nvrtc, const std::string& cache);
const std::string& cache_folder();

const Driver& driver();
const Nvrtc& nvrtc();  // the first that can be loaded and is not newer than the driver

std::string words_of(Result of_driver);
inline std::string dotted(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

}  // namespace cuda
