// Objective-C objects and messages.
#pragma once
#include <map>
#include <thread>

#include "emulator/emulator.h"

namespace standin {

typedef const char* SEL;
typedef unsigned long NSUInteger;

// The launcher's references, its pools' among them, are counted apart from the driver's own: without the former it is gone.
struct Object {
  const char* kind;     // its class; "class NAME" is the class itself
  bool may_stay;        // alive after a call, it is no leak
  int references = 1, held = 0;
  const std::thread::id creator = std::this_thread::get_id();

  explicit Object(const char* kind_, bool may_stay_ = false);
  virtual ~Object();
  static void operator delete(void*) {}  // no address is used twice, so that what is gone is known
  void hold(int step);                   // the driver's references
};

// A reference of the driver's, or null.
template <typename T>
class Ref {
 public:
  Ref(T* object = nullptr) : object_(object) { if (object) object->hold(1); }
  Ref(const Ref& other) : Ref(other.object_) {}
  ~Ref() { if (object_) object_->hold(-1); }
  Ref& operator=(Ref other) { return std::swap(object_, other.object_), *this; }
  operator T*() const { return object_; }
  T* operator->() const { return object_; }

 private:
  T* object_;
};

struct Text : Object {  // NSString, NSError
  const std::string text;
  Text(const char* kind, const std::string& t) : Object(kind), text(t) {}
};

struct Buffer : Object {
  char* const data;
  const size_t length;
  const bool own;                   // the memory
  int under_way = 0;                // bindings of command buffers that are committed and have not ended
  std::map<size_t, size_t> arrays;  // that it holds: where they begin and end
  Buffer(void* d, size_t n, bool o) : Object("MTLBuffer", o), data(static_cast<char*>(d)), length(n), own(o) {}
  ~Buffer() override;
};

struct Pipeline : Object {
  const EmulatedKernel* const kernel;
  explicit Pipeline(const EmulatedKernel* k) : Object("MTLComputePipelineState", true), kernel(k) {}
  static NSUInteger max_threads();
};

Object* autorelease(Object* object);
void release(Object* object, SEL = nullptr);
bool gone(const char* message, Object* object);  // and complains of it; the object may be nil
void look_for_leaks();
void forgive_leaks();

// A BOOL is the lowest byte of a register, and what the others hold is nobody's business.
inline unsigned long boolean(bool value) { return 0xdeadbeefdeadbe00 | value; }

// A method is a function, or a lambda that captures nothing, of the method's exact type.
void add_method(const char* kind, const char* selector, void (*method)());
template <typename F>
void method(const char* kind, const char* selector, F f) {
  add_method(kind, selector, reinterpret_cast<void (*)()>(+f));
}
void add_device_methods();   // metal.cc
void add_command_methods();  // commands.cc

}  // namespace standin
