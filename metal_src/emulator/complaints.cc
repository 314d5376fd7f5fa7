// What is wrong, which checkers are on, what misbehaves, and what is counted.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

#include "emulator/emulator.h"
#include "emulator/standin.h"
#include "launch/shape.h"

namespace standin {
namespace {

// Of every access, of lanes that meet, of the messages, of the objects.
const char checkers[] =
    "bounds,alignment,readonly,uninitialised,race,hazard,"
    "barrier,simdgroup,"
    "source,math,language,binding,limits,pages,order,thread,selector,"
    "object,leak,pool";
const char misbehaviours[] =
    "refuse source,refuse pipeline,hang,fail,wrong,wrong last,"
    "no device,nil wrapper,short wrapper,region wrapper,nil,longest buffer,simd width,separate memory,macOS 14";

bool listed(const char* list, const std::string& name) { return ("," + std::string(list) + ",").find("," + name + ",") != name.npos; }

struct State {
  std::recursive_mutex lock;
  std::vector<std::string> complaints;
  std::set<std::string> off;
  std::map<std::string, std::string> misbehaving;  // how, and what
  std::map<std::string, long> counts;
  State() { behave(); }
  void behave() {
    misbehaving.clear();
    std::istringstream asked(getenv("STANDIN_MISBEHAVE") ? getenv("STANDIN_MISBEHAVE") : "");
    for (std::string how, of; std::getline(asked, how, ':') && (std::getline(asked, of, ';') || how.size()); of.clear()) misbehaving[how] = of;
  }
};

// Never destroyed: threads may outlive main.
State& state() {
  static State* one = new State;
  return *one;
}

}  // namespace

std::recursive_mutex& lock() { return state().lock; }

bool complain(const char* checker, const char* format, ...) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (state().off.count(checker)) return false;
  char text[1000];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  state().complaints.push_back(std::string(checker) + ": " + text);
  return true;
}

size_t complaint_count() {
  std::lock_guard<std::recursive_mutex> guard(lock());
  return state().complaints.size();
}

std::string complaints_after(size_t count) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  std::string all;
  for (size_t i = count; i < state().complaints.size(); ++i) all += state().complaints[i] + "\n";
  return all;
}

void forget_after(size_t count) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  state().complaints.resize(count);
}

bool misbehaves(const char* how, const std::string& kernel) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  const auto found = state().misbehaving.find(how);
  return found != state().misbehaving.end() && !kernel.compare(0, found->second.size(), found->second);
}

std::string asked_of(const char* how) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  const auto found = state().misbehaving.find(how);
  return found == state().misbehaving.end() ? "" : found->second;
}

void count(const std::string& what) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  ++state().counts[what];
}

long counted(const std::string& what) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  return state().counts[what];
}

void forget_complaints() {
  std::lock_guard<std::recursive_mutex> guard(lock());
  state().complaints.clear();
  state().off.clear();
  state().behave();
  state().counts.clear();
}

}  // namespace standin

extern "C" {

using namespace standin;

const char* standin_checkers() { return checkers; }

int standin_check(const char* checker, int on) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (on)
    state().off.erase(checker);
  else
    state().off.insert(checker);
  return listed(checkers, checker);
}

int standin_misbehave(const char* how, const char* of) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (of)
    state().misbehaving[how] = of;
  else
    state().misbehaving.erase(how);
  return listed(misbehaviours, how);
}

void standin_shape(uint32_t width, int element_bytes, int head, int shape[4]) {
  const Shape s = head ? shape_of_head(width, element_bytes) : shape_of(width, element_bytes);
  const int all[] = {s.v, s.r, s.sg, s.teams};
  memcpy(shape, all, sizeof all);
}
}
