#include "ffi/handler.h"

namespace {

ffi::Error tangent(launcher::Context context, In x, ffi::RemainingArgs args, Out normed_dot, float epsilon, bool has_residual) {
  const char* op = "rms_norm_tangent";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, x, &at));
  RETURN_IF_ERROR(expect(op, "normed_dot", normed_dot->element_count(), x.element_count()));
  Rest rest(op, args);
  In residual = x, s_dot = x, gain = x;  // x stands for an absent residual: the kernel does not touch it
  if (has_residual) RETURN_IF_ERROR(rest.take("residual", x.element_count(), &residual));
  RETURN_IF_ERROR(rest.take("s_dot", x.element_count(), &s_dot));
  RETURN_IF_ERROR(rest.take("gain", at.width, &gain));
  const bool has_gain_dot = !rest.empty();
  In gain_dot = gain;
  if (has_gain_dot) RETURN_IF_ERROR(rest.take("gain_dot", at.width, &gain_dot));

  const NormDerivativeParams params{at.rows, at.width, at.rows, epsilon};
  Launch launch(op);
  launch.specialize(at.storage, flag(has_residual), flag(has_gain_dot));
  bind(launch, x);
  bind(launch, residual);
  bind(launch, s_dot);
  bind(launch, gain);
  bind(launch, gain_dot);
  bind(launch, normed_dot);
  launch.over(at.rows, at, (3 + has_residual) * at.row_bytes, 0, params);
  return launcher::run(context, launch);
}

ffi::Error cotangent(launcher::Context context, In x, ffi::RemainingArgs args, Out s_bar, ffi::RemainingRets more, float epsilon,
                     bool has_residual, bool has_sum) {
  const char* op = "rms_norm_cotangent";
  Rows at;
  RETURN_IF_ERROR(rows_of(op, x, &at));
  RETURN_IF_ERROR(expect(op, "s_bar", s_bar->element_count(), x.element_count()));
  Rest rest(op, args);
  In residual = x, normed_bar = x, sum_bar = x, gain = x;  // x stands for what is absent: the kernel does not touch it
  if (has_residual) RETURN_IF_ERROR(rest.take("residual", x.element_count(), &residual));
  RETURN_IF_ERROR(rest.take("normed_bar", x.element_count(), &normed_bar));
  if (has_sum) RETURN_IF_ERROR(rest.take("sum_bar", x.element_count(), &sum_bar));
  RETURN_IF_ERROR(rest.take("gain", at.width, &gain));
  const bool wants_gain = more.size() > 0;
  Out gain_bar = s_bar;
  uint32_t teams = at.rows;
  if (wants_gain) {
    gain_bar = *more.get<ffi::AnyBuffer>(0);
    teams = uint32_t(gain_bar->element_count() / at.width);
    RETURN_IF_ERROR(expect(op, "gain_bar", gain_bar->element_count(), uint64_t(teams) * at.width));
    if (teams == 0 && at.rows > 0) return refuse(std::string(op) + ": gain_bar needs at least one row");
  }

  const NormDerivativeParams params{at.rows, at.width, teams, epsilon};
  Launch launch(op);
  launch.specialize(at.storage, flag(has_residual), flag(has_sum), flag(wants_gain));
  bind(launch, x);
  bind(launch, residual);
  bind(launch, normed_bar);
  bind(launch, sum_bar);
  bind(launch, gain);
  bind(launch, s_bar);
  bind(launch, gain_bar);
  const size_t rows_a_team = teams ? at.rows / teams : 0;
  launch.over(teams, at, rows_a_team * (3 + has_residual + has_sum) * at.row_bytes, 0, params);
  return launcher::run(context, launch);
}

}  // namespace

HANDLER(rms_norm_tangent, tangent,
        BIND().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<float>("epsilon").Attr<bool>("has_residual"))
HANDLER(rms_norm_cotangent, cotangent,
        BIND().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().Attr<float>("epsilon").Attr<bool>("has_residual").Attr<bool>("has_sum"))
