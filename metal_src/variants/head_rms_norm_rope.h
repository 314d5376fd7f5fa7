#include "kernels/head_rms_norm_rope.metal"
#include "variants/heads.h"

static Entry find_head_rms_norm_rope(const Argument* a) {
  return with_heads(a, [](auto t, auto in_t, auto round, auto pairs) {
    return ENTRY((head_rms_norm_rope<TYPE(t), in_t.value, round.value, TYPE(pairs), SHAPE(WHOLE)>));
  });
}
FINDER(head_rms_norm_rope)
