#include "kernels/rms_norm_add.metal"
#include "variants/variants.h"

static Entry find_rms_norm_add(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_scale<TYPE(t)>(a[1], [&](auto w) {
      return with_flag<rounds<TYPE(t)> && present<TYPE(w)>>(a[2], [&](auto in_t) {
        return with_flag<rounds<TYPE(t)>>(a[3], [&](auto round_norm) {
          return ENTRY((rms_norm_add<TYPE(t), TYPE(w), in_t.value, round_norm.value, SHAPE(rounds<TYPE(t)> ? KEPT : READ_AGAIN)>));
        });
      });
    });
  });
}
FINDER(rms_norm_add)
