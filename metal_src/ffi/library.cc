// What Python asks of a library before it uses it.
#include <cstdlib>

#include "ffi/handler.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

namespace {
std::string& targets() {
  static std::string names;
  return names;
}
}  // namespace

Target::Target(const char* kernel) { targets() += (targets().empty() ? "" : ",") + std::string(kernel); }

extern "C" {

// key=value;...: the package version and ABI it was built from, the XLA FFI minor version of its headers, its targets.
__attribute__((visibility("default"))) const char* jax_fusednorm_describe() {
  static const std::string text = "version=" VERSION ";abi=" TEXT(ABI) ";ffi=" TEXT(XLA_FFI_API_MINOR) ";targets=" + targets();
  return text.c_str();
}

// What runs the kernels, for people; or, where *usable becomes 0, why nothing does. Valid until the thread asks again.
__attribute__((visibility("default"))) const char* jax_fusednorm_status(int* usable) {
  static thread_local std::string text;
  bool can = false;
  text = launcher::status(&can);
  *usable = can;
  return text.c_str();
}

__attribute__((visibility("default"))) void jax_fusednorm_poison_outputs(int on) { launcher::poison_outputs(on != 0); }

}  // extern "C"
