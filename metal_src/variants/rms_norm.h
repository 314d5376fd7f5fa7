#include "kernels/rms_norm.metal"
#include "variants/variants.h"

static Entry find_rms_norm(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_scale<TYPE(t)>(a[1], [&](auto w) {
      return with_flag<rounds<TYPE(t)> && present<TYPE(w)>>(a[2], [&](auto in_t) {
        return ENTRY((rms_norm<TYPE(t), TYPE(w), in_t.value, SHAPE(rounds<TYPE(t)> ? KEPT : READ_AGAIN)>));
      });
    });
  });
}
FINDER(rms_norm)
