// normed = the rms_norm of the first `width` columns of y; rest = its other columns, as they are.
// 0 y [rows, columns] T · 1 scale [width] W · 2 normed [rows, width] T · 3 rest [rows, columns - width] T · 4 params
// grid: ceil(rows / TEAMS) threadgroups of TEAMS * SG * 32 threads; TEAMS == 1 when SG > 1. V > 1 needs whole packs in every row.
// threadgroup memory: SG floats. bytes: 1 read of y (2 of its first columns when R = 0) and 1 write of normed and rest.
#include "norm.h"

// T: storage. W: scale. IN_T: round to T before the scale, and multiply in T.
// V: elements a load. R: packs a thread keeps; 0: read the row again. SG: simdgroups a row. TEAMS: rows a threadgroup.
template <typename T, typename W, bool IN_T, int V, int R, int SG, int TEAMS>
kernel void partial_rms_norm(
    device const T* y [[buffer(0)]],
    device const W* scale [[buffer(1)]],
    device T* normed [[buffer(2)]],
    device T* rest [[buffer(3)]],
    constant PartialNormParams& p [[buffer(4)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint row = group * TEAMS + simdgroup / SG;
  if (row >= p.rows) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  y += long(row) * p.columns;
  normed += long(row) * p.width;
  rest += long(row) * (p.columns - p.width);

  const int mine = team.share(int(p.width) / V), others = team.share(int(p.columns - p.width) / V);
  const Fetched<T, V, R> ys = fetch<V, R>(y, team, mine);
  const Fetched<W, V, R> scales = fetch<V, R>(scale, team, mine);
  Kept<V, R> kept = keep<V, R>(scratch, 0, p.width);
  float squares = 0;
  FOR_SUM(c, R, mine, squares) {
    const Floats<V> s = ys.get(c, team.at(c));
    squares += dot(s, s);
    kept.put(c, s);
  }
  device const T* others_y = y + p.width;  // copied while the sum is on its way
  FOR_MINE(c, 0, others) store_pack<V>(rest, team.at(c), load_pack<V>(others_y, team.at(c)));
  const float r = rsqrt(team.sum(squares) / float(p.width) + p.epsilon);
  const float offset = p.scale_offset;
  FOR_MINE(c, R, mine) {
    const int i = team.at(c);
    const Floats<V> s = R > 0 ? kept.get(c) : ys.get(c, i);
    store_pack<V>(normed, i, scaled<T, IN_T>(s, r, scales.get(c, i), offset));
  }
}
