#include "launch/cuda/compile.h"

#include <iterator>

#include "launch/cuda/cache.h"
#include "launch/cuda/driver.h"

namespace cuda {
namespace {

// No --use_fast_math: it would flush subnormals.
std::string options_of(const Target& target) { return "-arch=" + spelled(target); }

std::string taken(const Nvrtc& rtc, Program program, Result (*size_of)(Program, size_t*), Result (*get)(Program, char*)) {
  size_t bytes = 0;
  if (size_of(program, &bytes)) return "";
  std::string all(bytes, '\0');
  return get(program, &all[0]) ? "" : all;
}

}  // namespace

bool target_of(int architecture, Target* target) {
  target->architecture = 0;
  for (int known : nvrtc().architectures)
    if (known <= architecture && known >= oldest_architecture && known > target->architecture) target->architecture = known;
  target->exact = target->architecture == architecture;
  return target->architecture != 0;
}

std::string spelled(const Target& target) { return (target.exact ? "sm_" : "compute_") + std::to_string(target.architecture); }

std::string compile(const std::string& text, const std::string& name, const Target& target, std::string* error) {
  const Nvrtc& rtc = nvrtc();
  const std::string arch = options_of(target);
  const char* const options[] = {arch.c_str(), "-std=c++17", "-w"};
  std::string key = name + "\nNVRTC " + std::to_string(rtc.major) + "." + std::to_string(rtc.minor);
  for (const char* option : options) key += std::string(" ") + option;
  if (std::string code = kept(key, text); !code.empty()) return code;

  // the other words come from compat/cuda.h, in front of the text
  const char *header = "", *included = "metal_stdlib";
  Program program = nullptr;
  std::string code;
  Result result = rtc.nvrtcCreateProgram(&program, text.c_str(), name.c_str(), 1, &header, &included);
  if (!result) {
    result = rtc.nvrtcCompileProgram(program, int(std::size(options)), const_cast<const char**>(options));
    if (!result) code = target.exact ? taken(rtc, program, rtc.nvrtcGetCUBINSize, rtc.nvrtcGetCUBIN) : taken(rtc, program, rtc.nvrtcGetPTXSize, rtc.nvrtcGetPTX);
    if (code.empty()) *error = taken(rtc, program, rtc.nvrtcGetProgramLogSize, rtc.nvrtcGetProgramLog).c_str();  // up to its null
    rtc.nvrtcDestroyProgram(&program);
  }
  if (code.empty()) {
    if (error->empty()) *error = "NVRTC gave no reason, but error " + std::to_string(result);
    return "";
  }
  keep(key, text, code);
  return code;
}

}  // namespace cuda
