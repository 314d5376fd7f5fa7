// The driver as the launcher's own files see it. Objective-C without its headers: a message is sent through the C type of its method.
#pragma once
#include <stddef.h>

typedef void* id;
typedef void* SEL;
typedef signed char BOOL;
typedef unsigned long NSUInteger;

typedef struct {
  void (*msg_send)(void);
  SEL (*selector)(const char* name);
  id (*class_named)(const char* name);
  void* (*pool_push)(void);
  void (*pool_pop)(void* pool);
  id device, queue;
  BOOL stand_in;       // not Apple's
  size_t page;         // what buffers over foreign memory are rounded to
  NSUInteger longest;  // bytes of a buffer
} Driver;

// Valid once metal_unavailable() has returned null.
extern Driver driver;

#define S(name) driver.selector(name)
#define SEND(result, types, ...) ((result(*) types)driver.msg_send)(__VA_ARGS__)

static inline id send(id object, const char* name) { return SEND(id, (id, SEL), object, S(name)); }
static inline NSUInteger number(id object, const char* name) { return SEND(NSUInteger, (id, SEL), object, S(name)); }
static inline id string(const char* text) {
  return SEND(id, (id, SEL, const char*), driver.class_named("NSString"), S("stringWithUTF8String:"), text);
}
// Null where there are none.
static inline const char* characters(id string) { return SEND(const char*, (id, SEL), string, S("UTF8String")); }

// printf into memory of its own.
char* text_of(const char* format, ...) __attribute__((format(printf, 1, 2)));
