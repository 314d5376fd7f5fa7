// s = x + residual; sum = s; normed = s * rsqrt(mean(s^2) + epsilon) * (scale + scale_offset), row by row.
// 0 x · 1 residual [rows, width] T · 2 scale [width] W · 3 normed · 4 sum [rows, width] T · 5 params
// grid: ceil(rows / TEAMS) threadgroups of TEAMS * SG * 32 threads; TEAMS == 1 when SG > 1.
// threadgroup memory: SG floats. bytes: 2 reads (4 when R = 0) and 1 write (2 with the sum) of rows * width * sizeof(T).
#include "norm.h"

// The sum as the norm sees it.
template <typename T, bool ROUND_SUM, int V>
inline Floats<V> summed(Floats<V> s) {
  UNROLL for (int k = 0; k < V; ++k) s.v[k] = ROUND_SUM ? rounded<T>(s.v[k]) : s.v[k];
  return s;
}

// T: storage. W: scale, or `ones`. IN_T: round to T before the scale, and multiply in T. ROUND_SUM: the norm sees the rounded sum.
// SUM: the sum is wanted; else its buffer is bound to `normed` and never touched.
// V: elements a load. R: packs a thread keeps; 0: read the row again. SG: simdgroups a row. TEAMS: rows a threadgroup.
template <typename T, typename W, bool IN_T, bool ROUND_SUM, bool SUM, int V, int R, int SG, int TEAMS>
kernel void add_rms_norm(
    device const T* x [[buffer(0)]],
    device const T* residual [[buffer(1)]],
    device const W* scale [[buffer(2)]],
    device T* normed [[buffer(3)]],
    device T* sum [[buffer(4)]],
    constant NormParams& p [[buffer(5)]],
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
  normed += start;
  sum += start;

  const int mine = team.share(int(p.width) / V);
  const Point<T, true, V, R> sums = fetch_point<true, V, R>(x, residual, team, mine);
  const Fetched<W, V, R> scales = fetch<V, R>(scale, team, mine);
  Kept<V, R> kept = keep<V, R>(scratch, 0, p.width);
  float squares = 0;
  FOR_SUM(c, R, mine, squares) {
    const int i = team.at(c);
    const Floats<V> s = summed<T, ROUND_SUM>(sums.get(c, i));
    squares += dot(s, s);
    if (SUM) store_pack<V>(sum, i, s);
    kept.put(c, s);
  }
  const float r = rsqrt(team.sum(squares) / float(p.width) + p.epsilon);
  const float offset = p.scale_offset;
  FOR_MINE(c, R, mine) {
    const int i = team.at(c);
    const Floats<V> s = R > 0 ? kept.get(c) : summed<T, ROUND_SUM>(sums.get(c, i));
    store_pack<V>(normed, i, scaled<T, IN_T>(s, r, scales.get(c, i), offset));
  }
}
