#include "launch/metal/buffers.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { STORAGE_MODE_SHARED = 0, LOAD_BYTES = 16 };

typedef struct {
  NSUInteger location, length;
} NSRange;

// Buffers for copies are kept for the next call, in sizes of powers of two.
enum { KEPT = 8 };
static const size_t kept_bytes = 64 << 20;  // larger ones are not
static struct {
  pthread_mutex_t lock;
  int count;
  id buffers[KEPT];
  size_t bytes[KEPT];
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

static id take(size_t bytes) {
  id found = NULL;
  pthread_mutex_lock(&kept.lock);
  for (int i = 0; i < kept.count && !found; ++i) {
    if (kept.bytes[i] != bytes) continue;
    found = kept.buffers[i];
    --kept.count;
    kept.buffers[i] = kept.buffers[kept.count];
    kept.bytes[i] = kept.bytes[kept.count];
  }
  pthread_mutex_unlock(&kept.lock);
  return found ? found
               : SEND(id, (id, SEL, NSUInteger, NSUInteger), driver.device, S("newBufferWithLength:options:"), bytes, STORAGE_MODE_SHARED);
}

static void give_back(id buffer, size_t bytes) {
  pthread_mutex_lock(&kept.lock);
  const bool keep = kept.count < KEPT && bytes <= kept_bytes;
  if (keep) {
    kept.buffers[kept.count] = buffer;
    kept.bytes[kept.count++] = bytes;
  }
  pthread_mutex_unlock(&kept.lock);
  if (!keep) send(buffer, "release");
}

static void* contents(const Bound* array) { return SEND(void*, (id, SEL), array->buffer, S("contents")); }

// A buffer over the pages that hold the array. False: Metal will not have it so.
static bool wrap(Bound* array) {
  const uintptr_t data = (uintptr_t)array->data, mask = driver.page - 1;
  if (data % LOAD_BYTES || !array->bytes) return false;
  const uintptr_t first = data & ~mask, end = (data + array->bytes + mask) & ~mask;
  array->offset = data - first;
  array->buffer = SEND(id, (id, SEL, void*, NSUInteger, NSUInteger, id), driver.device,
                       S("newBufferWithBytesNoCopy:length:options:deallocator:"), (void*)first, end - first, STORAGE_MODE_SHARED, NULL);
  if (array->buffer && number(array->buffer, "length") >= end - first) return true;
  send(array->buffer, "release");
  return false;
}

char* bind_array(Bound* array) {
  array->copy_bytes = 0;
  if (!wrap(array)) {
    size_t bytes = driver.page;
    while (bytes < array->bytes) bytes *= 2;
    array->buffer = take(bytes);
    array->offset = 0;
    if (!array->buffer) return text_of("Metal gives no buffer of %zu bytes", bytes);
    array->copy_bytes = bytes;
    // also where it is written: a kernel need not write all of it
    if (array->bytes) memcpy(contents(array), array->data, array->bytes);
  }
  // a stand-in watches where the array begins and ends
  if (driver.stand_in)
    SEND(void, (id, SEL, id, NSRange), array->buffer, S("addDebugMarker:range:"), string("array"), (NSRange){array->offset, array->bytes});
  return NULL;
}

void unbind_array(Bound* array, bool finished) {
  if (!array->copy_bytes) {
    send(array->buffer, "release");
    return;
  }
  if (finished && array->written && array->bytes) memcpy(array->data, contents(array), array->bytes);
  if (driver.stand_in) send(array->buffer, "removeAllDebugMarkers");
  give_back(array->buffer, array->copy_bytes);
}
