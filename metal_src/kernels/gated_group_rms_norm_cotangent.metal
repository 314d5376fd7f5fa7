// The cotangents of gated_group_rms_norm. With a = act(gate), one of m = a, f = 1 (the norm last) or m = 1, f = a (NORM_FIRST), v = y m,
// r = rsqrt(mean(v^2) + epsilon) and c = out_bar scale f, all in one group of one row:
//   v_bar = r (c - v r^2 mean(c v))    y_bar = v_bar m    a_bar = v_bar y, or out_bar scale v r    gate_bar = a_bar act'(gate)
//   scale_bar = the sum over rows of out_bar f v r
// 0 y [rows, groups * width] T · 1 gate [rows, gate_width] G · 2 scale [groups * width] float · 3 out_bar [rows, groups * width] O
// 4 y_bar [rows, groups * width] T · 5 gate_bar [rows, groups * width] G · 6 scale_bar [blocks, groups * width] float · 7 params
// Team t owns one group of the rows b * rows / blocks ... (b + 1) * rows / blocks of block b = t / groups, and writes into row b of scale_bar.
// grid: ceil(blocks * groups / TEAMS) threadgroups of TEAMS * SG * 32 threads; TEAMS == 1 when SG > 1. threadgroup memory: 2 SG floats.
// bytes: 1 read of y, of out_bar and of the gate's columns (2 when R = 0 or R > 2), 1 write of y_bar and gate_bar,
// and scale_bar.
#include "activation.h"
#include "norm.h"

template <typename T, typename G, typename O, bool NORM_FIRST, int V, int R, int SG, int TEAMS>
kernel void gated_group_rms_norm_cotangent(
    device const T* y [[buffer(0)]],
    device const G* gate [[buffer(1)]],
    device const float* scale [[buffer(2)]],
    device const O* out_bar [[buffer(3)]],
    device T* y_bar [[buffer(4)]],
    device G* gate_bar [[buffer(5)]],
    device float* scale_bar [[buffer(6)]],
    constant GatedGroupNormParams& p [[buffer(7)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint t = group * TEAMS + simdgroup / SG;
  if (t >= p.blocks * p.groups) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  const uint block = t / p.groups;
  const long column = long(t - block * p.groups) * p.width, row_width = long(p.groups) * p.width;
  gate += p.gate_start + column;
  scale += column;
  scale_bar += block * row_width + column;

  const int mine = team.share(int(p.width) / V);
  const bool silu = p.silu != 0;
  const int K = R <= 2 ? R : 0;  // packs kept of each operand and total; for more there are too few registers
  Kept<V, K> kept_sigmoid = keep<V, K>(scratch, 0, p.width), kept_scale = keep<V, K>(scratch, 1, p.width);
  FOR_MINE(c, K, mine) {
    kept_scale.put(c, zeros<V>());
    if (K == 0) store_pack<V>(scale_bar, team.at(c), zeros<V>());
  }
  const uint last = uint(ulong(block + 1) * p.rows / p.blocks);
  for (uint row = uint(ulong(block) * p.rows / p.blocks); row < last; ++row) {
    const long start = row * row_width + column;
    const Fetched<T, V, K> ys = fetch<V, K>(y + start, team, mine);
    const Fetched<G, V, K> gates = fetch<V, K>(gate + long(row) * p.gate_width, team, mine, p.gate_aligned != 0);
    const Fetched<O, V, K> out_bars = fetch<V, K>(out_bar + start, team, mine);
    float squares = 0, along = 0;
    FOR_SUM(c, K, mine, squares, along) {
      const int i = team.at(c);
      const Floats<V> g = gates.get(c, i), s = activation(g, false);
      const Floats<V> a = activated(g, s, silu);
      Floats<V> v = ys.get(c, i), v_bar = times(out_bars.get(c, i), load_pack<V>(scale, i));
      if (NORM_FIRST) v_bar = times(v_bar, a);
      if (!NORM_FIRST) v = times(v, a);
      squares += dot(v, v);
      along += dot(v, v_bar);
      kept_sigmoid.put(c, s);
    }
    const Floats<2> total = team.sums(squares, along);
    const float r = rsqrt(total.v[0] / float(p.width) + p.epsilon), slope = total.v[1] / float(p.width) * r * r;
    FOR_MINE(c, K, mine) {
      const int i = team.at(c);
      const Floats<V> g = gates.get(c, i), s = K > 0 ? kept_sigmoid.get(c) : activation(g, false);
      const Floats<V> a = activated(g, s, silu), slopes = activation_slope(g, s, silu);
      const Floats<V> y_here = ys.get(c, i), o = out_bars.get(c, i), w = load_pack<V>(scale, i);
      Floats<V> dy, dg, dw;
      UNROLL for (int k = 0; k < V; ++k) {
        const float m = NORM_FIRST ? 1.0f : a.v[k], f = NORM_FIRST ? a.v[k] : 1.0f;
        const float v = y_here.v[k] * m;
        const float v_bar = r * (o.v[k] * w.v[k] * f - slope * v);
        dy.v[k] = v_bar * m;
        dg.v[k] = (NORM_FIRST ? o.v[k] * w.v[k] * v * r : v_bar * y_here.v[k]) * slopes.v[k];
        dw.v[k] = o.v[k] * f * v * r;
      }
      store_pack<V>(y_bar + start, i, dy);
      store_pack<V>(gate_bar + start, i, dg);
      dw = add(dw, K > 0 ? kept_scale.get(c) : load_pack<V>(scale_bar, i));
      kept_scale.put(c, dw);
      if (K == 0) store_pack<V>(scale_bar, i, dw);
    }
  }
  if (K > 0) FOR_MINE(c, K, mine) store_pack<V>(scale_bar, team.at(c), kept_scale.get(c));
}
