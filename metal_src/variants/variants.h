// From run-time arguments to instantiations, for the targets that are compiled ahead. Each kernel file has a header here that says which exist.
#pragma once
#include "launch/launch.h"

template <typename T>
struct Type {
  typedef T type;
};

// f(Type<T>) for a storage type; a null entry for any other argument.
template <typename F>
auto with_storage(Argument a, F f) -> decltype(f(Type<float>{})) {
  switch (a) {
    case Argument::Float: return f(Type<float>{});
    case Argument::Bfloat: return f(Type<bfloat>{});
    case Argument::Half: return f(Type<half>{});
    default: return nullptr;
  }
}

// The same for a scale, which may be absent.
template <typename F>
auto with_scale(Argument a, F f) -> decltype(f(Type<float>{})) {
  return a == Argument::Ones ? f(Type<ones>{}) : with_storage(a, f);
}

// f(true_type or false_type). Allowed = false: only `false` exists, because `true` would compute the same.
template <bool Allowed, typename F>
auto with_flag(Argument a, F f) -> decltype(f(std::false_type{})) {
  if constexpr (Allowed) {
    if (a == Argument::True) return f(std::true_type{});
  }
  return a == Argument::False ? f(std::false_type{}) : nullptr;
}

// Rounding to float is nothing.
template <typename T>
constexpr bool rounds = !std::is_same<T, float>::value;
template <typename W>
constexpr bool present = !std::is_same<W, ones>::value;

#define TYPE(tag) typename decltype(tag)::type
