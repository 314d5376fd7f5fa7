// cuda_call LIBRARY NVRTC CACHE: what the CUDA launcher answers to the lines of its input, one answer each: "status", "prepare CALL",
// "call CALL" (frame.h), "together CALL; CALL; ...", which prepares all at once.
#include <dlfcn.h>

#include <cstdio>
#include <iostream>
#include <thread>

#include "launch/cuda/frame.h"

namespace {

void* library;

template <typename F>
F find(const std::string& name) {
  void* const found = dlsym(library, name.c_str());
  if (!found) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
  return reinterpret_cast<F>(found);
}

XLA_FFI_Handler* handler_of(const std::string& call) { return find<XLA_FFI_Handler*>(call.substr(0, call.find(' '))); }

std::string prepared(const std::string& call) {
  const char* const why = find<const char* (*)(XLA_FFI_Handler*, const char*)>("jax_fusednorm_prepare")(handler_of(call), call.c_str());
  return why ? why : "";
}

std::string made(const std::string& line) {
  frame::Call call = frame::parse(line);
  static char memory[1];
  for (auto* group : {&call.in, &call.out})
    for (auto& array : *group) array->data = memory;
  return call.make(handler_of(line));
}

std::string answer(const std::string& line) {
  const std::string word = line.substr(0, line.find(' ')), rest = line.substr(line.find(' ') + 1);
  if (word == "prepare") return prepared(rest);
  if (word == "call") return made(rest);
  if (word == "status") {
    int usable = 0;
    const std::string text = find<const char* (*)(int*)>("jax_fusednorm_status")(&usable);
    return (usable ? "usable: " : "not usable: ") + text;
  }
  std::vector<std::thread> threads;
  std::istringstream calls(rest);
  for (std::string call; std::getline(calls, call, ';');) threads.emplace_back([call] { prepared(call.substr(call.find_first_not_of(' '))); });
  for (std::thread& thread : threads) thread.join();
  return "";
}

}  // namespace

int main(int, char** argv) {
  library = dlopen(argv[1], RTLD_NOW);
  if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
  find<void (*)(const char*, const char*)>("jax_fusednorm_configure")(argv[2], argv[3]);
  for (std::string line; std::getline(std::cin, line);) {
    std::string text = answer(line);
    for (char& c : text) c = c == '\n' ? ' ' : c;
    std::cout << text << std::endl;
  }
}
