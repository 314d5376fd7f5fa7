#include "launch/metal/metal.h"

#include <stdlib.h>

#include "launch/metal/buffers.h"
#include "launch/metal/driver.h"

enum { LANGUAGE_3_1 = (3 << 16) + 1, BARRIER_SCOPE_BUFFERS = 1, STATUS_COMPLETED = 4, SIMD_WIDTH = 32, SCRATCH_UNIT = 16 };
enum { MATH_SAFE = 0, FUNCTIONS_PRECISE = 1 };

typedef struct {
  NSUInteger width, height, depth;
} MTLSize;

// The words of an NSError; `otherwise` where there is none.
static char* words_of(id error, const char* otherwise) {
  const char* const words = characters(send(error, "localizedDescription"));
  return text_of("%s", words ? words : otherwise);
}

// Safe and precise mathematics, by the names that newer systems have beside the older switch.
static void set_where_there(id options, const char* setter, long value) {
  if (SEND(BOOL, (id, SEL, SEL), options, S("respondsToSelector:"), S(setter))) SEND(void, (id, SEL, long), options, S(setter), value);
}

static char* compile(const char* text, const char* name, MetalPipeline* pipeline) {
  id error = NULL;
  const id options = send(driver.class_named("MTLCompileOptions"), "new");
  if (!options) return text_of("Metal gives no options to compile with");
  SEND(void, (id, SEL, NSUInteger), options, S("setLanguageVersion:"), LANGUAGE_3_1);
  SEND(void, (id, SEL, BOOL), options, S("setFastMathEnabled:"), 0);
  set_where_there(options, "setMathMode:", MATH_SAFE);
  set_where_there(options, "setMathFloatingPointFunctions:", FUNCTIONS_PRECISE);
  const id source = string(text);
  const id library =
      source ? SEND(id, (id, SEL, id, id, id*), driver.device, S("newLibraryWithSource:options:error:"), source, options, &error) : NULL;
  send(options, "release");
  if (!library) return words_of(error, "Metal refused the source and gave no reason");
  const id function = SEND(id, (id, SEL, id), library, S("newFunctionWithName:"), string(name));
  send(library, "release");
  if (!function) return text_of("the source defines no kernel named %s", name);
  const id state = SEND(id, (id, SEL, id, id*), driver.device, S("newComputePipelineStateWithFunction:error:"), function, &error);
  send(function, "release");
  if (!state) return words_of(error, "Metal made no pipeline and gave no reason");
  const NSUInteger simd_width = number(state, "threadExecutionWidth");
  if (simd_width != SIMD_WIDTH) {
    send(state, "release");
    return text_of("simdgroups are %lu threads wide here, and the kernels need %d", simd_width, SIMD_WIDTH);
  }
  pipeline->max_threads = (uint32_t)number(state, "maxTotalThreadsPerThreadgroup");
  pipeline->state = state;
  return NULL;
}

char* metal_compile(const char* text, const char* function, MetalPipeline* pipeline) {
  void* const pool = driver.pool_push();
  char* const error = compile(text, function, pipeline);
  driver.pool_pop(pool);
  return error;
}

static Bound* find(Bound* bound, int count, const void* data) {
  for (int i = 0; i < count; ++i)
    if (bound[i].data == data) return &bound[i];
  return NULL;
}

// The distinct arrays of all dispatches.
static int distinct(const MetalDispatch* dispatches, int count, Bound* bound) {
  int found = 0;
  for (int d = 0; d < count; ++d)
    for (int i = 0; i < dispatches[d].array_count; ++i) {
      const MetalArray array = dispatches[d].arrays[i];
      Bound* same = find(bound, found, array.data);
      if (!same) {
        same = &bound[found++];
        *same = (Bound){.data = array.data};
      }
      if (same->bytes < array.bytes) same->bytes = array.bytes;
      same->written |= array.written;
    }
  return found;
}

static void encode(id encoder, const MetalDispatch* d, Bound* bound, int bound_count) {
  SEND(void, (id, SEL, id), encoder, S("setComputePipelineState:"), d->pipeline.state);
  for (int i = 0; i < d->array_count; ++i) {
    const Bound* b = find(bound, bound_count, d->arrays[i].data);
    SEND(void, (id, SEL, id, NSUInteger, NSUInteger), encoder, S("setBuffer:offset:atIndex:"), b->buffer, b->offset, (NSUInteger)i);
  }
  SEND(void, (id, SEL, const void*, NSUInteger, NSUInteger), encoder, S("setBytes:length:atIndex:"), d->params, d->params_bytes,
       (NSUInteger)d->array_count);
  // a kernel that declares threadgroup memory must be given some
  const NSUInteger units = d->scratch_bytes ? (d->scratch_bytes + SCRATCH_UNIT - 1) / SCRATCH_UNIT : 1;
  SEND(void, (id, SEL, NSUInteger, NSUInteger), encoder, S("setThreadgroupMemoryLength:atIndex:"), units * SCRATCH_UNIT, (NSUInteger)0);
  SEND(void, (id, SEL, MTLSize, MTLSize), encoder, S("dispatchThreadgroups:threadsPerThreadgroup:"), (MTLSize){d->groups, 1, 1},
       (MTLSize){d->threads, 1, 1});
}

static char* execute(const MetalDispatch* dispatches, int count, Bound* bound, int bound_count) {
  const id commands = send(driver.queue, "commandBufferWithUnretainedReferences"), encoder = send(commands, "computeCommandEncoder");
  if (!encoder) return text_of("Metal gives no %s", commands ? "encoder" : "command buffer");
  for (int i = 0; i < count; ++i) {
    // Metal tracks no hazards between buffers over one page, nor within an array
    if (i) SEND(void, (id, SEL, NSUInteger), encoder, S("memoryBarrierWithScope:"), BARRIER_SCOPE_BUFFERS);
    encode(encoder, &dispatches[i], bound, bound_count);
  }
  send(encoder, "endEncoding");
  send(commands, "commit");
  send(commands, "waitUntilCompleted");
  if (number(commands, "status") == STATUS_COMPLETED) return NULL;
  return words_of(send(commands, "error"), "the command buffer did not complete, and Metal gave no reason");
}

char* metal_run(const MetalDispatch* dispatches, int count) {
  int arrays = 0;
  for (int i = 0; i < count; ++i) arrays += dispatches[i].array_count;
  Bound* const bound = malloc((size_t)arrays * sizeof(Bound));
  if (!bound) return text_of("no memory for a list of %d arrays", arrays);
  const int bound_count = distinct(dispatches, count, bound);

  void* const pool = driver.pool_push();
  char* error = NULL;
  int held = 0;
  while (held < bound_count && !(error = bind_array(&bound[held]))) ++held;
  if (!error) error = execute(dispatches, count, bound, bound_count);
  for (int i = 0; i < held; ++i) unbind_array(&bound[i], !error);
  driver.pool_pop(pool);
  free(bound);
  return error;
}
