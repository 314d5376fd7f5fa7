// From run-time arguments to instantiations, for the targets that are compiled ahead. Each kernel file has a header here that says which exist.
#pragma once
#include "launch/launch.h"

template <typename T>
struct Type {
  typedef T type;
};

// Rounding to float is nothing.
template <typename T>
constexpr bool rounds = !std::is_same<T, float>::value;
template <typename W>
constexpr bool present = !std::is_same<W, ones>::value;

// f(Type<T>) for a storage type that this object is compiled for; a null entry for any other argument.
template <typename T, typename F>
Entry with(F f) {
  if constexpr (STORAGE(T)) return f(Type<T>{});
  return nullptr;
}
template <typename F>
Entry with_storage(Argument a, F f) {
  switch (a) {
    case Argument::Float: return with<float>(f);
    case Argument::Bfloat: return with<bfloat>(f);
    case Argument::Half: return with<half>(f);
    default: return nullptr;
  }
}

// The same for what lies beside storage T: float, or T. Python converts any other to float, which holds it exactly.
template <typename T, typename F>
Entry with_float_or(Argument a, F f) {
  if (a == Argument::Float) return f(Type<float>{});
  if constexpr (rounds<T>) {
    if (a == (std::is_same<T, half>::value ? Argument::Half : Argument::Bfloat)) return f(Type<T>{});
  }
  return nullptr;
}

// The same for a scale, which may be absent.
template <typename T, typename F>
Entry with_scale(Argument a, F f) {
  return a == Argument::Ones ? f(Type<ones>{}) : with_float_or<T>(a, f);
}

// f(true_type or false_type). Allowed = false: only `false` exists, because `true` would compute the same.
template <bool Allowed, typename F>
Entry with_flag(Argument a, F f) {
  if constexpr (Allowed) {
    if (a == Argument::True) return f(std::true_type{});
  }
  return a == Argument::False ? f(std::false_type{}) : nullptr;
}

#define TYPE(tag) typename decltype(tag)::type
