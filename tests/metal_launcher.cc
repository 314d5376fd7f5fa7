// Calls the Metal launcher as handlers do, for sanitizers and a stand-in driver to watch. Prints "right", or all that went wrong.
//   threads COUNT CALLS       many threads at once
//   chain                     two dispatches in one command buffer, the second on the first one's result
//   call KERNEL ROWS WIDTH    one call, or several (ROWS WIDTH ...): what a call that fails leaves in its arrays is looked at
//   large                     buffers for copies that are too many bytes to keep
//   status                    what the launcher says of itself
// The stand-in is the file that STANDIN names.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernel_texts.h"
#include "launch/metal/launcher.h"
#include "launch/metal/metal.h"
typedef uint32_t uint;
#include "kernels/params.h"

extern "C" uint64_t jax_fusednorm_longest_array();

namespace {

constexpr float epsilon = 0.5f;

std::vector<float> norm(const float* x, uint32_t rows, uint32_t width, float scale) {
  std::vector<float> normed;
  for (uint32_t r = 0; r < rows; ++r, x += width) {
    double squares = 0;
    for (uint32_t i = 0; i < width; ++i) squares += double(x[i]) * x[i];
    for (uint32_t i = 0; i < width; ++i) normed.push_back(float(x[i] / std::sqrt(squares / width + epsilon) * scale));
  }
  return normed;
}

const char* (*complaints)();
long (*standin_count)(const char*);

bool close(const float* got, const std::vector<float>& want) {
  for (size_t i = 0; i < want.size(); ++i)
    if (!(std::fabs(got[i] - want[i]) <= 1e-5)) return false;
  return true;
}

// An array `floats_off` a boundary of 64 bytes.
struct Array {
  explicit Array(size_t floats, size_t floats_off)
      : memory(static_cast<float*>(std::aligned_alloc(64, (floats + 31) / 16 * 64))), data(memory + floats_off) {
    for (size_t i = 0; i < floats; ++i) data[i] = float(i % 13) - 5;
  }
  ~Array() { std::free(memory); }
  bool untouched(size_t floats) const {
    for (size_t i = 0; i < floats; ++i)
      if (data[i] != float(i % 13) - 5) return false;
    return true;
  }
  float *const memory, *const data;
};

// One rms_norm<float>; what went wrong, or nothing.
std::string call(uint32_t rows, uint32_t width, bool with_scale, size_t floats_off, const char* kernel = "rms_norm") {
  const size_t bytes = rows * width * sizeof(float);
  const Array x(rows * width, floats_off), normed(rows * width, floats_off);
  std::vector<float> scale(width, 2.0f);
  struct {
    uint32_t width;
    Argument storage = Argument::Float;
  } const at{width};
  const NormParams params{rows, width, epsilon, 0.0f};
  Launch launch(kernel);
  launch.specialize(Argument::Float, with_scale ? Argument::Float : Argument::Ones, Argument::False);
  launch.bind(x.data, bytes, false);
  launch.bind(with_scale ? scale.data() : x.data, with_scale ? width * sizeof(float) : bytes, false);
  launch.bind(normed.data, bytes, true);
  launch.over(rows, at, 0, 0, params);
  launcher::Context context(nullptr, nullptr);
  const xla::ffi::Error error = launcher::run(context, &launch, 1);
  if (error.failure()) return error.message() + (normed.untouched(rows * width) && x.untouched(rows * width) ? "" : "\nthe arrays are touched");
  return close(normed.data, norm(x.data, rows, width, with_scale ? 2 : 1)) ? "" : "a wrong value";
}

// Every thread wants the same kernels first, and then others.
std::string calls(int thread, int count) {
  const uint32_t widths[] = {64, 300, 2048};
  for (int i = 0; i < count; ++i)
    if (const std::string failure = call(1 + thread % 3, widths[(thread / 4 + i) % 3], i % 2, i % 5 == 4); !failure.empty()) return failure;
  return "";
}

const char* compiled(MetalPipeline* pipeline) {
  const char* const instance = "rms_norm<float, ones, false, 4, 1, 1, 1>";
  std::string text;
  for (auto* each = kernel_texts; each->kernel; ++each)
    if (!std::strcmp(each->kernel, "rms_norm")) text = each->text;
  text += std::string("template [[host_name(\"k\")]] [[kernel]] decltype(") + instance + ") " + instance + ";\n";
  const char* const error = metal_unavailable();
  return error ? error : metal_compile(text.c_str(), "k", pipeline);
}

std::string chain() {
  MetalPipeline pipeline;
  if (const char* error = compiled(&pipeline)) return error;
  const Array x(64, 0), y(64, 0), z(64, 0);
  const MetalArray in{x.data, 256, false}, between{y.data, 256, true}, out{z.data, 256, true};
  const MetalArray first[] = {in, in, between}, second[] = {between, between, out};
  const NormParams params{1, 64, epsilon, 0.0f};
  const MetalDispatch dispatches[] = {{pipeline, first, 3, &params, sizeof params, 1, 32, 0},
                                      {pipeline, second, 3, &params, sizeof params, 1, 32, 0}};
  if (const char* error = metal_run(dispatches, 2)) return error;
  return close(z.data, norm(norm(x.data, 1, 64, 1).data(), 1, 64, 1)) ? "" : "a wrong value";
}

// A buffer that alone is more than is kept, and then small ones, which are.
std::string large() {
  constexpr size_t bytes = 257 << 20;
  MetalPipeline pipeline;
  if (const char* error = compiled(&pipeline)) return error;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const Array x(64, 0), y(64, 0);
  const NormParams params{1, 64, epsilon, 0.0f};
  std::string counted;
  for (const MetalArray& in : {MetalArray{memory, bytes, false}, {x.data, 256, false}, {x.data, 256, false}}) {
    const MetalArray arrays[] = {in, in, {y.data, 256, true}};
    const MetalDispatch dispatch{pipeline, arrays, 3, &params, sizeof params, 1, 32, 0};
    if (const char* error = metal_run(&dispatch, 1)) return error;
    for (const char* what : {"live MTLBuffer", "sent newBufferWithLength:options:"}) counted += std::to_string(standin_count(what)) + " ";
  }
  return counted == "1 2 2 3 2 3 " ? "" : "buffers kept and made, after each call: " + counted;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = arguments[1];
  if (void* const standin = dlopen(std::getenv("STANDIN"), RTLD_NOW)) {
    complaints = reinterpret_cast<const char* (*)()>(dlsym(standin, "standin_complaints"));
    standin_count = reinterpret_cast<long (*)(const char*)>(dlsym(standin, "standin_count"));
  }
  std::vector<std::string> failures(1);
  if (what == "chain") {
    failures[0] = chain();
  } else if (what == "large") {
    failures[0] = large();
  } else if (what == "status") {
    bool usable;
    std::printf("%s, arrays of up to %zu bytes\n", launcher::status(&usable).c_str(), size_t(jax_fusednorm_longest_array()));
  } else if (what == "call") {
    launcher::poison_outputs(true);
    for (int i = 3; i + 1 < count; i += 2) failures.push_back(call(std::atoi(arguments[i]), std::atoi(arguments[i + 1]), false, 0, arguments[2]));
  } else {
    failures.resize(std::atoi(arguments[2]));
    std::vector<std::thread> threads;
    for (size_t t = 0; t < failures.size(); ++t) threads.emplace_back([&, t] { failures[t] = calls(int(t), std::atoi(arguments[3])); });
    for (std::thread& thread : threads) thread.join();
    if (standin_count("live MTLBuffer") > 32) failures.push_back("more than 32 buffers are kept");
  }
  if (complaints) failures.push_back(complaints());
  int status = 0;
  for (const std::string& failure : failures)
    if (!failure.empty()) status = 1, std::fprintf(stderr, "%s\n", failure.c_str());
  if (!status) std::puts("right");
  return status;
}
