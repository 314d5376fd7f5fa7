#include "ffi/handler.h"

namespace {

ffi::Error l2_norm(launcher::Context context, In x, Out normed, float epsilon) {
  const char* op = "l2_norm";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, x, &at));
  RETURN_IF_ERROR(expect(op, "normed", normed->element_count(), x.element_count()));

  const NormParams params{at.rows, at.width, epsilon, 0};
  Launch launch(op);
  launch.specialize(at.storage);
  bind(launch, x);
  bind(launch, normed);
  launch.over(at.rows, at, 2 * at.row_bytes, 1, params);
  return launcher::run(context, launch);
}

}  // namespace

HANDLER(l2_norm, l2_norm, BIND().Arg<In>().Ret<ffi::AnyBuffer>().Attr<float>("epsilon"))
