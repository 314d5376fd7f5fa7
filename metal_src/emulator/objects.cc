// libobjc: reference counts, autorelease pools, classes, and objc_msgSend.
#include "emulator/objects.h"

#include <cstring>
#include <set>

#include "emulator/standin.h"

namespace standin {
namespace {

typedef void (*Method)();

// Never destroyed: threads may outlive main.
auto& methods = *new std::map<std::string, Method>;
auto& living = *new std::set<Object*>;
thread_local std::vector<std::vector<Object*>> pools;  // the handle of one is its depth
int open_pools = 0;

// Null: there is none.
Method method_of(const Object* object, SEL selector) {
  for (const char* kind : {object->kind, "any"})
    if (const auto found = methods.find(std::string(kind) + " " + selector); found != methods.end()) return found->second;
  return nullptr;
}

Object* retain(Object* object, SEL) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  return ++object->references, object;
}

void pop_pools(size_t depth) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  for (; pools.size() > depth; --open_pools) {
    const auto objects = std::move(pools.back());
    pools.pop_back();
    for (Object* o : objects) release(o);
  }
}

const bool added = [] {
  method("class NSString", "stringWithUTF8String:", [](Object*, SEL, const char* text) { return autorelease(new Text("NSString", text)); });
  method("NSString", "UTF8String", [](Text* s, SEL) { return s->text.c_str(); });
  method("NSError", "localizedDescription", [](Text* e, SEL) { return autorelease(new Text("NSString", e->text)); });
  method("any", "retain", retain);
  method("any", "respondsToSelector:", [](Object* o, SEL, SEL asked) { return boolean(method_of(o, asked)); });
  method("any", "release", static_cast<void (*)(Object*, SEL)>(release));
  add_device_methods();
  add_command_methods();
  return true;
}();

}  // namespace

Object::Object(const char* kind_, bool may_stay_) : kind(kind_), may_stay(may_stay_) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  living.insert(this);
}

Object::~Object() { living.erase(this); }

void Object::hold(int step) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  held += step;
  if (!held && !references) delete this;
}

void release(Object* object, SEL) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (!gone("release", object) && --object->references == 0 && !object->held) delete object;
}

bool gone(const char* message, Object* object) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  const bool there = !object || (living.count(object) && object->references);
  if (!there) complain("object", "%s with an object that is gone", message);
  return !there;
}

Object* autorelease(Object* object) {
  if (pools.empty())
    complain("pool", "a %s is autoreleased on a thread without a pool, and never released", object->kind);
  else
    pools.back().push_back(object);
  return object;
}

void look_for_leaks() {
  std::map<std::string, int> leaked;
  for (Object* o : living) leaked[o->kind] += o->references && !o->may_stay;
  for (auto& kind : leaked)
    if (kind.second) complain("leak", "%d of %s are not released", kind.second, kind.first.c_str());
  if (open_pools) complain("leak", "%d autorelease pools are not popped", open_pools);
}

void forgive_leaks() {
  pop_pools(0);
  for (Object* o : living) o->may_stay = true;
}

void add_method(const char* kind, const char* selector, Method method) { methods[std::string(kind) + " " + selector] = method; }

}  // namespace standin

using namespace standin;

// The method for a message; nil answers each with 0.
extern "C" __attribute__((visibility("hidden"))) Method standin_method(Object* to, SEL selector) {
  const Method nothing = reinterpret_cast<Method>(+[]() -> void* { return nullptr; });
  std::lock_guard<std::recursive_mutex> guard(lock());
  count(std::string("sent ") + selector);
  if (!to || gone(selector, to) || asked_of("nil") == selector) return nothing;
  if (const Method found = method_of(to, selector)) return found;
  return complain("selector", "[%s %s]: there is no such method", to->kind, selector), nothing;
}

// Finds the method with all arguments in place, and jumps to it. No method here takes a floating-point argument.
#if !defined(__x86_64__)
#error "the stand-in knows the calling convention of x86-64 only"
#endif
asm(R"(
.text
.globl objc_msgSend
.type objc_msgSend, @function
objc_msgSend:
  push %rdi; push %rsi; push %rdx; push %rcx; push %r8; push %r9
  sub $8, %rsp
  call standin_method
  add $8, %rsp
  pop %r9; pop %r8; pop %rcx; pop %rdx; pop %rsi; pop %rdi
  jmp *%rax
.size objc_msgSend, .-objc_msgSend
)");

extern "C" {

SEL sel_registerName(const char* name) {
  static auto& names = *new std::set<std::string>;
  std::lock_guard<std::recursive_mutex> guard(lock());
  return names.insert(name).first->c_str();
}

Object* objc_getClass(const char* name) {
  static auto& classes = *new std::map<std::string, Object*>;
  std::lock_guard<std::recursive_mutex> guard(lock());
  const std::string kind = std::string("class ") + name;
  const auto first = methods.lower_bound(kind + " ");
  if (asked_of("nil") == name) return nullptr;
  if (first == methods.end() || first->first.compare(0, kind.size() + 1, kind + " ")) return nullptr;
  Object*& one = classes[kind];
  return one ? one : one = new Object(strdup(kind.c_str()), true);
}

void* objc_autoreleasePoolPush() {
  std::lock_guard<std::recursive_mutex> guard(lock());
  ++open_pools;
  pools.emplace_back();
  return reinterpret_cast<void*>(pools.size());
}

void objc_autoreleasePoolPop(void* pool) {
  const size_t depth = reinterpret_cast<size_t>(pool);
  if (!depth || depth > pools.size())
    complain("pool", "objc_autoreleasePoolPop of a pool that this thread has not pushed");
  else
    pop_pools(depth - 1);
}

long standin_count(const char* what) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (strncmp(what, "live ", 5)) return counted(what);
  long n = 0;
  for (Object* o : living) n += o->references && !strcmp(o->kind, what + 5);
  return n;
}
}
