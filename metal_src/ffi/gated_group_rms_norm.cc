#include "ffi/handler.h"
#include "launch/shape.h"

namespace {

// y [..., groups, width] and the columns of the gate beside it.
struct Gated {
  Rows at;  // a group each
  Argument gate_storage;
  GatedGroupNormParams params;
};

ffi::Error decode(const char* op, const In& y, const In& gate, const In& scale, uint64_t gate_width, uint64_t gate_start, bool silu,
                  float epsilon, Gated* out) {
  RETURN_IF_ERROR(rows_of(op, y, &out->at));
  const auto shape = y.dimensions();
  if (shape.size() < 2 || shape[shape.size() - 2] == 0) return refuse(std::string(op) + ": y needs an axis of groups");
  const uint64_t groups = shape[shape.size() - 2], rows = out->at.rows / groups, row_width = groups * out->at.width;
  if (!storage_of(gate.element_type(), &out->gate_storage)) return refuse(std::string(op) + ": gate is of a dtype that has no kernel");
  RETURN_IF_ERROR(expect(op, "gate", gate.element_count(), rows * gate_width));
  RETURN_IF_ERROR(expect(op, "scale", scale.element_count(), row_width));
  if (gate_width >> 31 || gate_start + row_width > gate_width || gate_start > gate_width)
    return refuse(std::string(op) + ": gate has " + std::to_string(gate_width) + " columns, too few for " + std::to_string(row_width) +
                  " from column " + std::to_string(gate_start));
  const uint64_t bytes = bytes_of(out->gate_storage);  // a group of whole packs is a multiple of load_bytes in the gate, too
  const bool aligned = gate_width * bytes % load_bytes == 0 && gate_start * bytes % load_bytes == 0;
  out->params = {uint32_t(rows), uint32_t(groups), out->at.width, uint32_t(rows), uint32_t(gate_width), uint32_t(gate_start), aligned, silu, epsilon};
  return ffi::Error::Success();
}

ffi::Error forward(launcher::Context context, In y, In gate, In scale, Out normed, int64_t gate_width, int64_t gate_start, bool silu,
                   float epsilon, bool norm_first, bool round_norm) {
  const char* op = "gated_group_rms_norm";
  Gated g;
  RETURN_IF_ERROR(decode(op, y, gate, scale, gate_width, gate_start, silu, epsilon, &g));
  RETURN_IF_ERROR(expect(op, "out", normed->element_count(), y.element_count()));
  Argument scale_type, out_type;
  if (!storage_of(scale.element_type(), &scale_type)) return refuse(std::string(op) + ": scale is of a dtype that has no kernel");
  if (!storage_of(normed->element_type(), &out_type)) return refuse(std::string(op) + ": out is of a dtype that has no kernel");

  Launch launch(op);
  launch.specialize(g.at.storage, g.gate_storage, out_type, scale_type, flag(norm_first), flag(round_norm && g.at.storage != Argument::Float));
  bind(launch, y);
  bind(launch, gate);
  bind(launch, scale);
  bind(launch, normed);
  launch.over(g.at.rows, g.at, 3 * g.at.row_bytes, 1, g.params);
  return launcher::run(context, launch);
}

ffi::Error cotangent(launcher::Context context, In y, In gate, In scale, In out_bar, Out y_bar, Out gate_bar, Out scale_bar,
                     int64_t gate_width, int64_t gate_start, bool silu, float epsilon, bool norm_first) {
  const char* op = "gated_group_rms_norm_cotangent";
  Gated g;
  RETURN_IF_ERROR(decode(op, y, gate, scale, gate_width, gate_start, silu, epsilon, &g));
  for (auto& each : {std::make_pair("out_bar", uint64_t(out_bar.element_count())), std::make_pair("y_bar", uint64_t(y_bar->element_count())),
                     std::make_pair("gate_bar", uint64_t(gate_bar->element_count()))})
    RETURN_IF_ERROR(expect(op, each.first, each.second, y.element_count()));
  if (scale.element_type() != ffi::DataType::F32 || scale_bar->element_type() != ffi::DataType::F32)
    return refuse(std::string(op) + ": scale and scale_bar must be float32");
  if (gate_bar->element_type() != gate.element_type()) return refuse(std::string(op) + ": gate_bar is of another dtype than gate");
  Argument out_type;
  if (!storage_of(out_bar.element_type(), &out_type)) return refuse(std::string(op) + ": out_bar is of a dtype that has no kernel");
  const uint64_t row_width = scale.element_count();
  g.params.blocks = uint32_t(scale_bar->element_count() / row_width);
  RETURN_IF_ERROR(expect(op, "scale_bar", scale_bar->element_count(), g.params.blocks * row_width));
  if (g.params.blocks == 0 && g.params.rows > 0) return refuse(std::string(op) + ": scale_bar needs at least one row");

  Launch launch(op);
  launch.specialize(g.at.storage, g.gate_storage, out_type, flag(norm_first));
  bind(launch, y);
  bind(launch, gate);
  bind(launch, scale);
  bind(launch, out_bar);
  bind(launch, y_bar);
  bind(launch, gate_bar);
  bind(launch, scale_bar);
  const size_t rows_a_team = g.params.blocks ? g.params.rows / g.params.blocks : 0;
  launch.over(g.params.blocks * g.params.groups, g.at, rows_a_team * 5 * g.at.row_bytes, 2, g.params);
  return launcher::run(context, launch);
}

}  // namespace

#define GATE() Attr<int64_t>("gate_width").Attr<int64_t>("gate_start").Attr<bool>("silu")
HANDLER(gated_group_rms_norm, forward,
        BIND().Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().GATE().Attr<float>("epsilon").Attr<bool>("norm_first").Attr<bool>("round_norm"))
HANDLER(gated_group_rms_norm_cotangent, cotangent,
        BIND().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().GATE().Attr<float>(
            "epsilon").Attr<bool>("norm_first"))
