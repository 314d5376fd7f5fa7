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

// key=value;...: the package version and ABI it was built from, the XLA FFI minor version of its headers, a word on the build, its targets.
__attribute__((visibility("default"))) const char* jax_fusednorm_describe() {
  static const std::string text = "version=" VERSION ";abi=" TEXT(ABI) ";ffi=" TEXT(XLA_FFI_API_MINOR) ";about=" + launcher::about() +
                                  ";targets=" + targets();
  return text.c_str();
}

__attribute__((visibility("default"))) void jax_fusednorm_poison_outputs(int on) { launcher::poison_outputs(on != 0); }

}  // extern "C"
