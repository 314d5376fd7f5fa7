#include "launch/metal/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/metal/metal.h"

Driver driver;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char* unavailable;
static const char* device;

char* text_of(const char* format, ...) {
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  const int length = vsnprintf(NULL, 0, format, arguments);
  char* text = malloc((size_t)length + 1);
  if (text) vsnprintf(text, (size_t)length + 1, format, again);
  va_end(again);
  va_end(arguments);
  return text ? text : strdup("out of memory");
}

// Apple's libraries, in the order in which they are loaded: without CoreGraphics there is no default device.
enum { CORE_GRAPHICS, METAL, OBJECTIVE_C, LIBRARIES };
static const char* const paths[LIBRARIES] = {"/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics",
                                             "/System/Library/Frameworks/Metal.framework/Metal", "/usr/lib/libobjc.A.dylib"};

// dlopen, or null with the reason in `unavailable`. A stand-in is one file with all that Apple's libraries hold, or a folder, with a slash
// at its end, below which they lie as on a Mac.
static void* opened(const char* stand_in, const char* path) {
  const bool folder = stand_in && stand_in[strlen(stand_in) - 1] == '/';
  char* const name = text_of("%s%s", stand_in ? stand_in : "", !stand_in || folder ? path : "");
  void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) unavailable = text_of("the Metal driver cannot be loaded: %s", dlerror());
  free(name);
  return library;
}

static void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found && !unavailable) unavailable = text_of("the Metal driver cannot be loaded: it has no %s", name);
  return found;
}

// The highest Apple GPU family, which says what the device can do (7: M1, 8: M2, 9: M3 and M4).
static int family(void) {
  enum { APPLE_1 = 1001, APPLE_20 = 1020 };
  int best = APPLE_20;
  while (best >= APPLE_1 && !SEND(BOOL, (id, SEL, long), driver.device, S("supportsFamily:"), best)) --best;
  return best - APPLE_1 + 1;
}

static void load(void) {
  const char* stand_in = getenv("JAX_FUSEDNORM_METAL_DRIVER");
  if (stand_in && !*stand_in) stand_in = NULL;
#if !defined(__APPLE__)
  if (!stand_in) {
    unavailable = "the Metal driver cannot be loaded: this is not macOS, and JAX_FUSEDNORM_METAL_DRIVER names no stand-in for it";
    return;
  }
#endif
  void* libraries[LIBRARIES];
  for (int i = 0; i < LIBRARIES; ++i)
    if (!(libraries[i] = opened(stand_in, paths[i]))) return;

  void* const runtime = libraries[OBJECTIVE_C];
  id (*const create)(void) = (id(*)(void))symbol(libraries[METAL], "MTLCreateSystemDefaultDevice");
  driver.msg_send = (void (*)(void))symbol(runtime, "objc_msgSend");
  driver.selector = (SEL(*)(const char*))symbol(runtime, "sel_registerName");
  driver.class_named = (id(*)(const char*))symbol(runtime, "objc_getClass");
  driver.pool_push = (void* (*)(void))symbol(runtime, "objc_autoreleasePoolPush");
  driver.pool_pop = (void (*)(void*))symbol(runtime, "objc_autoreleasePoolPop");
  if (unavailable) return;

  // Apple silicon's pages are of 16 KiB. A stand-in elsewhere must see the same rounding.
  driver.page = (size_t)sysconf(_SC_PAGESIZE) > 16384 ? (size_t)sysconf(_SC_PAGESIZE) : 16384;
  driver.stand_in = stand_in != NULL;
  void* const pool = driver.pool_push();
  driver.device = create();
  driver.queue = driver.device ? send(driver.device, "newCommandQueue") : NULL;
  driver.longest = number(driver.device, "maxBufferLength");
  const char* const name = characters(send(driver.device, "name"));
  if (driver.queue)
    device = text_of("%s, Apple GPU family %d, %s memory, up to %lu bytes of threadgroup memory, buffers of up to %lu bytes, pages of %zu bytes",
                     name ? name : "a device without a name", family(),
                     SEND(BOOL, (id, SEL), driver.device, S("hasUnifiedMemory")) ? "unified" : "separate",
                     number(driver.device, "maxThreadgroupMemoryLength"), driver.longest, driver.page);
  else
    unavailable = driver.device ? "the Metal device gives no command queue" : "there is no Metal device";
  driver.pool_pop(pool);
}

const char* metal_unavailable(void) {
  pthread_once(&once, load);
  return unavailable;
}

const char* metal_device(void) { return device; }

size_t metal_longest(void) { return metal_unavailable() ? 0 : driver.longest / driver.page * driver.page; }
