// One kernel file for one instruction set. VARIANTS names the file's variants, LEVEL the set.
#include <cstdint>
#include <tuple>
#include <utility>

#include "launch/host/entry.h"

#include "compat/host.h"

namespace {

using host::Entry;

// Turns an instantiated kernel into an Entry: buffers by position, the last one the params; a group is a team, and a team this thread.
template <typename P>
struct Bound;
template <typename T>
struct Bound<T*> {
  static T* from(void* buffer) { return static_cast<T*>(buffer); }
};
template <typename T>
struct Bound<const T&> {
  static const T& from(void* buffer) { return *static_cast<const T*>(buffer); }
};

template <auto K, typename... P, std::size_t... I>
inline void run_teams(void (*)(P...), std::index_sequence<I...>, void* const* buffers, float* scratch, unsigned first, unsigned last) {
  using All = std::tuple<P...>;
  for (unsigned team = first; team < last; ++team)
    K(Bound<std::tuple_element_t<I, All>>::from(buffers[I])..., scratch, team, 0, 0);
}

template <auto K, typename... P>
constexpr std::size_t buffers_of(void (*)(P...)) {
  return sizeof...(P) - 4;  // scratch, group, lane and simdgroup follow them
}

template <auto K>
void entry(void* const* buffers, float* scratch, unsigned first, unsigned last) {
  run_teams<K>(K, std::make_index_sequence<buffers_of<K>(K)>{}, buffers, scratch, first, last);
}

// V, R, SG, TEAMS: one element a load, one thread a team, and R as the variants say: whether the second sweep is faster from a kept
// row or from the operands, which lie in the cache.
#define KEPT 1
#define READ_AGAIN 0
#define SHAPE(R) 1, R, 1, 1
#define ENTRY(K) static_cast<Entry>(&entry<&K>)
#define FINDER(name) const host::Register register_##name(#name, host::LEVEL, find_##name);
#include VARIANTS

}  // namespace
