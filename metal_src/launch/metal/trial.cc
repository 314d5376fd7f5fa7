#include "launch/metal/trial.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

namespace ffi = xla::ffi;

constexpr size_t alignment = 64;  // of XLA's arrays, which a copy keeps

struct Copy {
  size_t bytes = 0;
  bool written = false;
  std::vector<char> memory;

  char* data(const void* original) {
    const size_t off = (uintptr_t(original) - uintptr_t(memory.data())) % alignment;
    return memory.data() + off;
  }
};

// All that the thread touches, shared with it: it may outlive the call.
struct Trial {
  std::vector<Launch> launches;
  std::vector<std::vector<char>> params;
  std::map<void*, Copy> copies;  // by the address of the array; those that start at one address are one
  std::mutex lock;
  std::condition_variable done;
  bool finished = false;
  ffi::Error error = ffi::Error::Success();

  Trial(const Launch* first, int count) : launches(first, first + count), params(count) {
    for (const Launch& launch : launches)
      for (int i = 0; i < launch.buffer_count; ++i) {
        Copy& copy = copies[launch.buffers[i]];
        if (copy.bytes < launch.buffer_bytes[i]) copy.bytes = launch.buffer_bytes[i];
        copy.written |= launch.written[i];
      }
    for (auto& [array, copy] : copies) {
      copy.memory.resize(copy.bytes + alignment);
      if (copy.bytes) std::memcpy(copy.data(array), array, copy.bytes);
    }
    for (int i = 0; i < count; ++i) {
      Launch& launch = launches[i];
      const char* const bytes = static_cast<const char*>(launch.params);
      params[i].assign(bytes, bytes + launch.params_bytes);
      launch.params = params[i].data();
      for (int b = 0; b < launch.buffer_count; ++b) launch.buffers[b] = copies[launch.buffers[b]].data(launch.buffers[b]);
    }
  }

  void write_back() {
    for (auto& [array, copy] : copies)
      if (copy.written && copy.bytes) std::memcpy(array, copy.data(array), copy.bytes);
  }
};

std::atomic<const std::string*> hung{nullptr};

ffi::Error hanging() { return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, *hung.load()); }

}  // namespace

double trial_seconds() {
  static const double seconds = [] {
    const char* const asked = std::getenv("JAX_FUSEDNORM_SELF_CHECK");
    return asked && *asked ? std::atof(asked) : 10.0;
  }();
  return seconds;
}

const char* trial_hung() {
  const std::string* const text = hung.load();
  return text ? text->c_str() : nullptr;
}

ffi::Error on_trial(ffi::Error (*attempt)(const Launch*, int), const std::string& names, const Launch* launches, int count) {
  if (hung.load()) return hanging();
  const auto trial = std::make_shared<Trial>(launches, count);
  std::thread([trial, attempt] {
    ffi::Error error = attempt(trial->launches.data(), int(trial->launches.size()));
    std::lock_guard<std::mutex> guard(trial->lock);
    trial->error = std::move(error);
    trial->finished = true;
    trial->done.notify_all();
  }).detach();
  std::unique_lock<std::mutex> guard(trial->lock);
  if (trial->done.wait_for(guard, std::chrono::duration<double>(trial_seconds()), [&] { return trial->finished; })) {
    if (trial->error.success()) trial->write_back();
    return trial->error;
  }
  char text[512];
  std::snprintf(text, sizeof text, "Metal did not finish %s in %g seconds, and runs nothing new in this process", names.c_str(), trial_seconds());
  const std::string* none = nullptr;
  hung.compare_exchange_strong(none, new std::string(text));
  return hanging();
}
