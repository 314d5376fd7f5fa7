// The derivatives of every norm, at s = x (+ residual) with r = rsqrt(mean(s^2) + epsilon). J v = r (v - s r^2 mean(s v)) is symmetric:
// tangent    normed_dot = gain * J s_dot + s r gain_dot
// cotangent  s_bar = J (gain * normed_bar) + sum_bar, and gain_bar = the sum over rows of normed_bar s r
#include "norm.h"

// 0 x · 1 residual, else x · 2 s_dot [rows, width] T · 3 gain · 4 gain_dot, else gain [width] float · 5 normed_dot [rows, width] T · 6 params
// grid: ceil(rows / TEAMS) threadgroups of TEAMS * SG * 32 threads; TEAMS == 1 when SG > 1. threadgroup memory: 2 SG floats.
// bytes: 2 or 3 reads (twice that when R = 0) and 1 write of rows * width * sizeof(T).
template <typename T, bool RESIDUAL, bool GAIN, int V, int R, int SG, int TEAMS>
kernel void rms_norm_tangent(
    device const T* x [[buffer(0)]],
    device const T* residual [[buffer(1)]],
    device const T* s_dot [[buffer(2)]],
    device const float* gain [[buffer(3)]],
    device const float* gain_dot [[buffer(4)]],
    device T* normed_dot [[buffer(5)]],
    constant NormDerivativeParams& p [[buffer(6)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint row = group * TEAMS + simdgroup / SG;
  if (row >= p.rows) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  const long start = long(row) * p.width;
  x += start;
  residual += start;
  s_dot += start;
  normed_dot += start;

  const int mine = team.share(int(p.width) / V);
  const int A = R <= 2 ? R : 0;  // packs of an operand fetched ahead; more would leave too few registers for what is kept
  const Point<T, RESIDUAL, V, A> points = fetch_point<RESIDUAL, V, A>(x, residual, team, mine);
  const Fetched<T, V, A> tangents = fetch<V, A>(s_dot, team, mine);
  Kept<V, R> kept_s = keep<V, R>(scratch, 0, p.width), kept_v = keep<V, R>(scratch, 1, p.width);
  float squares = 0, along = 0;
  FOR_SUM(c, R, mine, squares, along) {
    const int i = team.at(c);
    const Floats<V> s = points.get(c, i), v = tangents.get(c, i);
    squares += dot(s, s);
    along += dot(s, v);
    kept_s.put(c, s);
    kept_v.put(c, v);
  }
  const Floats<2> total = team.sums(squares, along);
  const float r = rsqrt(total.v[0] / float(p.width) + p.epsilon), slope = total.v[1] / float(p.width) * r * r;
  FOR_MINE(c, R, mine) {
    const int i = team.at(c);
    const Floats<V> s = R > 0 ? kept_s.get(c) : points.get(c, i), v = R > 0 ? kept_v.get(c) : tangents.get(c, i);
    const Floats<V> g = load_pack<V>(gain, i), g_dot = load_pack<V>(gain_dot, i);
    Floats<V> out;
    UNROLL for (int k = 0; k < V; ++k) {
      out.v[k] = g.v[k] * (r * (v.v[k] - slope * s.v[k]));
      if (GAIN) out.v[k] += s.v[k] * r * g_dot.v[k];
    }
    store_pack<V>(normed_dot, i, out);
  }
}

// 0 x · 1 residual, else x · 2 normed_bar · 3 sum_bar, else x [rows, width] T · 4 gain [width] float · 5 s_bar [rows, width] T
// 6 gain_bar [teams, width] float, else s_bar · 7 params
// Team t owns the rows t * rows / teams ... (t + 1) * rows / teams and writes row t of gain_bar.
// grid: ceil(teams / TEAMS) threadgroups of TEAMS * SG * 32 threads; TEAMS == 1 when SG > 1. threadgroup memory: 2 SG floats.
// bytes: 2 to 4 reads (twice that when R = 0) and 1 write of rows * width * sizeof(T), and gain_bar.
template <typename T, bool RESIDUAL, bool SUM, bool GAIN, int V, int R, int SG, int TEAMS>
kernel void rms_norm_cotangent(
    device const T* x [[buffer(0)]],
    device const T* residual [[buffer(1)]],
    device const T* normed_bar [[buffer(2)]],
    device const T* sum_bar [[buffer(3)]],
    device const float* gain [[buffer(4)]],
    device T* s_bar [[buffer(5)]],
    device float* gain_bar [[buffer(6)]],
    constant NormDerivativeParams& p [[buffer(7)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint t = group * TEAMS + simdgroup / SG;
  if (t >= p.teams) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  const int mine = team.share(int(p.width) / V);
  const long first = long(ulong(t) * p.rows / p.teams) * p.width, last = long(ulong(t + 1) * p.rows / p.teams) * p.width;  // elements
  gain_bar += long(t) * p.width;
  Kept<V, R> kept_s = keep<V, R>(scratch, 0, p.width), kept_gain = keep<V, R>(scratch, 1, p.width);
  if (GAIN) FOR_MINE(c, R, mine) {
    kept_gain.put(c, zeros<V>());
    if (R == 0) store_pack<V>(gain_bar, team.at(c), zeros<V>());
  }
  // Where registers allow it a row is fetched while the one before it is summed.
  const int A = R <= 2 ? R : 0;
  Point<T, RESIDUAL, V, A> points;
  Fetched<T, V, R> normed_bars;
  Fetched<T, V, A> sum_bars;
  for (long start = first; start < last; start += p.width) {
    if (A == 0 || start == first) {
      points = fetch_point<RESIDUAL, V, A>(x + start, residual + start, team, mine);
      normed_bars = fetch<V, R>(normed_bar + start, team, mine);
      if (SUM) sum_bars = fetch<V, A>(sum_bar + start, team, mine);
    }
    float squares = 0, along = 0;
    FOR_SUM(c, R, mine, squares, along) {
      const int i = team.at(c);
      const Floats<V> s = points.get(c, i), n = normed_bars.get(c, i);
      const Floats<V> g = load_pack<V>(gain, i);
      squares += dot(s, s);
      UNROLL for (int k = 0; k < V; ++k) along += s.v[k] * (g.v[k] * n.v[k]);
      kept_s.put(c, s);
    }
    const Point<T, RESIDUAL, V, A> points_here = points;
    const Fetched<T, V, R> normed_bars_here = normed_bars;
    const Fetched<T, V, A> sum_bars_here = sum_bars;
    if (A > 0 && start + p.width < last) {
      points = fetch_point<RESIDUAL, V, A>(x + start + p.width, residual + start + p.width, team, mine);
      normed_bars = fetch<V, R>(normed_bar + start + p.width, team, mine);
      if (SUM) sum_bars = fetch<V, A>(sum_bar + start + p.width, team, mine);
    }
    const Floats<2> total = team.sums(squares, along);
    const float r = rsqrt(total.v[0] / float(p.width) + p.epsilon), slope = total.v[1] / float(p.width) * r * r;
    FOR_MINE(c, R, mine) {
      const int i = team.at(c);
      const Floats<V> s = R > 0 ? kept_s.get(c) : points_here.get(c, i), n = normed_bars_here.get(c, i);
      const Floats<V> g = load_pack<V>(gain, i);
      Floats<V> out;
      UNROLL for (int k = 0; k < V; ++k) out.v[k] = r * (g.v[k] * n.v[k] - slope * s.v[k]);
      if (SUM) out = add(out, sum_bars_here.get(c, i));
      store_pack<V>(s_bar + start, i, out);
      if (GAIN) {
        Floats<V> bar = R > 0 ? kept_gain.get(c) : load_pack<V>(gain_bar, i);
        UNROLL for (int k = 0; k < V; ++k) bar.v[k] += n.v[k] * (s.v[k] * r);
        kept_gain.put(c, bar);
        if (R == 0) store_pack<V>(gain_bar, i, bar);
      }
    }
  }
  if (GAIN && R > 0) FOR_MINE(c, R, mine) store_pack<V>(gain_bar, team.at(c), kept_gain.get(c));
}
