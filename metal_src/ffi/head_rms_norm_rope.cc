#include "ffi/heads.h"

namespace {

constexpr size_t most_copies = 6;  // that the kernel has buffers for

// [..., tokens, heads, width] of x, and how many tokens one sequence has.
struct Heads {
  uint32_t tokens, sequence, heads, width;
  Argument storage;
};

ffi::Error heads_of(const char* op, const In& x, Heads* at) {
  const auto shape = x.dimensions();
  if (!storage_of(x.element_type(), &at->storage)) return refuse(std::string(op) + ": x is of a dtype that has no kernel");
  if (shape.size() < 3 || shape.back() == 0) return refuse(std::string(op) + ": x needs axes of tokens, heads and at least one channel");
  const uint64_t width = shape.back(), heads = shape[shape.size() - 2], sequence = shape[shape.size() - 3];
  uint64_t tokens = 1;
  for (size_t axis = 0; axis + 2 < shape.size(); ++axis) tokens *= shape[axis];
  if (width >> 31 || heads >> 31 || sequence >> 31 || tokens >> 31) return refuse(std::string(op) + ": x has an axis of more than 2^31 elements");
  at->tokens = uint32_t(tokens);
  at->sequence = uint32_t(sequence);
  at->heads = uint32_t(heads);
  at->width = uint32_t(width);
  return ffi::Error::Success();
}

ffi::Error head_rms_norm_rope(launcher::Context context, In x, In positions, In angles, ffi::RemainingArgs args, Out out,
                              ffi::RemainingRets more, float epsilon, float scale_offset, bool multiply_before_cast, bool round_before_rope,
                              int32_t style, bool suffix, bool has_k, int64_t head_major) {
  const char* op = "head_rms_norm_rope";
  Heads at;
  RETURN_IF_ERROR(heads_of(op, x, &at));
  RETURN_IF_ERROR(expect(op, "positions", positions.element_count(), at.tokens));
  if (positions.element_type() != ffi::DataType::S32) return refuse(std::string(op) + ": positions must be int32");
  RETURN_IF_ERROR(expect(op, "the first result", out->element_count(), x.element_count()));

  HeadNormRopeParams p{at.tokens, at.sequence, at.heads, 0, at.width};
  RETURN_IF_ERROR(rotation_of(op, angles, style, suffix, &p));
  p.epsilon = epsilon;
  p.scale_offset = scale_offset;

  Rest rest(op, args);
  In k = x;  // stands for an absent one, as x for its scale: the kernel does not touch it
  Out k_out = out;
  if (has_k) {
    Heads of_k;
    RETURN_IF_ERROR(rest.take(&k));
    RETURN_IF_ERROR(heads_of(op, k, &of_k));
    if (of_k.storage != at.storage || of_k.width != at.width || of_k.tokens != at.tokens || more.size() != 1)
      return refuse(std::string(op) + ": k and its one result must have x's dtype, tokens and width");
    k_out = *more.get<ffi::AnyBuffer>(0);
    RETURN_IF_ERROR(expect(op, "the second result", k_out->element_count(), k.element_count()));
    p.k_heads = of_k.heads;
  }
  In x_scale = x, k_scale = x;
  RETURN_IF_ERROR(scales_of(op, rest, at.storage, has_k, &x_scale, &k_scale, &p));

  const size_t copies = has_k ? 0 : more.size();
  if (copies > most_copies) return refuse(std::string(op) + ": more than " + std::to_string(most_copies) + " copies");
  size_t copied = 0;
  Out copy[most_copies] = {out, out, out, out, out, out};  // what is not wanted is bound to what is, and never touched
  for (size_t i = 0; i < copies; ++i) {
    Argument type;
    copy[i] = *more.get<ffi::AnyBuffer>(i);
    RETURN_IF_ERROR(expect(op, "a copy", copy[i]->element_count(), x.element_count()));
    if (!storage_of(copy[i]->element_type(), &type)) return refuse(std::string(op) + ": a copy is of a dtype that has no kernel");
    p.copy_types |= uint(type == Argument::Float ? float_copy : type == Argument::Bfloat ? bfloat_copy : half_copy) << 2 * i;
    copied += copy[i]->size_bytes();
  }
  p.copies = uint(copies);
  p.head_major = uint(head_major);

  uint32_t teams;
  Launch launch = launch_of_heads(op, at.storage, multiply_before_cast, round_before_rope, {p.heads, p.k_heads}, &p, &teams);
  bind(launch, x);
  bind(launch, k);
  bind(launch, positions);
  bind(launch, p.pairs ? angles : x);
  bind(launch, x_scale);
  bind(launch, k_scale);
  bind(launch, out);
  bind(launch, k_out);
  for (Out& each : copy) bind(launch, each);
  const size_t bytes = 2 * (x.size_bytes() + (has_k ? k.size_bytes() : 0)) + copied;
  launch.over(teams, at, teams ? bytes / teams : 0, 4, p);
  return launcher::run(context, launch);
}

}  // namespace

HANDLER(head_rms_norm_rope, head_rms_norm_rope,
        BIND().Arg<In>().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().Attr<float>("epsilon").Attr<float>(
            "scale_offset").Attr<bool>("multiply_before_cast").Attr<bool>("round_before_rope").Attr<int32_t>("style").Attr<bool>(
            "suffix").Attr<bool>("has_k").Attr<int64_t>("head_major"))
