// newLibraryWithSource: the very text that Apple's compiler would get, compiled for the emulator and kept beside this library.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "emulator/emulator.h"
#include "kernel_texts.h"

namespace standin {
namespace {

const char instantiation[] = "template [[host_name(\"";

// A launcher that brings another text than this tree's is stale, or assembles it differently.
bool known(const std::string& text) {
  for (auto* entry = kernel_texts; entry->kernel; ++entry)
    if (text == entry->text) return true;
  return false;
}

void write_file(const std::string& path, const std::string& text) {
  if (FILE* f = fopen(path.c_str(), "w")) {
    fwrite(text.data(), 1, text.size(), f);
    fclose(f);
  }
}

// What a command prints, if it fails.
std::string shell(const std::string& command) {
  std::string output;
  FILE* f = popen(("(" + command + ") 2>&1").c_str(), "r");
  if (!f) return "cannot run " + command;
  char part[4096];
  while (size_t n = fread(part, 1, sizeof part, f)) output.append(part, n);
  return pclose(f) ? output + command : "";
}

// The library compiled from a text whose instantiations are `kernels`; its path without the suffix.
std::string build(const std::string& text, const std::vector<std::string>& kernels, std::string* error) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&known), &self);
  const std::string folder = std::string(self.dli_fname, strrchr(self.dli_fname, '/')) + "/cache";
  const std::string path = folder + "/" + std::to_string(hash), mine = path + "." + std::to_string(getpid());
  if (!::access((path + ".so").c_str(), R_OK)) return path;
  mkdir(folder.c_str(), 0777);
  std::string whole = "#include \"compat/emulated.h\"\n" + text + "EMULATED_KERNELS = {";
  for (const std::string& kernel : kernels) whole += "emulated<&" + kernel + ">(\"" + kernel + "\"), ";
  write_file(mine + ".cc", whole + "};\n");
  const char flags[] = " -std=c++17 -O1 -g -w -fno-exceptions -fsanitize=thread -fPIC -fvisibility=hidden"
                       " -I" SOURCES " -I" SOURCES "/compat/include -c ";
  *error = shell(COMPILER + (flags + mine) + ".cc -o " + mine + ".o && " COMPILER " -shared " + mine + ".o -o " + mine + ".so");
  if (error->empty()) rename((mine + ".so").c_str(), (path + ".so").c_str());
  for (const char* suffix : {".cc", ".o"}) unlink((mine + suffix).c_str());
  return path;
}

}  // namespace

Source compile(const std::string& text) {
  Source source;
  const size_t lines = text.find(std::string("\n") + instantiation) + 1;
  if (!known(text.substr(0, lines)) && complain("source", "newLibraryWithSource: the text is not one that this stand-in was built from")) {
    source.error = "the text is not of this tree";
    return source;
  }
  std::vector<std::string> names, kernels;
  for (size_t at = lines; at && at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    char name[256], kernel[256], again[256];
    int length = 0;
    sscanf(line.c_str(), "template [[host_name(\"%255[^\"]\")]] [[kernel]] decltype(%255[^)]) %255[^;];%n", name, kernel, again, &length);
    if (length != int(line.size()) || strcmp(kernel, again)) {
      source.error = "not an instantiation: " + line;
      return source;
    }
    names.push_back(name);
    kernels.push_back(kernel);
  }
  static std::mutex one;
  std::lock_guard<std::mutex> guard(one);
  const std::string path = build(text, kernels, &source.error) + ".so";
  if (!source.error.empty()) return source;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    source.error = dlerror();
    return source;
  }
  *static_cast<const Emulator**>(dlsym(library, "emulator")) = emulator_functions();
  auto* compiled = static_cast<const EmulatedKernel*>(dlsym(library, "emulated_kernels"));
  for (size_t i = 0; i < kernels.size(); ++i) source.kernels[names[i]] = compiled + i;
  return source;
}

}  // namespace standin
