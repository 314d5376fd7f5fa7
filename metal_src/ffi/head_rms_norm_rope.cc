#include <vector>

#include "ffi/heads.h"

namespace {

const char* const op = "head_rms_norm_rope";
constexpr size_t most_copies = 6;  // that the kernel has buffers for

// The results beside the first: k's, or copies of the first.
struct Results {
  Out out, k_out;
  std::vector<Out> copies;
};

// One launch for heads that p says the places of.
ffi::Error run(launcher::Context context, In x, In k, In positions, In angles, Rest rest, bool has_k, Results results, const Heads& at,
               float epsilon, float scale_offset, bool multiply_before_cast, bool round_before_rope, int32_t style, bool suffix,
               HeadNormRopeParams p) {
  RETURN_IF_ERROR(positions_of(op, positions, p));
  RETURN_IF_ERROR(rotation_of(op, angles, style, suffix, &p));
  p.epsilon = epsilon;
  p.scale_offset = scale_offset;
  In x_scale = x, k_scale = x;
  RETURN_IF_ERROR(scales_of(op, rest, at.storage, has_k, &x_scale, &k_scale, &p));

  uint32_t teams;
  Launch launch = launch_of_heads(op, at.storage, multiply_before_cast, round_before_rope, {p.heads, p.k_heads}, &p, &teams);
  bind(launch, x);
  bind(launch, k);
  bind(launch, positions);
  bind(launch, p.pairs ? angles : x);
  bind(launch, x_scale);
  bind(launch, k_scale);
  bind(launch, results.out);
  bind(launch, results.k_out);
  size_t bytes = 2 * (results.out->size_bytes() + (has_k ? results.k_out->size_bytes() : 0));
  for (size_t i = 0; i < most_copies; ++i) {  // what is not wanted is bound to what is, and never touched
    bind(launch, i < results.copies.size() ? results.copies[i] : results.out);
    if (i < results.copies.size()) bytes += results.copies[i]->size_bytes();
  }
  launch.over(teams, at, teams ? bytes / teams : 0, 4, p);
  return launcher::run(context, launch);
}

ffi::Error head_rms_norm_rope(launcher::Context context, In x, In positions, In angles, ffi::RemainingArgs args, Out out,
                              ffi::RemainingRets more, float epsilon, float scale_offset, bool multiply_before_cast, bool round_before_rope,
                              int32_t style, bool suffix, bool has_k, int64_t head_major) {
  Heads at;
  RETURN_IF_ERROR(heads_of(op, "x", x, &at));
  RETURN_IF_ERROR(expect(op, "the first result", out->element_count(), x.element_count()));
  HeadNormRopeParams p = params_of(at);

  Rest rest(op, args);
  In k = x;  // stands for an absent one: the kernel does not touch it
  Results results{out, out};
  if (has_k) {
    RETURN_IF_ERROR(rest.take(&k));
    RETURN_IF_ERROR(add_k(op, k, at, &p));
    if (more.size() != 1) return refuse(std::string(op) + ": k and its one result must have x's dtype, tokens and width");
    results.k_out = *more.get<ffi::AnyBuffer>(0);
    RETURN_IF_ERROR(expect(op, "the second result", results.k_out->element_count(), k.element_count()));
  }

  const size_t copies = has_k ? 0 : more.size();
  if (copies > most_copies) return refuse(std::string(op) + ": more than " + std::to_string(most_copies) + " copies");
  for (size_t i = 0; i < copies; ++i) {
    Argument type;
    Out copy = *more.get<ffi::AnyBuffer>(i);
    RETURN_IF_ERROR(expect(op, "a copy", copy->element_count(), x.element_count()));
    if (!storage_of(copy->element_type(), &type)) return refuse(std::string(op) + ": a copy is of a dtype that has no kernel");
    p.copy_types |= uint(type == Argument::Float ? float_copy : type == Argument::Bfloat ? bfloat_copy : half_copy) << 2 * i;
    results.copies.push_back(copy);
  }
  p.copies = uint(copies);
  p.head_major = uint(head_major);
  return run(context, x, k, positions, angles, rest, has_k, results, at, epsilon, scale_offset, multiply_before_cast, round_before_rope, style,
             suffix, p);
}

// The heads of q and of k lie in columns of one projection.
ffi::Error packed(launcher::Context context, In projection, In positions, In angles, ffi::RemainingArgs args, Out q_out, Out k_out, float epsilon,
                  float scale_offset, bool multiply_before_cast, bool round_before_rope, int32_t style, bool suffix, int64_t q_start,
                  int64_t k_start) {
  Heads at;
  HeadNormRopeParams p{};
  RETURN_IF_ERROR(packed_of(op, projection, *q_out, *k_out, q_start, k_start, &at, &p));
  return run(context, projection, projection, positions, angles, Rest(op, args), true, {q_out, k_out}, at, epsilon, scale_offset,
             multiply_before_cast, round_before_rope, style, suffix, p);
}

}  // namespace

#define OPTIONS()                                                                                                                     \
  Attr<float>("epsilon").Attr<float>("scale_offset").Attr<bool>("multiply_before_cast").Attr<bool>("round_before_rope").Attr<int32_t>( \
      "style").Attr<bool>("suffix")
HANDLER(head_rms_norm_rope, head_rms_norm_rope,
        BIND().Arg<In>().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().OPTIONS().Attr<bool>("has_k").Attr<int64_t>(
            "head_major"))
HANDLER(head_rms_norm_rope_packed, packed,
        BIND().Arg<In>().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().OPTIONS().Attr<int64_t>(
            "q_start").Attr<int64_t>("k_start"))
