#include "kernels/add_rms_norm.metal"
#include "variants/variants.h"

static Entry find_add_rms_norm(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_scale<TYPE(t)>(a[1], [&](auto w) {
      return with_flag<rounds<TYPE(t)> && present<TYPE(w)>>(a[2], [&](auto in_t) {
        return with_flag<rounds<TYPE(t)>>(a[3], [&](auto round_sum) {
          return with_flag<true>(a[4], [&](auto sum) {
            return ENTRY((add_rms_norm<TYPE(t), TYPE(w), in_t.value, round_sum.value, sum.value, SHAPE(KEPT)>));
          });
        });
      });
    });
  });
}
FINDER(add_rms_norm)
