#include "launch/metal/buffers.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { STORAGE_MODE_SHARED = 0, LOAD_BYTES = 16 };

typedef struct {
  NSUInteger location, length;
} NSRange;

typedef struct {
  id buffer;
  size_t bytes;
} Sized;

// Buffers for copies are kept for the next calls: so many, of so many bytes in all. The oldest is the first, and goes first.
enum { KEPT = 32 };
static const size_t kept_bytes = 256 << 20;
static struct {
  pthread_mutex_t lock;
  int count;
  size_t bytes;
  Sized each[KEPT + 1];
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

// Under the lock.
static Sized taken_out(int i) {
  const Sized one = kept.each[i];
  kept.bytes -= one.bytes;
  --kept.count;
  memmove(&kept.each[i], &kept.each[i + 1], (size_t)(kept.count - i) * sizeof(Sized));
  return one;
}

// The smallest that is large enough, so that the same calls again find all that they need; else a new one. No buffer: Metal gives none.
static Sized take(size_t bytes) {
  int best = -1;
  pthread_mutex_lock(&kept.lock);
  for (int i = 0; i < kept.count; ++i)
    if (kept.each[i].bytes >= bytes && (best < 0 || kept.each[i].bytes < kept.each[best].bytes)) best = i;
  const Sized found = best < 0 ? (Sized){NULL, bytes} : taken_out(best);
  pthread_mutex_unlock(&kept.lock);
  if (found.buffer) return found;
  return (Sized){SEND(id, (id, SEL, NSUInteger, NSUInteger), driver.device, S("newBufferWithLength:options:"), bytes, STORAGE_MODE_SHARED), bytes};
}

static void give_back(Sized one) {
  pthread_mutex_lock(&kept.lock);
  kept.each[kept.count++] = one;
  kept.bytes += one.bytes;
  while (kept.count > KEPT || kept.bytes > kept_bytes) send(taken_out(0).buffer, "release");
  pthread_mutex_unlock(&kept.lock);
}

static size_t whole_pages(size_t bytes) { return (bytes + driver.page - 1) & ~(driver.page - 1); }

// A buffer over the pages that hold the array. False: Metal will not have it so.
static bool wrap(Bound* array) {
  const uintptr_t data = (uintptr_t)array->data;
  array->offset = data & (driver.page - 1);
  const size_t bytes = whole_pages(array->offset + array->bytes);
  if (data % LOAD_BYTES || !array->bytes || bytes > driver.longest) return false;
  array->buffer = SEND(id, (id, SEL, void*, NSUInteger, NSUInteger, id), driver.device,
                       S("newBufferWithBytesNoCopy:length:options:deallocator:"), (void*)(data - array->offset), bytes, STORAGE_MODE_SHARED, NULL);
  if (array->buffer && number(array->buffer, "length") >= bytes) return true;
  send(array->buffer, "release");
  return false;
}

static char* copy(Bound* array) {
  const size_t bytes = array->bytes ? whole_pages(array->bytes) : driver.page;
  if (bytes > driver.longest) return text_of("an array takes %zu bytes, and Metal's buffers have at most %lu", bytes, driver.longest);
  const Sized one = take(bytes);
  array->memory = SEND(char*, (id, SEL), one.buffer, S("contents"));
  array->buffer = one.buffer;
  array->offset = 0;
  array->copy_bytes = one.bytes;
  if (!array->memory) {
    send(one.buffer, "release");
    return text_of("Metal gives no buffer of %zu bytes", bytes);
  }
  // also where it is written: a kernel need not write all of it
  if (array->bytes) memcpy(array->memory, array->data, array->bytes);
  return NULL;
}

char* bind_array(Bound* array) {
  array->memory = NULL;
  char* const error = wrap(array) ? NULL : copy(array);
  // a stand-in watches where the array begins and ends
  if (!error && driver.stand_in)
    SEND(void, (id, SEL, id, NSRange), array->buffer, S("addDebugMarker:range:"), string("array"), (NSRange){array->offset, array->bytes});
  return error;
}

void unbind_array(Bound* array, bool finished) {
  if (!array->memory) {
    send(array->buffer, "release");
    return;
  }
  if (finished && array->written && array->bytes) memcpy(array->data, array->memory, array->bytes);
  if (driver.stand_in) send(array->buffer, "removeAllDebugMarkers");
  give_back((Sized){array->buffer, array->copy_bytes});
}
