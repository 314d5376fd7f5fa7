#include "kernels/matvec.metal"
#include "variants/variants.h"

static Entry find_matvec(const Argument* a) {
  return with_storage(a[0], [&](auto t) { return ENTRY_AMONG_MANY((matvec<TYPE(t), SHAPE(READ_AGAIN)>)); });
}
FINDER(matvec)

static Entry find_vecmat(const Argument* a) {
  return with_storage(a[0], [&](auto t) { return ENTRY((vecmat<TYPE(t), SHAPE(READ_AGAIN)>)); });
}
FINDER(vecmat)
