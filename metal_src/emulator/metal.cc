// The device: libraries, pipelines and buffers.
#include <cstdlib>

#include "emulator/objects.h"

namespace standin {
namespace {

constexpr size_t page_bytes = 16384;  // Apple silicon's, whatever this machine has
constexpr NSUInteger language_3_1 = 3 << 16 | 1;
constexpr long newest_family = 1009;  // MTLGPUFamilyApple9

struct Device : Object {
  Device() : Object("MTLDevice", true) {}
};

struct Options : Object {
  bool safe = false, precise = false;
  NSUInteger version = 0;
  Options() : Object("MTLCompileOptions") {}
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
  if (!options || !options->safe || !options->precise) complain("math", "newLibraryWithSource: fast math, the default, is on");
  if (options && options->version && options->version < language_3_1) return failed(error, "unknown type 'bfloat': it needs Metal 3.1");
  const Source source = compile(text ? text->text : "");
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

Object* new_wrapper(Device*, SEL, void* data, NSUInteger bytes, NSUInteger options, void*) {
  if (misbehaves("nil wrapper")) return nullptr;
  if (uintptr_t(data) % page_bytes || bytes % page_bytes || !bytes || options) {
    complain("pages", "newBufferWithBytesNoCopy: %lu bytes at %p with options %lu, but whole pages of %zu bytes with options 0 are wanted", bytes,
             data, options, page_bytes);
    return nullptr;
  }
  return new Buffer(data, bytes - (misbehaves("short wrapper") ? page_bytes : 0), false);
}

Object* new_buffer(Device*, SEL, NSUInteger bytes, NSUInteger options) {
  if (bytes && !options) return new Buffer(malloc(bytes), bytes, true);
  complain("pages", "newBufferWithLength: %lu bytes with options %lu", bytes, options);
  return nullptr;
}

}  // namespace

Buffer::~Buffer() {
  if (own) free(data);
}

NSUInteger Pipeline::max_threads() {
  const char* const lowered = getenv("STANDIN_MAX_THREADS");
  return lowered ? strtoul(lowered, nullptr, 10) : most_threads;
}

void add_device_methods() {
  method("class MTLCompileOptions", "new", [](Object*, SEL) -> Object* { return new Options; });
  method("MTLCompileOptions", "setFastMathEnabled:", [](Options* o, SEL, signed char on) { o->safe = o->precise = !on; });
  method("MTLCompileOptions", "setLanguageVersion:", [](Options* o, SEL, NSUInteger version) { o->version = version; });
  method("MTLDevice", "name", [](Device*, SEL) { return autorelease(new Text("NSString", "a stand-in for Metal")); });
  method("MTLDevice", "supportsFamily:", [](Device*, SEL, long family) -> signed char { return family <= newest_family; });
  method("MTLDevice", "hasUnifiedMemory", [](Device*, SEL) -> signed char { return 1; });
  method("MTLDevice", "maxThreadgroupMemoryLength", [](Device*, SEL) -> NSUInteger { return most_threadgroup_bytes; });
  method("MTLDevice", "newLibraryWithSource:options:error:", new_library);
  method("MTLDevice", "newComputePipelineStateWithFunction:error:", new_pipeline);
  method("MTLDevice", "newBufferWithBytesNoCopy:length:options:deallocator:", new_wrapper);
  method("MTLDevice", "newBufferWithLength:options:", new_buffer);
  method("MTLLibrary", "newFunctionWithName:", new_function);
  method("MTLComputePipelineState", "maxTotalThreadsPerThreadgroup", [](Pipeline*, SEL) { return Pipeline::max_threads(); });
  method("MTLComputePipelineState", "threadExecutionWidth", [](Pipeline*, SEL) -> NSUInteger { return simd_lanes; });
  method("MTLBuffer", "length", [](Buffer* b, SEL) -> NSUInteger { return b->length; });
  method("MTLBuffer", "contents", [](Buffer* b, SEL) { return b->data; });
  method("MTLBuffer", "addDebugMarker:range:", [](Buffer* b, SEL, Object*, NSUInteger at, NSUInteger length) { b->arrays[at] = at + length; });
  method("MTLBuffer", "removeAllDebugMarkers", [](Buffer* b, SEL) { b->arrays.clear(); });
}

}  // namespace standin

extern "C" standin::Object* MTLCreateSystemDefaultDevice() {
  return standin::misbehaves("no device") ? nullptr : new standin::Device;
}
