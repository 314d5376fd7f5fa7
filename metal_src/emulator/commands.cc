// Command buffers: what may be encoded, and what running it does.
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>

#include "emulator/objects.h"

namespace standin {
namespace {

enum Status { NotCommitted = 0, Committed = 2, Completed = 4, Failed = 5 };

struct Size {
  NSUInteger width, height, depth;
};

// What a kernel gets for one [[buffer(n)]]: a buffer from an offset on, or bytes of its own.
struct Binding {
  Ref<Buffer> buffer;
  size_t offset = 0;
  std::string bytes;

  const char* data() const { return buffer ? buffer->data + offset : bytes.data(); }
  size_t length() const { return buffer ? buffer->length - offset : bytes.size(); }
  // With its declared array's end, where there is one.
  Region region(size_t index, bool writable) const {
    size_t n = length();
    if (buffer)
      for (auto& array : buffer->arrays)
        if (offset >= array.first && offset < array.second) n = std::min(n, array.second - offset);
    return Region("buffer(" + std::to_string(index) + ")", data(), n, writable && buffer);
  }
};

struct Command {
  Ref<Pipeline> pipeline;
  Binding bindings[most_buffers];
  size_t threadgroup_bytes = 0;
  bool barrier_before = false;
  Size groups, threads;
};

struct Encoder;

struct CommandBuffer : Object {
  const bool retains;  // what it uses
  std::vector<Command> commands;
  Ref<Encoder> encoder;
  std::atomic<int> status{NotCommitted};
  Text* error = nullptr;
  explicit CommandBuffer(bool r) : Object("MTLCommandBuffer"), retains(r) {}
  ~CommandBuffer() override { if (error) release(error); }
};

struct Encoder : Object {
  CommandBuffer* const commands;
  Command next;
  bool ended = false;

