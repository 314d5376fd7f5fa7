// One kernel file for one instruction set. VARIANTS names the file's variants, LEVEL the set.
#include <cstdint>

#include "compat/call.h"
#include "launch/host/entry.h"

#include "compat/host.h"

namespace {

using host::Entry;

// A group is a team, and a team this thread.
template <auto K>
void entry(void* const* buffers, float* scratch, unsigned first, unsigned last) {
  for (unsigned team = first; team < last; ++team) call<K>(buffers, scratch, team, 0, 0);
}

// V, R, SG, TEAMS: one element a load, one thread a team, and R as the variants say: whether the second sweep is faster from a kept
// row or from the operands, which lie in the cache. WHOLE: a head is never too long to be kept.
#define KEPT 1
#define READ_AGAIN 0
#define WHOLE 0x7fffffff
#define SHAPE(R) 1, R, 1, 1
#define STORAGE(T) true
#define PAIRS_FIT(pairs) (pairs::packs == 1)  // a thread has whole heads: halves are as any others
#define ENTRY(K) static_cast<Entry>(&entry<&K>)
#define ENTRY_AMONG_MANY ENTRY
#define FINDER(name) const host::Register register_##name(#name, host::LEVEL, find_##name);
#include VARIANTS

}  // namespace
