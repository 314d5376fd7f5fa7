// The variants of every kernel that norms and turns heads.
#pragma once
#include "variants/variants.h"

template <typename F>
Entry with_pairs(Argument a, F f) {
  switch (a) {
    case Argument::Halves: return f(Type<halves>{});
    case Argument::Adjacent: return f(Type<adjacent>{});
    case Argument::Apart: return f(Type<apart>{});
    default: return nullptr;
  }
}

// f(Type<storage>, rounds before the scale, rounds before the rotation, Type<pairs>).
template <typename F>
Entry with_heads(const Argument* a, F f) {
  return with_storage(a[0], [&](auto t) {
    return with_flag<rounds<TYPE(t)>>(a[1], [&](auto in_t) {
      return with_flag<rounds<TYPE(t)>>(a[2], [&](auto round) {
        return with_pairs(a[3], [&](auto pairs) -> Entry {
          using Pairs = TYPE(pairs);
          // what is rounded before the scale is rounded before the rotation, too
          if constexpr ((in_t.value && !round.value) || !PAIRS_FIT(Pairs)) return nullptr;
          else return f(t, in_t, round, pairs);
        });
      });
    });
  });
}
