#include "kernels/partial_rms_norm.metal"
#include "variants/variants.h"

static Entry find_partial_rms_norm(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_scale<TYPE(t)>(a[1], [&](auto w) -> Entry {
      if constexpr (!present<TYPE(w)>) return nullptr;
      else return with_flag<rounds<TYPE(t)>>(a[2], [&](auto in_t) {
        return ENTRY((partial_rms_norm<TYPE(t), TYPE(w), in_t.value, SHAPE(rounds<TYPE(t)> ? KEPT : READ_AGAIN)>));
      });
    });
  });
}
FINDER(partial_rms_norm)
