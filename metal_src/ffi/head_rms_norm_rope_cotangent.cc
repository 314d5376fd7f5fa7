#include <array>
#include <vector>

#include "ffi/heads.h"

namespace {

const char* const op = "head_rms_norm_rope_cotangent";

// The columns of a projection that are not in any of these ranges [start, end).
ffi::Error gaps_of(std::vector<std::array<uint32_t, 2>> ranges, uint32_t columns, HeadCotangentParams* p) {
  std::sort(ranges.begin(), ranges.end());
  ranges.push_back({columns, columns});
  uint32_t end = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i][0] < end) return refuse(std::string(op) + ": columns of the projection are used twice");
    p->gap_start[i] = end;
    p->gap_columns[i] = ranges[i][0] - end;
    end = ranges[i][1];
  }
  return ffi::Error::Success();
}

struct Cotangents {
  In x, k, y_bar, k_y_bar, v_bar;
  Out x_bar, k_bar;
};

// scale_bar: the results that are left, if the scales' cotangent is wanted.
ffi::Error run(launcher::Context context, Cotangents c, In positions, In angles, Rest rest, bool has_k, ffi::RemainingRets more, size_t next,
               const Heads& at, float epsilon, float scale_offset, int32_t style, bool suffix, HeadCotangentParams p) {
  HeadNormRopeParams& heads = p.heads;
  RETURN_IF_ERROR(positions_of(op, positions, heads));
  RETURN_IF_ERROR(rotation_of(op, angles, style, suffix, &heads));
  heads.epsilon = epsilon;
  heads.scale_offset = scale_offset;
  In x_scale = c.x, k_scale = c.x;
  RETURN_IF_ERROR(scales_of(op, rest, at.storage, has_k, &x_scale, &k_scale, &heads));
  const bool wants_scale = more.size() > next;
  Out scale_bar = c.x_bar;
  if (wants_scale) {
    scale_bar = *more.get<ffi::AnyBuffer>(next);
    RETURN_IF_ERROR(expect(op, "scale_bar", scale_bar->element_count(), uint64_t(p.x_teams + p.k_teams) * heads.width));
    if (scale_bar->element_type() != ffi::DataType::F32) return refuse(std::string(op) + ": scale_bar must be float32");
  }
  if ((p.x_teams == 0 && c.y_bar.element_count()) || (p.k_teams == 0 && has_k && c.k_y_bar.element_count()))
    return refuse(std::string(op) + ": no team for some heads");

  const HeadShape shape = share_heads(at.storage, &heads);
  Launch launch(op);
  launch.specialize(at.storage, flag(wants_scale), pairs_of(heads, shape, at.storage));
  launch.heads = true;
  bind(launch, c.x);
  bind(launch, c.k);
  bind(launch, positions);
  bind(launch, heads.pairs ? angles : c.x);
  bind(launch, x_scale);
  bind(launch, k_scale);
  bind(launch, c.y_bar);
  bind(launch, c.k_y_bar);
  bind(launch, c.v_bar);
  bind(launch, c.x_bar);
  bind(launch, c.k_bar);
  bind(launch, scale_bar);
  const uint32_t teams = p.x_teams + p.k_teams + p.other_teams;
  const size_t bytes = 3 * c.x_bar->size_bytes() + (has_k && !p.packed ? 3 * c.k_bar->size_bytes() : 0);
  launch.over(teams, at, teams ? bytes / teams : 0, 5, p);
  return launcher::run(context, launch);
}

bool fit(int64_t teams) { return teams >= 0 && teams >> 24 == 0; }

