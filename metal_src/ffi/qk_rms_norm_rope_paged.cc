#include "ffi/heads.h"

namespace {

const char* const op = "qk_rms_norm_rope_paged";

bool counts_fit(const ffi::AnyBuffer::Dimensions& shape) {
  return std::all_of(shape.begin(), shape.end(), [](int64_t n) { return n >> 31 == 0; });
}

ffi::Error expect_indices(const char* name, const In& x, uint64_t elements) {
  if (x.element_type() != ffi::DataType::S32) return refuse(std::string(op) + ": " + name + " must be int32");
  return expect(op, name, x.element_count(), elements);
}

// The heads of q, k or v: the columns from `start` on of x [tokens, ...].
ffi::Error rows_from(const char* name, const In& x, int64_t start, uint64_t heads, Argument storage, const HeadNormRopeParams& p,
                     uint32_t* stride, uint32_t* first) {
  const auto shape = x.dimensions();
  if (shape.size() < 2 || uint64_t(shape[0]) != p.tokens) return refuse(std::string(op) + ": " + name + " must have q's tokens");
  return columns_of(op, name, x, start, heads, storage, p, stride, first);
}

ffi::Error qk_rms_norm_rope_paged(launcher::Context context, In q, In pages, In page_table, In lengths, In offsets, In layer, In angles,
                                  ffi::RemainingArgs args, Out q_out, Out pages_out, float epsilon, float scale_offset,
                                  bool multiply_before_cast, bool round_before_rope, int32_t style, bool suffix, int64_t num_heads, bool has_k,
                                  bool has_v, int64_t q_start, int64_t k_start, int64_t v_start) {
  Rows at;
  RETURN_IF_ERROR(rows_of(op, pages, &at));
  const auto cache = pages.dimensions(), tokens = q.dimensions(), table = page_table.dimensions();
  if (cache.size() != 6 || cache[1] < 1 || cache[1] > 2 || cache[3] == 0 || !counts_fit(cache))
    return refuse(std::string(op) + ": pages must be [pages, 1 or 2, layers, page_size, heads, width]");
  if (tokens.size() < 2 || table.size() != 2 || !counts_fit(tokens) || !counts_fit(table) || num_heads < 0 || num_heads >> 31)
    return refuse(std::string(op) + ": q must be [tokens, ...] of some heads, and page_table [sequences, pages]");

  PagedHeadsParams p{};
  p.heads.tokens = uint32_t(tokens[0]);
  p.heads.heads = uint32_t(num_heads);
  p.heads.k_heads = uint32_t(cache[4]);
  p.heads.width = at.width;
  p.heads.epsilon = epsilon;
  p.heads.scale_offset = scale_offset;
  p.sequences = uint32_t(table[0]);
  p.table_width = uint32_t(table[1]);
  p.pages = uint32_t(cache[0]);
  p.sides = uint32_t(cache[1]);
  p.layers = uint32_t(cache[2]);
  p.page_size = uint32_t(cache[3]);
  RETURN_IF_ERROR(rotation_of(op, angles, style, suffix, &p.heads));
  if (!p.heads.table) return refuse(std::string(op) + ": the angles must be a table");
  RETURN_IF_ERROR(expect_indices("page_table", page_table, page_table.element_count()));
  RETURN_IF_ERROR(expect_indices("lengths", lengths, p.sequences));
  RETURN_IF_ERROR(expect_indices("input_row_offsets", offsets, uint64_t(p.sequences) + 1));
  RETURN_IF_ERROR(expect_indices("layer", layer, 1));
  RETURN_IF_ERROR(expect(op, "the first result", q_out->element_count(), uint64_t(p.heads.tokens) * p.heads.heads * at.width));
  RETURN_IF_ERROR(rows_from("q", q, q_start, p.heads.heads, at.storage, p.heads, &p.heads.x_stride, &p.heads.x_start));

  // k and v: arrays of their own, columns of q, or not given; then q stands for them, and the kernel does not touch it
  Rest rest(op, args);
  In k = q, v = q;
  if (has_k) RETURN_IF_ERROR(rest.take(&k));
  if (has_v) RETURN_IF_ERROR(rest.take(&v));
  p.has_k = has_k || k_start >= 0;
  p.has_v = has_v || v_start >= 0;
  if (p.has_k) RETURN_IF_ERROR(rows_from("k", k, has_k ? 0 : k_start, p.heads.k_heads, at.storage, p.heads, &p.heads.k_stride, &p.heads.k_start));
  if (p.has_v) RETURN_IF_ERROR(rows_from("v", v, has_v ? 0 : v_start, p.heads.k_heads, at.storage, p.heads, &p.v_stride, &p.v_start));
  if (p.has_v && (!p.has_k || p.sides != 2)) return refuse(std::string(op) + ": v needs k, and a place in pages");
  In q_scale = q, k_scale = q;
  RETURN_IF_ERROR(scales_of(op, rest, at.storage, true, &q_scale, &k_scale, &p.heads));

  uint32_t teams;
  Launch launch = launch_of_heads(op, at.storage, multiply_before_cast, round_before_rope,
                                  {p.heads.heads, p.heads.k_heads, p.has_v ? p.heads.k_heads : 0}, &p.heads, &teams);
  bind(launch, q);
  bind(launch, k);
  bind(launch, v);
  bind(launch, page_table);
  bind(launch, lengths);
  bind(launch, offsets);
  bind(launch, layer);
  bind(launch, p.heads.pairs ? angles : q);
  bind(launch, q_scale);
  bind(launch, k_scale);
  bind(launch, q_out);
  RETURN_IF_ERROR(bind_updated(launch, op, pages, pages_out));
  const uint64_t moved = p.heads.heads + p.heads.k_heads * (1 + p.has_v);
  launch.over(teams, at, teams ? 2 * p.heads.tokens * moved * at.row_bytes / teams : 0, 4, p);
  return launcher::run(context, launch);
}

}  // namespace

HANDLER(qk_rms_norm_rope_paged, qk_rms_norm_rope_paged,
        BIND().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().Ret<
            ffi::AnyBuffer>().Attr<float>("epsilon").Attr<float>("scale_offset").Attr<bool>("multiply_before_cast").Attr<bool>(
            "round_before_rope").Attr<int32_t>("style").Attr<bool>("suffix").Attr<int64_t>("num_heads").Attr<bool>("has_k").Attr<bool>(
            "has_v").Attr<int64_t>("q_start").Attr<int64_t>("k_start").Attr<int64_t>("v_start"))
