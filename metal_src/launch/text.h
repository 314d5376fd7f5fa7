// Kernels that a GPU's driver compiles from their text when they are first wanted: what their launchers share. The library's own
// kernel_texts.h has the texts, made by embed.py for its compiler.
#pragma once
#include <cctype>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kernel_texts.h"
#include "launch/launch.h"
#include "launch/shape.h"

namespace launcher {

// The text that defines a kernel; null if there is none.
inline const char* text_of(const char* kernel) {
  for (auto* each = kernel_texts; each->kernel; ++each)
    if (!std::strcmp(each->kernel, kernel)) return each->text;
  return nullptr;
}

// The shape that a width wants, if a threadgroup may have `most` simdgroups.
inline Shape shape_within(const Launch& launch, int most = most_simdgroups) {
  return launch.heads ? shape_of_head(launch.width, launch.element_bytes, most)
                      : shape_of(launch.width, launch.element_bytes, launch.aligned, most);
}

inline int threads_of(const Shape& shape) { return shape.teams * shape.sg * simd_width; }
inline uint32_t groups_of(const Launch& launch, const Shape& shape) { return uint32_t((uint64_t(launch.teams) + shape.teams - 1) / shape.teams); }

// The kernel's name with all its template arguments.
inline std::string spelled(const Launch& launch, const Shape& shape) {
  std::string name = ::spelled(launch);
  name.pop_back();
  for (int number : {shape.v, shape.r, shape.sg, shape.teams}) name += ", " + std::to_string(number);
  return name + ">";
}

// The same as one word.
inline std::string word_of(std::string name) {
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  return name;
}

// The one of that name. They live as long as the process: calls may be under way when it ends.
template <typename T>
T& named(const std::string& name) {
  static std::mutex& lock = *new std::mutex;
  static auto& all = *new std::map<std::string, std::unique_ptr<T>>;
  std::lock_guard<std::mutex> guard(lock);
  auto& found = all[name];
  if (!found) found = std::make_unique<T>();
  return *found;
}

}  // namespace launcher
