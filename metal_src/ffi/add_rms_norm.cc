#include "ffi/handler.h"

namespace {

ffi::Error add_rms_norm(launcher::Context context, In x, In residual, ffi::RemainingArgs rest, Out normed, ffi::RemainingRets more,
                        float epsilon, float scale_offset, bool multiply_before_cast, bool round_sum) {
  const char* op = "add_rms_norm";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, x, &at));
  RETURN_IF_ERROR(expect(op, "residual", residual.element_count(), x.element_count()));
  RETURN_IF_ERROR(expect(op, "normed", normed->element_count(), x.element_count()));
  In scale = x;  // stands for an absent one: the kernel does not touch it
  Argument scale_type = Argument::Ones;
  RETURN_IF_ERROR(optional_scale(op, rest, at.width, &scale, &scale_type));
  const bool wants_sum = more.size() > 0;
  Out sum = normed;  // likewise
  if (wants_sum) {
    sum = *more.get<ffi::AnyBuffer>(0);
    RETURN_IF_ERROR(expect(op, "sum", sum->element_count(), x.element_count()));
  }

  const NormParams params{at.rows, at.width, epsilon, scale_offset};
  Launch launch(op);
  launch.specialize(at.storage, scale_type, rounds_first(at.storage, scale_type, multiply_before_cast),
                    flag(round_sum && at.storage != Argument::Float), flag(wants_sum));
  bind(launch, x);
  bind(launch, residual);
  bind(launch, scale);
  bind(launch, normed);
  bind(launch, sum);
  launch.over(at.rows, at, (3 + wants_sum) * at.row_bytes, 1, params);
  return launcher::run(context, launch);
}

}  // namespace

HANDLER(add_rms_norm, add_rms_norm,
        BIND().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().Attr<float>("epsilon").Attr<float>(
            "scale_offset").Attr<bool>("multiply_before_cast").Attr<bool>("round_sum"))
