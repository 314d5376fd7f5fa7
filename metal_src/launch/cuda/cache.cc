#include "launch/cuda/cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "launch/cuda/driver.h"

namespace cuda {
namespace {

namespace fs = std::filesystem;

constexpr uintmax_t most_bytes = 64 << 20;

// FNV-1a, in hexadecimal. Nobody is to be kept from making two texts of one hash, and the key is compared itself.
std::string hash_of(const std::string& bytes) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

// What stands in front of the code.
std::string head_of(const std::string& key, const std::string& text) {
  return "jax_fusednorm " VERSION "\n" + key + "\n" + std::to_string(text.size()) + " " + hash_of(text) + "\n";
}

fs::path path_of(const std::string& head) { return fs::path(cache_folder()) / (hash_of(head) + ".kernel"); }

// Removes the files that were not used for longest, until the rest takes three quarters of what may be there.
void shrink(const fs::path& folder) {
  struct File {
    fs::file_time_type used;
    uintmax_t bytes;
    fs::path path;
  };
  std::vector<File> files;
  std::error_code error;
  uintmax_t bytes = 0;
  for (fs::directory_iterator each(folder, error), end; !error && each != end; each.increment(error)) {
    std::error_code gone;  // by another process
    const File file = {each->last_write_time(gone), each->file_size(gone), each->path()};
    if (gone) continue;
    files.push_back(file);
    bytes += file.bytes;
  }
  if (bytes <= most_bytes) return;
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used < b.used; });
  for (const File& file : files) {
    if (bytes <= most_bytes / 4 * 3) return;
    if (fs::remove(file.path, error)) bytes -= file.bytes;
  }
}

}  // namespace

std::string kept(const std::string& key, const std::string& text) {
  if (cache_folder().empty()) return "";
  const std::string head = head_of(key, text);
  const fs::path path = path_of(head);
  std::ifstream file(path, std::ios::binary);
  std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t start = head.size() + 17;  // after the code's own hash, and the end of its line
  if (all.size() <= start || all.compare(0, head.size(), head)) return "";
  std::string code = all.substr(start);
  if (all.compare(head.size(), 17, hash_of(code) + "\n")) return "";
  std::error_code ignored;
  fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);
  return code;
}

void keep(const std::string& key, const std::string& text, const std::string& code) {
  if (cache_folder().empty()) return;
  static std::atomic<int> number{0};
  const std::string head = head_of(key, text);
  const fs::path path = path_of(head), aside = path.string() + "." + std::to_string(getpid()) + "." + std::to_string(number++);
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  std::ofstream file(aside, std::ios::binary);
  file << head << hash_of(code) << "\n" << code;
  file.close();
  if (file) fs::rename(aside, path, error);
  if (!file || error) fs::remove(aside, error);
  else shrink(path.parent_path());
}

}  // namespace cuda
