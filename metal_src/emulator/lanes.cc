// The threads of a threadgroup as fibers, in a random order that a seed repeats, and the places where they meet.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>

#include "emulator/emulator.h"

namespace standin {

Running running;

namespace {

constexpr size_t stack_bytes = 128 << 10;

struct Lane {
  enum State { Ready, InSimd, AtBarrier, Done } state;
  ucontext_t context;
  const char* file;  // where it waits
  int line, flags;
  float mine, *all;  // what it gives and gets in a simdgroup
};

Lane lanes[most_threads];
ucontext_t scheduler;
bool stopped;
unsigned switch_every;
uint64_t random_state;
alignas(64) char threadgroup_memory[most_threadgroup_bytes];

char* stack_of(unsigned thread) {
  static void* const all = mmap(nullptr, stack_bytes * most_threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return static_cast<char*>(all) + thread * stack_bytes;
}

uint64_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

void leave(Lane::State state) {
  Lane& lane = lanes[running.thread];
  lane.state = state;
  swapcontext(&lane.context, &scheduler);
}

void lane_main() {
  void* buffers[most_buffers];  // on the lane's own stack, where accesses are not the kernel's
  const Dispatch& d = *running.dispatch;
  for (size_t i = 0; i < d.kernel->buffer_count; ++i) buffers[i] = reinterpret_cast<void*>(d.regions[i].base);
  const unsigned thread = running.thread;
  d.kernel->run(buffers, reinterpret_cast<float*>(threadgroup_memory), running.group, thread % simd_lanes, thread / simd_lanes);
  leave(Lane::Done);
}

void meet(Lane::State state, const char* file, int line) {
  Lane& lane = lanes[running.thread];
  lane.file = file;
  lane.line = line;
  leave(state);
}

void barrier(int flags, const char* file, int line) {
  lanes[running.thread].flags = flags;
  meet(Lane::AtBarrier, file, line);
}

void simdgroup_barrier(int flags, const char* file, int line) {
  float nothing[simd_lanes];
  lanes[running.thread].flags = flags;
  lanes[running.thread].all = nothing;
  meet(Lane::InSimd, file, line);
}

unsigned exchange(float mine, float* all, const char* file, int line) {
  const unsigned thread = running.thread;
  lanes[thread].mine = mine;
  lanes[thread].all = all;
  lanes[thread].flags = 0;
  meet(Lane::InSimd, file, line);
  return thread % simd_lanes;
}

// How many of the `count` lanes from `first` on wait where the first one in that state does.
unsigned waiting(const Lane* first, unsigned count, Lane::State state, const Lane** where) {
  *where = nullptr;
  unsigned n = 0;
  for (const Lane* lane = first; lane < first + count; ++lane) {
    if (lane->state != state) continue;
    if (!*where) *where = lane;
    n += lane->line == (*where)->line && !strcmp(lane->file, (*where)->file);
  }
  return n;
}

void diverged(const char* checker, const Dispatch& d, unsigned n, unsigned of, const Lane* where) {
  const char* const slash = strrchr(where->file, '/');
  complain(checker, "%s: only %u of %u threads that must meet in threadgroup %u come to %s:%d", d.kernel->name, n, of, running.group,
           slash ? slash + 1 : where->file, where->line);
  stopped = true;
}

// A barrier for the memories that its flags name.
void order_accesses(int flags, uint32_t* barrier) {
  ++running.clock.now;
  for (int space = 0; space < 2; ++space)
    if (flags >> space & 1) barrier[space] = running.clock.now;
}

// Nobody can go on. Lets the lanes of complete simdgroups go on, else the whole threadgroup, if it waits at one barrier.
void let_go_on(Dispatch& d) {
  bool any = false;
  const Lane* where;
  for (unsigned s = 0; s < d.threads; s += simd_lanes) {
    if (waiting(lanes + s, simd_lanes, Lane::InSimd, &where) < simd_lanes) continue;
    for (unsigned i = s; i < s + simd_lanes; ++i) {
      for (unsigned k = 0; k < simd_lanes; ++k) lanes[i].all[k] = lanes[s + k].mine;
      lanes[i].state = Lane::Ready;
    }
    if (!where->flags) ++d.exchanges;
    order_accesses(where->flags, running.clock.simdgroup_barrier[s / simd_lanes]);
    any = true;
  }
  if (any) return;
  for (unsigned s = 0; s < d.threads; s += simd_lanes)
    if (const unsigned n = waiting(lanes + s, simd_lanes, Lane::InSimd, &where)) return diverged("simdgroup", d, n, simd_lanes, where);
  const unsigned n = waiting(lanes, d.threads, Lane::AtBarrier, &where);
  if (n && n < d.threads) return diverged("barrier", d, n, d.threads, where);
  if (!n) return;
  order_accesses(where->flags, running.clock.barrier);
  for (unsigned i = 0; i < d.threads; ++i) lanes[i].state = Lane::Ready;
  ++d.barriers;
}

void run_group(Dispatch& d) {
  memset(threadgroup_memory, 0xff, sizeof threadgroup_memory);  // nan
  Clock& c = running.clock;
  c.barrier[0] = c.barrier[1] = c.group = ++c.now;
  ++c.groups;
  for (unsigned i = 0; i < d.threads; ++i) {
    Lane& lane = lanes[i];
    lane.state = Lane::Ready;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = stack_of(i);
    lane.context.uc_stack.ss_size = stack_bytes;
    makecontext(&lane.context, lane_main, 0);
  }
  for (std::vector<unsigned> ready;; ready.clear()) {
    for (unsigned i = 0; i < d.threads; ++i)
      if (lanes[i].state == Lane::Ready) ready.push_back(i);
    if (ready.empty()) return;
    while (!ready.empty()) {
      unsigned& pick = ready[random_number() % ready.size()];
      running.thread = pick;
      running.stack = uintptr_t(stack_of(pick));
      swapcontext(&scheduler, &lanes[pick].context);
      if (stopped) return;
      if (lanes[pick].state == Lane::Ready) continue;
      pick = ready.back();
      ready.pop_back();
    }
    let_go_on(d);
    if (stopped) return;
  }
}

}  // namespace

void stop() {
  stopped = true;
  leave(Lane::Done);
  __builtin_unreachable();
}

void maybe_switch() {
  if (switch_every && random_number() % switch_every == 0) leave(Lane::Ready);
}

void new_wave() { running.clock.wave = ++running.clock.now; }

const Emulator* emulator_functions() {
  static const Emulator functions = {access, barrier, simdgroup_barrier, exchange};
  return &functions;
}

void run(Dispatch& d, Seed seed, Some some) {
  d.regions.emplace_back("threadgroup memory", threadgroup_memory, d.threadgroup_bytes, true, true);
  running.dispatch = &d;
  running.stack_bytes = stack_bytes;
  running.clock.dispatch = ++running.clock.now;
  random_state = seed.seed * 0x9e3779b97f4a7c15 | 1;
  switch_every = seed.switch_every;
  stopped = false;
  std::vector<unsigned> order(some.first < d.groups ? std::min(some.count, d.groups - some.first) : 0);
  for (unsigned i = 0; i < order.size(); ++i) {
    order[i] = some.first + i;
    std::swap(order[i], order[random_number() % (i + 1)]);
  }
  for (size_t i = 0; i < order.size() && !stopped; ++i) {
    running.group = order[i];
    run_group(d);
  }
}

}  // namespace standin
