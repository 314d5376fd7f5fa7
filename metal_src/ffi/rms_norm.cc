#include "ffi/handler.h"

namespace {

ffi::Error rms_norm(launcher::Context context, In x, ffi::RemainingArgs rest, Out normed, float epsilon, float scale_offset,
                    bool multiply_before_cast) {
  const char* op = "rms_norm";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, x, &at));
  RETURN_IF_ERROR(expect(op, "normed", normed->element_count(), x.element_count()));
  In scale = x;  // stands for an absent one: the kernel does not touch it
  Argument scale_type = Argument::Ones;
  RETURN_IF_ERROR(optional_scale(op, rest, at.width, &scale, &scale_type));

  const NormParams params{at.rows, at.width, epsilon, scale_offset};
  Launch launch(op);
  launch.specialize(at.storage, scale_type, rounds_first(at.storage, scale_type, multiply_before_cast));
  bind(launch, x);
  bind(launch, scale);
  bind(launch, normed);
  launch.over(at.rows, at, 2 * at.row_bytes, 1, params);
  return launcher::run(context, launch);
}

}  // namespace

HANDLER(rms_norm, rms_norm,
        BIND().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<float>("epsilon").Attr<float>("scale_offset").Attr<bool>(
            "multiply_before_cast"))
