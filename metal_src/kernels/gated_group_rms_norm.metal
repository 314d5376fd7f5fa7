// v = y * act(gate); out = scale * rounded(v * rsqrt(mean(v^2) + epsilon)), each group of a row by itself.
// NORM_FIRST: v = y, and out is multiplied by act(gate) last.
// 0 y [rows, groups * width] T · 1 gate [rows, gate_width] G · 2 scale [groups * width] W · 3 out [rows, groups * width] O · 4 params
// grid: ceil(rows * groups / TEAMS) threadgroups of TEAMS * SG * 32 threads; TEAMS == 1 when SG > 1.
// threadgroup memory: SG floats; none, and no barrier, where SG == 1: groups of up to 1 KiB of y (launch/shape.h).
// bytes: 1 read of y and of the gate's columns (2 when R = 0) and 1 write of out.
#include "activation.h"
#include "norm.h"

// T, G, O, W: storage. ROUND: round to T before the scale.
// V: elements a load. R: packs a thread keeps; 0: read the group again. SG: simdgroups a group. TEAMS: groups a threadgroup.
template <typename T, typename G, typename O, typename W, bool NORM_FIRST, bool ROUND, int V, int R, int SG, int TEAMS>
kernel void gated_group_rms_norm(
    device const T* y [[buffer(0)]],
    device const G* gate [[buffer(1)]],
    device const W* scale [[buffer(2)]],
    device O* out [[buffer(3)]],
    constant GatedGroupNormParams& p [[buffer(4)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint t = group * TEAMS + simdgroup / SG;
  if (t >= p.rows * p.groups) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  const uint row = t / p.groups;
  const long first = long(t - row * p.groups) * p.width;  // column
  y += long(t) * p.width;
  gate += long(row) * p.gate_width + p.gate_start + first;
  scale += first;
  out += long(t) * p.width;

  const int mine = team.share(int(p.width) / V);
  const bool silu = p.silu != 0;
  const Fetched<T, V, R> ys = fetch<V, R>(y, team, mine);
  const Fetched<G, V, R> gates = fetch<V, R>(gate, team, mine, p.gate_aligned != 0);
  const Fetched<W, V, R> scales = fetch<V, R>(scale, team, mine);
  Kept<V, R> kept = keep<V, R>(scratch, 0, p.width);
  float squares = 0;
  FOR_SUM(c, R, mine, squares) {
    const int i = team.at(c);
    Floats<V> v = ys.get(c, i);
    if (!NORM_FIRST) v = times(v, activation(gates.get(c, i), silu));
    squares += dot(v, v);
    kept.put(c, v);
  }
  const float r = rsqrt(team.sum(squares) / float(p.width) + p.epsilon);
  FOR_MINE(c, R, mine) {
    const int i = team.at(c);
    Floats<V> v = R > 0 ? kept.get(c) : ys.get(c, i);
    if (R == 0 && !NORM_FIRST) v = times(v, activation(gates.get(c, i), silu));
    UNROLL for (int k = 0; k < V; ++k) v.v[k] = ROUND ? rounded<T>(v.v[k] * r) : v.v[k] * r;
    v = times(v, scales.get(c, i));
    if (NORM_FIRST) v = times(v, activation(gates.get(c, i), silu));
    store_pack<V>(out, i, v);
  }
}
