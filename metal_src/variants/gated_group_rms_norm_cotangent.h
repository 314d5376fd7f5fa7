#include "kernels/gated_group_rms_norm_cotangent.metal"
#include "variants/variants.h"

static Entry find_gated_group_rms_norm_cotangent(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_float_or<TYPE(t)>(a[1], [&](auto g) {
      return with_float_or<TYPE(t)>(a[2], [&](auto o) {
        return with_flag<true>(a[3], [&](auto norm_first) {
          return ENTRY((gated_group_rms_norm_cotangent<TYPE(t), TYPE(g), TYPE(o), norm_first.value, SHAPE(KEPT)>));
        });
      });
    });
  });
}
FINDER(gated_group_rms_norm_cotangent)