ffi::Error cotangent(launcher::Context context, In x, In positions, In angles, ffi::RemainingArgs args, Out x_bar, ffi::RemainingRets more,
                     float epsilon, float scale_offset, int32_t style, bool suffix, bool has_k, int64_t x_teams, int64_t k_teams) {
  Heads at;
  RETURN_IF_ERROR(heads_of(op, "x", x, &at));
  if (!fit(x_teams) || !fit(k_teams)) return refuse(std::string(op) + ": so many teams cannot be");
  HeadCotangentParams p{params_of(at), uint32_t(x_teams), uint32_t(k_teams)};
  Rest rest(op, args);
  Cotangents c{x, x, x, x, x, x_bar, x_bar};
  RETURN_IF_ERROR(expect(op, "x_bar", x_bar->element_count(), x.element_count()));
  if (has_k) {
    RETURN_IF_ERROR(rest.take(&c.k));
    RETURN_IF_ERROR(add_k(op, c.k, at, &p.heads));
    if (more.size() < 1) return refuse(std::string(op) + ": k has a cotangent");
    c.k_bar = *more.get<ffi::AnyBuffer>(0);
    RETURN_IF_ERROR(expect(op, "k_bar", c.k_bar->element_count(), c.k.element_count()));
  }
  RETURN_IF_ERROR(rest.take("y_bar", x.element_count(), &c.y_bar));
  if (has_k) RETURN_IF_ERROR(rest.take("k's y_bar", c.k.element_count(), &c.k_y_bar));
  if (!has_k && p.k_teams) return refuse(std::string(op) + ": teams for no k");
  return run(context, c, positions, angles, rest, has_k, more, has_k, at, epsilon, scale_offset, style, suffix, p);
}

// v_start: where v's cotangent goes, the last of the three; -1 where there is none.
ffi::Error packed(launcher::Context context, In projection, In positions, In angles, In q_bar, In k_bar, ffi::RemainingArgs args, Out bar,
                  ffi::RemainingRets more, float epsilon, float scale_offset, int32_t style, bool suffix, int64_t q_start, int64_t k_start,
                  int64_t v_start, int64_t x_teams, int64_t k_teams, int64_t other_teams) {
  Heads at;
  if (!fit(x_teams) || !fit(k_teams) || !fit(other_teams)) return refuse(std::string(op) + ": so many teams cannot be");
  HeadCotangentParams p{{}, uint32_t(x_teams), uint32_t(k_teams), uint32_t(other_teams), 1};
  HeadNormRopeParams& heads = p.heads;
  RETURN_IF_ERROR(packed_of(op, projection, q_bar, k_bar, q_start, k_start, &at, &heads));
  RETURN_IF_ERROR(expect(op, "the projection's cotangent", bar->element_count(), projection.element_count()));
  Rest rest(op, args);
  Cotangents c{projection, projection, q_bar, k_bar, projection, bar, bar};
  const uint32_t q_columns = heads.heads * heads.width, k_columns = heads.k_heads * heads.width;
  std::vector<std::array<uint32_t, 2>> ranges{{heads.x_start, heads.x_start + q_columns}, {heads.k_start, heads.k_start + k_columns}};
  if (v_start >= 0) {
    RETURN_IF_ERROR(rest.take(&c.v_bar));
    Heads of_v;
    uint32_t stride;
    RETURN_IF_ERROR(heads_of(op, "v", c.v_bar, &of_v));
    if (of_v.storage != at.storage || of_v.width != at.width || of_v.tokens != at.tokens)
      return refuse(std::string(op) + ": v's cotangent must have q's dtype, tokens and width");
    RETURN_IF_ERROR(columns_of(op, "the projection", projection, v_start, of_v.heads, at.storage, heads, &stride, &p.v_start));
    p.v_columns = of_v.heads * of_v.width;
    ranges.push_back({p.v_start, p.v_start + p.v_columns});
  }
  RETURN_IF_ERROR(gaps_of(ranges, heads.x_stride, &p));
  if (p.other_teams == 0 && heads.tokens && heads.x_stride > q_columns + k_columns) return refuse(std::string(op) + ": no team for some columns");
  return run(context, c, positions, angles, rest, true, more, 0, at, epsilon, scale_offset, style, suffix, p);
}

}  // namespace

#define OPTIONS() Attr<float>("epsilon").Attr<float>("scale_offset").Attr<int32_t>("style").Attr<bool>("suffix")
HANDLER(head_rms_norm_rope_cotangent, cotangent,
        BIND().Arg<In>().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().OPTIONS().Attr<bool>("has_k").Attr<int64_t>(
            "x_teams").Attr<int64_t>("k_teams"))
HANDLER(head_rms_norm_rope_packed_cotangent, packed,
        BIND().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().OPTIONS().Attr<int64_t>(
            "q_start").Attr<int64_t>("k_start").Attr<int64_t>("v_start").Attr<int64_t>("x_teams").Attr<int64_t>("k_teams").Attr<int64_t>(
            "other_teams"))
