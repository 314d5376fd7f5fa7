#include "kernels/head_rms_norm_rope_cotangent.metal"
#include "variants/heads.h"

static Entry find_head_rms_norm_rope_cotangent(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_flag<true>(a[1], [&](auto scale) {
      return with_pairs(a[2], [&](auto pairs) -> Entry {
        using Pairs = TYPE(pairs);
        if constexpr (!PAIRS_FIT(Pairs)) return nullptr;
        else return ENTRY((head_rms_norm_rope_cotangent<TYPE(t), scale.value, Pairs, SHAPE(WHOLE)>));
      });
    });
  });
}
FINDER(head_rms_norm_rope_cotangent)
