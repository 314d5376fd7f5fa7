#include "kernels/qk_rms_norm_rope_paged.metal"
#include "variants/heads.h"

static Entry find_qk_rms_norm_rope_paged(const Argument* a) {
  return with_heads(a, [](auto t, auto in_t, auto round, auto pairs) {
    return ENTRY((qk_rms_norm_rope_paged<TYPE(t), in_t.value, round.value, TYPE(pairs), SHAPE(WHOLE)>));
  });
}
FINDER(qk_rms_norm_rope_paged)
