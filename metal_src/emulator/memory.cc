// What is checked at every access: bounds, alignment, constness, initialisation, and its order to the accesses of other threads.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "emulator/emulator.h"

namespace standin {
namespace {

// The last write and the last reads of two bytes of memory. Times are those of the barrier before them.
struct Cell {
  uint32_t writer = 0, written = 0, reader = 0, read = 0;
  uint32_t elsewhere = 0;  // when another threadgroup read it before
  bool many = false;       // several threads of the reader's simdgroup have read it at `read`
};
constexpr uint32_t several = ~0u;  // a reader: threads of different simdgroups

constexpr size_t cell_bytes = 2, page_cells = 2048;
auto& pages = *new std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>>;  // never destroyed: threads may outlive main

Cell& cell_at(uintptr_t number) {
  static uintptr_t last = ~uintptr_t(0);
  static Cell* page;
  if (pages.empty() || number / page_cells != last) {
    auto& found = pages[last = number / page_cells];
    if (!found) found.reset(new Cell[page_cells]);
    page = found.get();
  }
  return page[number % page_cells];
}

// file.metal:211, from debug information.
std::string place(const void* pc) {
  static std::map<const void*, std::string> known;
  std::string& answer = known[pc];
  Dl_info image;
  if (!answer.empty() || !dladdr(pc, &image)) return answer;
  char text[512];
  snprintf(text, sizeof text, "addr2line -e '%s' %#zx", image.dli_fname, uintptr_t(pc) - uintptr_t(image.dli_fbase) - 1);
  if (FILE* f = popen(text, "r")) {
    if (fgets(text, sizeof text, f)) answer = text;
    pclose(f);
  }
  answer = answer.substr(0, answer.find_first_of(" \n"));
  return answer = answer.substr(answer.rfind('/') + 1);
}

// A constant table of the kernel's text.
bool in_the_text(const void* address) {
  Dl_info here, kernel;
  return dladdr(address, &here) && dladdr(reinterpret_cast<const void*>(running.dispatch->kernel->run), &kernel) &&
         here.dli_fbase == kernel.dli_fbase;
}

// One access, as messages put it; a place in the text is complained of once.
struct Access {
  uintptr_t address;
  size_t bytes;
  bool write;
  const void* pc;

  void complain(const char* checker, const std::string& what) const {
    static uint32_t dispatch = 0;
    static std::set<std::pair<std::string, const void*>> said;
    if (dispatch != running.clock.dispatch) said.clear();
    dispatch = running.clock.dispatch;
    if (said.insert({checker, pc}).second)
      standin::complain(checker, "%s at %s: %s of %zu bytes %s, by thread %u of threadgroup %u", running.dispatch->kernel->name,
                        place(pc).c_str(), write ? "write" : "read", bytes, what.c_str(), running.thread, running.group);
  }

  // The region it lies in; a write belongs to one that may be written, where two are bound to the same memory.
  Region* region() const {
    Region* found = nullptr;
    for (Region& r : running.dispatch->regions)
      if (r.holds(address, bytes) && (!found || (write && !found->writable))) found = &r;
    return found;
  }

  void out_of_bounds() const {
    const Region* near = nullptr;
    uintptr_t least = ~uintptr_t(0);
    for (const Region& r : running.dispatch->regions) {
      const uintptr_t distance = address < r.base ? r.base - address : address + bytes - r.base - r.bytes;
      if (distance < least) least = distance, near = &r;
    }
    complain("bounds", std::to_string(least) + " bytes " + (address < near->base ? "before " : "past the end of ") + near->name + " (" +
                           std::to_string(near->bytes) + " bytes)");
  }

  void conflict(const Region& r, uint32_t time, const char* other) const {
    const Clock& c = running.clock;
    const char* const who = time < c.dispatch ? " by an earlier dispatch, with no memoryBarrier between"
                            : time < c.group  ? " by another threadgroup"
                                              : " by another thread of the threadgroup, with no barrier between";
    complain(time < c.dispatch ? "hazard" : "race", "at byte " + std::to_string(address - r.base) + " of " + r.name + ", and a " + other + who);
  }
};

}  // namespace

void forget_accesses() { pages.clear(); }

void access(const void* pointer, size_t bytes, bool write, bool aligned, const void* pc) {
  const Access it{uintptr_t(pointer), bytes, write, pc};
  if (it.address - running.stack < running.stack_bytes) return;
  Region* const r = it.region();
  if (!r) {
    if (!write && in_the_text(pointer)) return;
    it.out_of_bounds();
    stop();
  }
  if (aligned && it.address % bytes) {
    it.complain("alignment", "in " + r->name + " at an address that is " + std::to_string(it.address % bytes) + " modulo its size");
    stop();
  }
  if (write && !r->writable) it.complain("readonly", "to " + r->name + ", which the kernel may only read");
  (write ? r->moved.written : r->moved.read) += bytes;
  for (size_t i = 0; i < bytes; ++i) {
    uint8_t& before = r->touched.get()[it.address - r->base + i];
    (write ? r->moved.unique_written : r->moved.unique_read) += !(before & (write ? 2 : 1));
    before |= write ? 2 : 1;
  }

  const Clock& c = running.clock;
  const uint32_t me = c.groups * most_threads + running.thread, since = r->shared ? c.group : c.wave, barrier = c.barrier[r->shared];
  const uint32_t time = std::max(barrier, c.simdgroup_barrier[running.thread / simd_lanes][r->shared]);
  // what happened before `since` is ordered; after it, only the same thread's accesses are, and those before a barrier that both met
  const auto near = [&](uint32_t thread) { return thread / simd_lanes == me / simd_lanes; };
  const auto unordered = [&](uint32_t thread, uint32_t then) {
    return then >= since && (then < c.group || (near(thread) ? then == time && thread != me : then >= barrier));
  };
  for (uintptr_t at = it.address / cell_bytes; at <= (it.address + bytes - 1) / cell_bytes; ++at) {
    Cell& cell = cell_at(at);
    if (unordered(cell.writer, cell.written)) it.conflict(*r, cell.written, "write");
    if (write) {
      if (cell.elsewhere >= since)
        it.conflict(*r, cell.elsewhere, "read");
      else if (unordered(cell.many && near(cell.reader) ? me ^ 1 : cell.reader, cell.read))
        it.conflict(*r, cell.read, "read");
      cell.writer = me;
      cell.written = time;
    } else {
      if (r->shared && cell.written < c.group) it.complain("uninitialised", "of threadgroup memory that nobody has written");
      if (cell.read < c.group) cell.elsewhere = cell.read;
      const bool known = cell.read >= barrier;
      cell.many = known && near(cell.reader) && cell.read == time && (cell.many || cell.reader != me);
      cell.reader = known && !near(cell.reader) ? several : me;
      cell.read = time;
    }
  }
  maybe_switch();
}

}  // namespace standin
