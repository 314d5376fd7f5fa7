// normed = x * rsqrt(sum(x^2) + epsilon), row by row.
// 0 x [rows, width] T · 1 normed [rows, width] T · 2 params
// grid: ceil(rows / TEAMS) threadgroups of TEAMS * SG * 32 threads; TEAMS == 1 when SG > 1.
// threadgroup memory: SG floats. bytes: 1 read (2 when R = 0) and 1 write of rows * width * sizeof(T).
#include "norm.h"

// T: storage. V: elements a load. R: packs a thread keeps; 0: read the row again. SG: simdgroups a row. TEAMS: rows a threadgroup.
template <typename T, int V, int R, int SG, int TEAMS>
kernel void l2_norm(
    device const T* x [[buffer(0)]],
    device T* normed [[buffer(1)]],
    constant NormParams& p [[buffer(2)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint row = group * TEAMS + simdgroup / SG;
  if (row >= p.rows) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  x += long(row) * p.width;
  normed += long(row) * p.width;

  const int mine = team.share(int(p.width) / V);
  const Fetched<T, V, R> xs = fetch<V, R>(x, team, mine);
  Kept<V, R> kept = keep<V, R>(scratch, 0, p.width);
  float squares = 0;
  FOR_SUM(c, R, mine, squares) {
    const Floats<V> s = xs.get(c, team.at(c));
    squares += dot(s, s);
    kept.put(c, s);
  }
  const float r = rsqrt(team.sum(squares) + p.epsilon);
  FOR_MINE(c, R, mine) {
    const int i = team.at(c);
    Floats<V> s = R > 0 ? kept.get(c) : xs.get(c, i);
    UNROLL for (int k = 0; k < V; ++k) s.v[k] *= r;
    store_pack<V>(normed, i, s);
  }
}
