#include "kernels/l2_norm.metal"
#include "variants/variants.h"

static Entry find_l2_norm(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return ENTRY((l2_norm<TYPE(t), SHAPE(rounds<TYPE(t)> ? KEPT : READ_AGAIN)>));
  });
}
FINDER(l2_norm)
