#include "kernels/head_rms_norm_rope.metal"
#include "variants/variants.h"

template <typename F>
static Entry with_pairs(Argument a, F f) {
  switch (a) {
    case Argument::Halves: return f(Type<halves>{});
    case Argument::Adjacent: return f(Type<adjacent>{});
    case Argument::Apart: return f(Type<apart>{});
    default: return nullptr;
  }
}

static Entry find_head_rms_norm_rope(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_flag<rounds<TYPE(t)>>(a[1], [&](auto in_t) {
      return with_flag<rounds<TYPE(t)>>(a[2], [&](auto round) {
        return with_pairs(a[3], [&](auto pairs) -> Entry {
          using Pairs = TYPE(pairs);
          // what is rounded before the scale is rounded before the rotation, too
          if constexpr ((in_t.value && !round.value) || !PAIRS_FIT(Pairs)) return nullptr;
          else return ENTRY((head_rms_norm_rope<TYPE(t), in_t.value, round.value, Pairs, SHAPE(WHOLE)>));
        });
      });
    });
  });
}
FINDER(head_rms_norm_rope)
