#include "kernels/gated_group_rms_norm.metal"
#include "variants/variants.h"

static Entry find_gated_group_rms_norm(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_float_or<TYPE(t)>(a[1], [&](auto g) {
      return with_float_or<TYPE(t)>(a[2], [&](auto o) {
        return with_float_or<TYPE(o)>(a[3], [&](auto w) {  // beside a wider output the scale is float
          return with_flag<true>(a[4], [&](auto norm_first) {
            return with_flag<rounds<TYPE(t)>>(a[5], [&](auto round) {
              return ENTRY((gated_group_rms_norm<TYPE(t), TYPE(g), TYPE(o), TYPE(w), norm_first.value, round.value, SHAPE(KEPT)>));
            });
          });
        });
      });
    });
  });
}
FINDER(gated_group_rms_norm)