  explicit Encoder(CommandBuffer* c) : Object("MTLComputeCommandEncoder"), commands(c) {}
  ~Encoder() override { if (!ended) complain("order", "an encoder is released before endEncoding"); }
  bool usable(const char* what) {
    if (creator != std::this_thread::get_id()) complain("thread", "%s on another thread than the encoder's", what);
    return !ended || (complain("order", "%s after endEncoding", what), false);
  }
  Binding* fresh_binding(const char* what, NSUInteger index) {
    if (!usable(what)) return nullptr;
    if (index < most_buffers) return &(next.bindings[index] = Binding());
    return complain("binding", "%s: index %lu is more than %u", what, index, most_buffers - 1), nullptr;
  }
};

struct Queue : Object {
  Queue() : Object("MTLCommandQueue", true) {}
};

Seed seed;
Some some;
int under_way = 0;
auto& done = *new std::condition_variable_any;  // never destroyed: threads may outlive main
std::deque<standin_dispatch> dispatched;

void report(const Dispatch& d) {
  standin_dispatch ran = {{}, d.groups, d.threads, d.threadgroup_bytes, d.barriers, d.exchanges, {}, {}};
  strncpy(ran.kernel, d.kernel->name, sizeof ran.kernel - 1);
  for (size_t i = 0; i < d.regions.size(); ++i)
    (i < d.kernel->buffer_count ? ran.buffers[i] : ran.threadgroup_memory) = d.regions[i].moved;
  dispatched.push_back(ran);
}

// The first element that the kernel wrote of each buffer, or of the last that it wrote, gets another exponent.
void make_wrong(const Dispatch& d, bool each) {
  for (size_t i = d.kernel->buffer_count; i--;) {
    size_t at = 0;
    while (at < d.regions[i].bytes && !(d.regions[i].touched.get()[at] & 2)) ++at;
    if (at == d.regions[i].bytes) continue;
    reinterpret_cast<char*>(d.regions[i].base)[at + d.kernel->buffers[i].bytes - 1] ^= 0x40;
    if (!each) return;
  }
}

// Whether everything it uses is still there, if it retains nothing.
bool intact(const CommandBuffer* c) {
  bool all = true;
  for (const Command& command : c->commands) {
    all &= command.pipeline->references > 0;
    for (const Binding& b : command.bindings) all &= !b.buffer || b.buffer->references > 0;
  }
  return all || c->retains;
}

// What failed, or nothing.
std::string execute(const CommandBuffer* c) {
  static std::mutex gpu;  // runs one command buffer at a time
  std::lock_guard<std::mutex> one(gpu);
  const size_t before = complaint_count();
  forget_accesses();
  new_wave();
  for (const Command& command : c->commands) {
    const EmulatedKernel* const kernel = command.pipeline->kernel;
    while (misbehaves("hang", kernel->name)) usleep(1000);
    if (command.barrier_before) new_wave();
    Dispatch d{kernel, {}, unsigned(command.groups.width), unsigned(command.threads.width), unsigned(command.threadgroup_bytes)};
    for (size_t i = 0; i < kernel->buffer_count; ++i) d.regions.push_back(command.bindings[i].region(i, kernel->buffers[i].writable));
    run(d, seed, some);
    std::lock_guard<std::recursive_mutex> guard(lock());
    report(d);
    const bool fails = misbehaves("fail", kernel->name), each = fails || misbehaves("wrong", kernel->name);
    if (each || misbehaves("wrong last", kernel->name)) make_wrong(d, each);
    if (fails) return std::string(kernel->name) + " fails, as asked for";
  }
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (!intact(c)) complain("object", "a command buffer that retains nothing uses what is gone before it has completed");
  return complaints_after(before);
}

void use(const CommandBuffer* c, int step) {
  for (const Command& command : c->commands)
    for (const Binding& b : command.bindings)
      if (b.buffer) b.buffer->under_way += step;
}

void finish(Ref<CommandBuffer>* committed) {
  CommandBuffer* const c = *committed;
  const std::string error = execute(c);
  std::lock_guard<std::recursive_mutex> guard(lock());
  if (!error.empty()) c->error = new Text("NSError", error);
  c->status = error.empty() ? Completed : Failed;
  use(c, -1);
  delete committed;
  --under_way;
  done.notify_all();
}

void commit(CommandBuffer* c, SEL) {
  if (c->creator != std::this_thread::get_id()) complain("thread", "commit on another thread than the command buffer's");
  if (c->encoder && !c->encoder->ended) complain("order", "commit before endEncoding");
  if (c->status != NotCommitted) {
    complain("order", "commit for the second time");
    return;
  }
  c->status = Committed;
  std::lock_guard<std::recursive_mutex> guard(lock());
  ++under_way;
  use(c, 1);
  std::thread(finish, new Ref<CommandBuffer>(c)).detach();
}

void wait(CommandBuffer* c, SEL) {
  std::unique_lock<std::recursive_mutex> guard(lock());
  if (c->status == NotCommitted)
    complain("order", "waitUntilCompleted before commit");
  else
    done.wait(guard, [c] { return c->status >= Completed; });
}

Object* new_encoder(CommandBuffer* c, SEL) {
  if (c->status != NotCommitted) complain("order", "computeCommandEncoder after commit");
  if (c->encoder && !c->encoder->ended) complain("order", "computeCommandEncoder before the last one's endEncoding");
  return autorelease(c->encoder = new Encoder(c));
}

void set_buffer(Encoder* e, SEL, Buffer* buffer, NSUInteger offset, NSUInteger index) {
  Binding* const b = e->fresh_binding("setBuffer", index);
  if (!b || !buffer || gone("setBuffer", buffer)) return;
  if (offset < buffer->length)
    b->buffer = buffer, b->offset = offset;
  else
    complain("binding", "setBuffer: offset %lu is outside the buffer's %zu bytes", offset, buffer->length);
}

void set_bytes(Encoder* e, SEL, const char* data, NSUInteger bytes, NSUInteger index) {
  Binding* const b = e->fresh_binding("setBytes", index);
  if (!b) return;
  if (!bytes || bytes > 4096) complain("limits", "setBytes: %lu bytes, but 1 to 4096 are allowed", bytes);
  b->bytes.assign(data, bytes);
}

void set_threadgroup_memory(Encoder* e, SEL, NSUInteger bytes, NSUInteger index) {
  if (!e->usable("setThreadgroupMemoryLength")) return;
  if (index) complain("binding", "setThreadgroupMemoryLength: index %lu, but kernels have theirs at 0", index);
  if (bytes % 16 || bytes > most_threadgroup_bytes)
    complain("limits", "setThreadgroupMemoryLength: %lu is no multiple of 16 up to %u", bytes, most_threadgroup_bytes);
  e->next.threadgroup_bytes = std::min<size_t>(bytes, most_threadgroup_bytes);
}

void set_pipeline(Encoder* e, SEL, Pipeline* p) {
  if (e->usable("setComputePipelineState") && !gone("setComputePipelineState", p)) e->next.pipeline = p;
}

void memory_barrier(Encoder* e, SEL, NSUInteger scope) {
  if (e->usable("memoryBarrierWithScope")) e->next.barrier_before |= scope & 1;  // MTLBarrierScopeBuffers
}

void end_encoding(Encoder* e, SEL) {
  if (e->usable("endEncoding")) e->ended = true;
}

// A dispatch that breaks a rule does not run.
void dispatch(Encoder* e, SEL, Size groups, Size threads) {
  if (!e->usable("dispatchThreadgroups")) return;
  Command& next = e->next;
  if (!next.pipeline || !next.threadgroup_bytes) {
    complain("binding", "dispatchThreadgroups: no %s is set", next.pipeline ? "length of threadgroup(0)" : "pipeline");
    return;
  }
  const EmulatedKernel* const kernel = next.pipeline->kernel;
  for (size_t i = 0; i < kernel->buffer_count; ++i)
    if (next.bindings[i].length() < kernel->buffers[i].bytes) {
      complain("binding", "%s: buffer(%zu) has %zu bytes, but at least %zu are wanted", kernel->name, i, next.bindings[i].length(),
               kernel->buffers[i].bytes);
      return;
    }
  const NSUInteger most = Pipeline::max_threads();
  if (groups.height != 1 || groups.depth != 1 || threads.height != 1 || threads.depth != 1 || !groups.width || !threads.width ||
      threads.width % simd_lanes || threads.width > most) {
    complain("limits",
             "%s: %lu x %lu x %lu threadgroups of %lu x %lu x %lu threads, but one dimension of whole simdgroups, up to %lu threads, is wanted",
             kernel->name, groups.width, groups.height, groups.depth, threads.width, threads.height, threads.depth, most);
    return;
  }
  next.groups = groups;
  next.threads = threads;
  e->commands->commands.push_back(next);
  next.barrier_before = false;
}

}  // namespace

void add_command_methods() {
  method("MTLDevice", "newCommandQueue", [](Object*, SEL) -> Object* { return new Queue; });
  method("MTLCommandQueue", "commandBuffer", [](Queue*, SEL) { return autorelease(new CommandBuffer(true)); });
  method("MTLCommandQueue", "commandBufferWithUnretainedReferences", [](Queue*, SEL) { return autorelease(new CommandBuffer(false)); });
  method("MTLCommandBuffer", "computeCommandEncoder", new_encoder);
  method("MTLCommandBuffer", "commit", commit);
  method("MTLCommandBuffer", "waitUntilCompleted", wait);
  method("MTLCommandBuffer", "status", [](CommandBuffer* c, SEL) -> NSUInteger { return c->status; });
  method("MTLCommandBuffer", "error", [](CommandBuffer* c, SEL) -> Object* { return c->error; });
  method("MTLComputeCommandEncoder", "setComputePipelineState:", set_pipeline);
  method("MTLComputeCommandEncoder", "setBuffer:offset:atIndex:", set_buffer);
  method("MTLComputeCommandEncoder", "setBytes:length:atIndex:", set_bytes);
  method("MTLComputeCommandEncoder", "setThreadgroupMemoryLength:atIndex:", set_threadgroup_memory);
  method("MTLComputeCommandEncoder", "memoryBarrierWithScope:", memory_barrier);
  method("MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:", dispatch);
  method("MTLComputeCommandEncoder", "endEncoding", end_encoding);
}

}  // namespace standin

extern "C" {

using namespace standin;

const char* standin_complaints() {
  std::unique_lock<std::recursive_mutex> guard(lock());
  done.wait(guard, [] { return !under_way || misbehaves("hang"); });
  const size_t lasting = complaint_count();
  look_for_leaks();
  static std::string text;
  text = complaints_after(0);
  forget_after(lasting);  // a call under way has yet to release what it has
  return text.c_str();
}

void standin_reset() {
  std::unique_lock<std::recursive_mutex> guard(lock());
  forget_complaints();  // nothing hangs any more
  done.wait(guard, [] { return !under_way; });
  forgive_leaks();
  forget_complaints();
  dispatched.clear();
  seed = Seed();
  some = Some();
}

void standin_seed(uint64_t s, unsigned switch_every) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  seed = {s, switch_every};
}

void standin_run_some(unsigned first, unsigned count) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  some = {first, count};
}

const standin_dispatch* standin_dispatched(int number) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  return size_t(number) < dispatched.size() ? &dispatched[number] : nullptr;
}
}
