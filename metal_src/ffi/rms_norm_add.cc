#include "ffi/handler.h"

namespace {

ffi::Error rms_norm_add(launcher::Context context, In x, In residual, ffi::RemainingArgs rest, Out out, float epsilon,
                        float scale_offset, bool multiply_before_cast, bool round_norm) {
  const char* op = "rms_norm_add";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, x, &at));
  RETURN_IF_ERROR(expect(op, "residual", residual.element_count(), x.element_count()));
  RETURN_IF_ERROR(expect(op, "out", out->element_count(), x.element_count()));
  In scale = x;  // stands for an absent one: the kernel does not touch it
  Argument scale_type = Argument::Ones;
  RETURN_IF_ERROR(optional_scale(op, rest, at.width, &scale, &scale_type));

  const NormParams params{at.rows, at.width, epsilon, scale_offset};
  Launch launch(op);
  launch.specialize(at.storage, scale_type, rounds_first(at.storage, scale_type, multiply_before_cast),
                    flag(round_norm && at.storage != Argument::Float));
  bind(launch, x);
  bind(launch, residual);
  bind(launch, scale);
  bind(launch, out);
  launch.over(at.rows, at, 3 * at.row_bytes, 1, params);
  return launcher::run(context, launch);
}

}  // namespace

HANDLER(rms_norm_add, rms_norm_add,
        BIND().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<float>("epsilon").Attr<float>("scale_offset").Attr<bool>(
            "multiply_before_cast").Attr<bool>("round_norm"))
