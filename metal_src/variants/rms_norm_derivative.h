#include "kernels/rms_norm_derivative.metal"
#include "variants/variants.h"

static Entry find_rms_norm_tangent(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_flag<true>(a[1], [&](auto residual) {
      return with_flag<true>(a[2], [&](auto gain) {
        return ENTRY((rms_norm_tangent<TYPE(t), residual.value, gain.value, SHAPE(READ_AGAIN)>));
      });
    });
  });
}
FINDER(rms_norm_tangent)

static Entry find_rms_norm_cotangent(const Argument* a) {
  return with_storage(a[0], [&](auto t) {
    return with_flag<true>(a[1], [&](auto residual) {
      return with_flag<true>(a[2], [&](auto sum) {
        return with_flag<true>(a[3], [&](auto gain) {
          return ENTRY((rms_norm_cotangent<TYPE(t), residual.value, sum.value, gain.value, SHAPE(READ_AGAIN)>));
        });
      });
    });
  });
}
FINDER(rms_norm_cotangent)
