// sanitize LIBRARY CALLS NVRTC CACHE: makes every custom call of a list, twice, as XLA would, on arrays of their own. sanitize.py writes the
// list, one call a line as launch/cuda/frame.h reads it, and says where the library finds NVRTC and the kernels compiled so far. Integers are
// small the first time, and the second time whatever a 32-bit integer can be. Results start as NaN, and none may be left.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "launch/cuda/frame.h"

namespace {

[[noreturn]] void fail(const std::string& call, const std::string& why) {
  std::fprintf(stderr, "%s\n%s\n", call.c_str(), why.c_str());
  std::exit(1);
}

void expect(const std::string& call, cudaError_t error) {
  if (error != cudaSuccess) fail(call, cudaGetErrorString(error));
}

using frame::Array;
using frame::Call;

std::vector<unsigned char> drawn(const Array& array, bool any_integer, std::mt19937& random) {
  std::vector<unsigned char> bytes(array.bytes);
  const size_t size = array.dtype->bytes;
  const bool integer = array.dtype->code == XLA_FFI_DataType_S32;
  for (size_t i = 0; i < array.bytes; i += size) {
    // +-1 to 2 in float32, in bfloat16 its upper half; as a float16, that is +-1.9
    uint32_t bits = 0x3f800000 | (random() & 0x807fffff);
    if (integer) bits = any_integer ? uint32_t(int32_t(random()) >> random() % 32) : 3 * (i / size) % 7;
    std::memcpy(&bytes[i], reinterpret_cast<const char*>(&bits) + 4 - size, size);
  }
  return bytes;
}

// Memory of exactly so many bytes, kept for the next call that wants as many: to allocate takes longer than to launch.
std::multimap<size_t, void*> spare;

void* allocated(const std::string& call, size_t bytes) {
  void* data = nullptr;
  if (const auto found = spare.find(bytes); found != spare.end()) {
    data = found->second;
    spare.erase(found);
  } else if (bytes) {
    expect(call, cudaMalloc(&data, bytes));
  }
  return data;
}

void make(const std::string& line, Call& call, XLA_FFI_Handler* handler, bool any_integer, std::mt19937& random) {
  for (auto& array : call.in) {
    const std::vector<unsigned char> values = drawn(*array, any_integer, random);
    array->data = allocated(line, array->bytes);
    expect(line, cudaMemcpy(array->data, values.data(), array->bytes, cudaMemcpyHostToDevice));
  }
  for (auto& array : call.out) {
    array->data = array->alias < 0 ? allocated(line, array->bytes) : call.in[array->alias]->data;
    if (array->alias < 0) expect(line, cudaMemset(array->data, 0xff, array->bytes));
  }

  if (const std::string why = call.make(handler); !why.empty()) fail(line, why);
  expect(line, cudaDeviceSynchronize());

  for (auto& array : call.out) {
    if (array->alias >= 0) continue;
    std::vector<unsigned char> got(array->bytes);
    expect(line, cudaMemcpy(got.data(), array->data, array->bytes, cudaMemcpyDeviceToHost));
    const std::vector<unsigned char> unwritten(array->dtype->bytes, 0xff);
    for (size_t i = 0; i < got.size(); i += unwritten.size())
      if (!std::memcmp(&got[i], unwritten.data(), unwritten.size())) fail(line, "element " + std::to_string(i / unwritten.size()) + " is unwritten");
    spare.emplace(array->bytes, array->data);
  }
  for (auto& array : call.in) spare.emplace(array->bytes, array->data);
}

}  // namespace

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) fail(argv[1], dlerror());
  reinterpret_cast<void (*)(const char*, const char*)>(dlsym(library, "jax_fusednorm_configure"))(argv[3], argv[4]);
  std::ifstream calls(argv[2]);
  std::mt19937 random(1);
  int made = 0;
  for (std::string line; std::getline(calls, line); ++made) {
    Call call = frame::parse(line);
    const auto handler = reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, call.handler.c_str()));
    if (!handler) fail(line, dlerror());
    for (bool any_integer : {false, true}) make(line, call, handler, any_integer, random);
    if (made % 250 == 249) std::printf("%d calls made\n", made + 1), std::fflush(stdout);
  }
  std::printf("%d calls, each made twice\n", made);
}
