// From a kernel's text to what the driver loads.
#pragma once
#include <string>

namespace cuda {

// What kernels are compiled to for devices of one architecture.
struct Target {
  int architecture = 0;  // the newest that NVRTC knows, up to theirs
  bool exact = false;    // machine code; else PTX, which the driver compiles on
};
bool target_of(int architecture, Target* target);  // false: NVRTC knows none
std::string spelled(const Target& target);         // "sm_90", or "compute_90"

// The code of `text`, from the folder of compiled kernels or from NVRTC. On failure an empty string, and what NVRTC says of it in *error.
std::string compile(const std::string& text, const std::string& name, const Target& target, std::string* error);

}  // namespace cuda
