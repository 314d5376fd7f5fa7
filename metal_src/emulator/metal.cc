// The device: libraries, pipelines and buffers.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator/objects.h"

namespace standin {
namespace {

constexpr size_t page_bytes = 16384;  // Apple silicon's, whatever this machine has
constexpr NSUInteger language_3_1 = 3 << 16 | 1;
constexpr long newest_family = 1009;  // MTLGPUFamilyApple9

struct Device : Object {
  Device() : Object("MTLDevice", true) {}
};

// Those of macOS 15 have a mode beside the older switch, and their defaults too are fast.
struct Options : Object {
  bool fast = true;
  long mode, functions;  // 0 is safe; 1 is precise
  NSUInteger version = 0;
  explicit Options(bool newer) : Object(newer ? "MTLCompileOptions" : "MTLCompileOptions of macOS 14"), mode(newer ? 2 : 0), functions(!newer) {}
};

struct Library : Object {
  const Source source;
  explicit Library(const Source& s) : Object("MTLLibrary"), source(s) {}
};

struct Function : Object {
  const EmulatedKernel* const kernel;
  explicit Function(const EmulatedKernel* k) : Object("MTLFunction"), kernel(k) {}
};

Object* failed(Object** error, const std::string& why) {
  Object* const made = autorelease(new Text("NSError", why));
  if (error) *error = made;
  return nullptr;
}

Object* refused(Object** error, const std::string& what, const EmulatedKernel* kernel) {
  return failed(error, std::string(kernel->name) + ": the " + what + " is refused, as asked for");
}

Object* new_library(Device*, SEL, Text* text, Options* options, Object** error) {
  if (!text) {
    complain("source", "newLibraryWithSource: the source is nil");
    return nullptr;
  }
  if (!options || options->fast || options->mode != 0 || options->functions != 1)
    complain("math", "newLibraryWithSource: fast math, the default, is on");
  if (!options || !options->version) complain("language", "newLibraryWithSource: the language version is left to the machine");
  if (options && options->version && options->version < language_3_1) return failed(error, "unknown type 'bfloat': it needs Metal 3.1");
  const Source source = compile(text->text);
  if (!source.error.empty()) return failed(error, source.error);
  for (auto& each : source.kernels)
    if (misbehaves("refuse source", each.second->name)) return refused(error, "source", each.second);
  return new Library(source);
}

Object* new_function(Library* library, SEL, Text* name) {
  const auto found = library->source.kernels.find(name->text);
  return found == library->source.kernels.end() ? nullptr : new Function(found->second);
}

Object* new_pipeline(Device*, SEL, Function* function, Object** error) {
  if (!function) return failed(error, "the function is nil");
  if (misbehaves("refuse pipeline", function->kernel->name)) return refused(error, "pipeline", function->kernel);
  return new Pipeline(function->kernel);
}

// The number that is asked for, or the usual one.
NSUInteger number(const char* how, NSUInteger usual) {
  const std::string asked = asked_of(how);
  return asked.empty() ? usual : strtoul(asked.c_str(), nullptr, 10);
}

NSUInteger longest_buffer() { return number("longest buffer", 16ul << 30); }

bool too_long(const char* what, NSUInteger bytes) {
  return bytes > longest_buffer() && complain("limits", "%s: %lu bytes are more than maxBufferLength, %lu", what, bytes, longest_buffer());
}

// Whether memory is of one mapping, and no part of malloc's heap.
bool one_region(const void* data, size_t bytes) {
  FILE* const maps = fopen("/proc/self/maps", "r");
  const uintptr_t first = uintptr_t(data);
  bool one = false;
  char line[4096];
  while (fgets(line, sizeof line, maps)) {
    uintptr_t from = 0, to = 0;
    sscanf(line, "%zx-%zx", &from, &to);
    one |= from <= first && first + bytes <= to && !strstr(line, "[heap]");
  }
  return fclose(maps), one;
}

Object* new_wrapper(Device*, SEL, void* data, NSUInteger bytes, NSUInteger options, void*) {
  if (misbehaves("nil wrapper")) return nullptr;
  if (uintptr_t(data) % page_bytes || bytes % page_bytes || !bytes || options) {
    complain("pages", "newBufferWithBytesNoCopy: %lu bytes at %p with options %lu, but whole pages of %zu bytes with options 0 are wanted", bytes,
             data, options, page_bytes);
    return nullptr;
  }
  if (too_long("newBufferWithBytesNoCopy", bytes) || (misbehaves("region wrapper") && !one_region(data, bytes))) return nullptr;
  return new Buffer(data, bytes - (misbehaves("short wrapper") ? page_bytes : 0), false);
}

Object* new_buffer(Device*, SEL, NSUInteger bytes, NSUInteger options) {
  if (too_long("newBufferWithLength", bytes)) return nullptr;
  if (bytes && !options) return new Buffer(malloc(bytes), bytes, true);
  complain("pages", "newBufferWithLength: %lu bytes with options %lu", bytes, options);
  return nullptr;
}

char* contents(Buffer* b, SEL) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (b->under_way) complain("order", "contents of a buffer that a command buffer under way uses");
  return b->data;
}

}  // namespace

