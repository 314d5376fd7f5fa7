// Calls a kernel, an instantiated function template, with erased types: buffers by position, the last one the params.
#pragma once
#include <cstddef>
#include <tuple>
#include <utility>

namespace {

// A parameter, and the pointer that is bound to it.
template <typename P>
struct Bound;
template <typename T>
struct Bound<T*> {
  typedef T Pointee;
  static T* from(void* buffer) { return static_cast<T*>(buffer); }
};
template <typename T>
struct Bound<const T&> {
  typedef const T Pointee;
  static const T& from(void* buffer) { return *static_cast<const T*>(buffer); }
};

template <auto K, typename... P, std::size_t... I>
inline __attribute__((always_inline)) void call_with(void (*)(P...), std::index_sequence<I...>, void* const* buffers, float* scratch,
                                                     unsigned group, unsigned lane, unsigned simdgroup) {
  using All = std::tuple<P...>;
  K(Bound<std::tuple_element_t<I, All>>::from(buffers[I])..., scratch, group, lane, simdgroup);
}

template <typename... P>
constexpr std::size_t buffers_of(void (*)(P...)) {
  return sizeof...(P) - 4;  // scratch, group, lane and simdgroup follow them
}

template <auto K>
inline __attribute__((always_inline)) void call(void* const* buffers, float* scratch, unsigned group, unsigned lane, unsigned simdgroup) {
  call_with<K>(K, std::make_index_sequence<buffers_of(K)>{}, buffers, scratch, group, lane, simdgroup);
}

}  // namespace