Buffer::~Buffer() {
  if (own) free(data);
}

NSUInteger Pipeline::max_threads() {
  const char* const lowered = getenv("STANDIN_MAX_THREADS");
  return lowered ? strtoul(lowered, nullptr, 10) : most_threads;
}

// Loaded from where Metal lies on a Mac, it knows whether CoreGraphics has been loaded from there too: without it there is no default device.
bool core_graphics() {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&add_device_methods), &self);
  std::string path = self.dli_fname;
  const size_t at = path.rfind("Metal.framework/Metal");
  if (at == path.npos) return true;
  path.replace(at, path.npos, "CoreGraphics.framework/CoreGraphics");
  return dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr;
}

void add_device_methods() {
  method("class MTLCompileOptions", "new", [](Object*, SEL) -> Object* { return new Options(!misbehaves("macOS 14")); });
  for (const char* kind : {"MTLCompileOptions", "MTLCompileOptions of macOS 14"}) {
    method(kind, "setFastMathEnabled:", [](Options* o, SEL, signed char on) { o->fast = on; });
    method(kind, "setLanguageVersion:", [](Options* o, SEL, NSUInteger version) { o->version = version; });
  }
  method("MTLCompileOptions", "setMathMode:", [](Options* o, SEL, long mode) { o->mode = mode; });
  method("MTLCompileOptions", "setMathFloatingPointFunctions:", [](Options* o, SEL, long functions) { o->functions = functions; });
  method("MTLDevice", "name", [](Device*, SEL) { return autorelease(new Text("NSString", "a stand-in for Metal")); });
  method("MTLDevice", "supportsFamily:", [](Device*, SEL, long family) { return boolean(family <= newest_family); });
  method("MTLDevice", "hasUnifiedMemory", [](Device*, SEL) { return boolean(!misbehaves("separate memory")); });
  method("MTLDevice", "maxBufferLength", [](Device*, SEL) { return longest_buffer(); });
  method("MTLDevice", "maxThreadgroupMemoryLength", [](Device*, SEL) -> NSUInteger { return most_threadgroup_bytes; });
  method("MTLDevice", "newLibraryWithSource:options:error:", new_library);
  method("MTLDevice", "newComputePipelineStateWithFunction:error:", new_pipeline);
  method("MTLDevice", "newBufferWithBytesNoCopy:length:options:deallocator:", new_wrapper);
  method("MTLDevice", "newBufferWithLength:options:", new_buffer);
  method("MTLLibrary", "newFunctionWithName:", new_function);
  method("MTLComputePipelineState", "maxTotalThreadsPerThreadgroup", [](Pipeline*, SEL) { return Pipeline::max_threads(); });
  method("MTLComputePipelineState", "threadExecutionWidth", [](Pipeline*, SEL) { return number("simd width", simd_lanes); });
  method("MTLBuffer", "length", [](Buffer* b, SEL) -> NSUInteger { return b->length; });
  method("MTLBuffer", "contents", contents);
  method("MTLBuffer", "addDebugMarker:range:", [](Buffer* b, SEL, Object*, NSUInteger at, NSUInteger length) { b->arrays[at] = at + length; });
  method("MTLBuffer", "removeAllDebugMarkers", [](Buffer* b, SEL) { b->arrays.clear(); });
}

}  // namespace standin

extern "C" standin::Object* MTLCreateSystemDefaultDevice() {
  return standin::misbehaves("no device") || !standin::core_graphics() ? nullptr : new standin::Device;
}
