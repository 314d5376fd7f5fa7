// The cotangents of head_rms_norm_rope. Of a head whose result has y_bar: n_bar is y_bar with its pairs turned back, r = rsqrt(mean(x^2) + epsilon),
//   x_bar = r (gain n_bar - x r^2 mean(gain n_bar x))    scale_bar = the sum over tokens and heads of n_bar x r
// 0 x [tokens, x_stride] T, its heads x_start on · 1 k: likewise · 2 positions [tokens] · 3 angles, as the forward kernel has them ·
// 4, 5 scales of x and of k [width] · 6, 7 y_bar of x and of k [tokens, heads or k_heads, width] T · 8 v_bar [tokens, v_columns] T ·
// 9, 10 x_bar and k_bar, like x and k; one array where they are columns of one · 11 scale_bar [x_teams + k_teams, width] float · 12 params
// grid: x_teams + k_teams + other_teams teams of one simdgroup, TEAMS a threadgroup. Each of the first two kinds walks its part of all heads of
// x, or of k, 32 / lanes of them at once, and writes a row of scale_bar. The last copy v_bar into the columns of a projection that are
// neither x's nor k's, and zeros into what is left. No threadgroup memory.
// bytes: 1 read of x, k and every cotangent (2 when R = 0), 1 write of x_bar and k_bar, and scale_bar.
#include "head.h"

// A head that turns without a norm.
template <typename T>
struct Bare {
  device const T* x;
};

template <int V, typename T>
inline Floats<V> load_gain(Bare<T>, int) {
  return zeros<V>();
}

template <int V, typename T>
inline Floats<V> normed(Bare<T>, Floats<V> x, Floats<V>) {
  return x;
}

// turn_head of a head that is fetched.
#ifdef KEPT_IN_SCRATCH
template <int ALL, typename PAIRS, int V, int R, typename T>
inline void turn_fetched(thread Kept<V, R>& kept, thread Fetched<T, V, ALL>&, Bare<T> head, thread Kept<V, R>& gains,
                         thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share, int, int width) {
  turn_into(kept.v, head, gains, rotations, rope, width);
}
#else
template <int ALL, typename PAIRS, int V, int R, typename T>
inline void turn_fetched(thread Kept<V, R>& kept, thread Fetched<T, V, ALL>& fetched, Bare<T> head, thread Kept<V, R>& gains,
                         thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share share, int base, int packs) {
  if (ALL > 0) FOR_MINE(c, R, packs) kept.put(c, fetched.get(c, share.at(c)));
  turn_head<ALL>(kept, head, gains, rotations, rope, share, base, packs);
}
#endif

template <int V, typename T>
inline void write_others(constant HeadCotangentParams& p, device const T* v_bar, device T* bar, uint block, Team<1> team) {
  const uint tokens = p.heads.tokens;
  const long last = long(ulong(block + 1) * tokens / p.other_teams);
  for (long token = long(ulong(block) * tokens / p.other_teams); token < last; ++token) {
    device T* const row = bar + token * p.heads.x_stride;
    device T* const v_row = row + p.v_start;
    device const T* const from = v_bar + token * p.v_columns;
    FOR_MINE(c, 0, team.share(int(p.v_columns) / V)) copy_pack<V>(v_row, from, team.at(c));
    for (int gap = 0; gap < most_gaps; ++gap) {
      device T* const to = row + p.gap_start[gap];
      FOR_MINE(c, 0, team.share(int(p.gap_columns[gap]) / V)) store_pack<V>(to, team.at(c), zeros<V>());
    }
  }
}

// T: storage. SCALE: its cotangent is wanted. PAIRS: how pairs lie. V: elements a load. R: packs that a thread has of a head, and keeps; 0: any
// number, read twice. SG: 1. TEAMS: simdgroups a threadgroup.
template <typename T, bool SCALE, typename PAIRS, int V, int R, int SG, int TEAMS>
kernel void head_rms_norm_rope_cotangent(
    device const T* x [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const int* positions [[buffer(2)]],
    device const uint* angles [[buffer(3)]],
    device const uint* x_scale [[buffer(4)]],
    device const uint* k_scale [[buffer(5)]],
    device const T* y_bar [[buffer(6)]],
    device const T* k_y_bar [[buffer(7)]],
    device const T* v_bar [[buffer(8)]],
    device T* x_bar [[buffer(9)]],
    device T* k_bar [[buffer(10)]],
    device float* scale_bar [[buffer(11)]],
    constant HeadCotangentParams& p [[buffer(12)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint team = group * TEAMS + simdgroup;
  if (team >= p.x_teams + p.k_teams + p.other_teams) return;
  if (team >= p.x_teams + p.k_teams) {
    write_others<V>(p, v_bar, x_bar, team - p.x_teams - p.k_teams, team_of<1>(lane, 0, scratch));
    return;
  }
  const bool of_k = team >= p.x_teams;
  const uint width = p.heads.width, heads = of_k ? p.heads.k_heads : p.heads.heads, walks = of_k ? p.heads.k_walks : p.heads.x_walks;
  const long stride = of_k ? p.heads.k_stride : p.heads.x_stride, start = of_k ? p.heads.k_start : p.heads.x_start;
  device const T* const in = (of_k ? k : x) + start;
  device const T* const bars = of_k ? k_y_bar : y_bar;
  device T* const out = (of_k && p.packed == 0 ? k_bar : x_bar) + start;
  scale_bar += long(team) * width;

  const Share share = share_of<PAIRS, V, R>(lane, p.heads);
  const int all = packs_of<R>(share, int(width) / V), N = Taken<R>::packs;
  Kept<V, N> kept = keep<V, N>(scratch, 0, width), gains = keep<V, N>(scratch, 1, width), totals = keep<V, N>(scratch, 4, width);
  Rotations<PAIRS, V, N> rotations;
  rotations.cosine = keep<V / PAIRS::elements, N / PAIRS::packs>(scratch, 2, width);
  rotations.sine = keep<V / PAIRS::elements, N / PAIRS::packs>(scratch, 3, width);
  Head<T, false, false> head;
  head.scale = of_k ? k_scale : x_scale;
  head.scale_kind = p.heads.scale;
  head.scale_offset = p.heads.scale_offset;
  if (R > 0) load_gains(gains, head, share, 0, all);
  if (SCALE && R > 0) FOR_MINE(c, R, all) totals.put(c, zeros<V>());
  if (SCALE && R == 0) FOR_MINE(c, 0, all) store_pack<V>(scale_bar, share.at(c), zeros<V>());

  const uint t = of_k ? team - p.x_teams : team, teams = of_k ? p.k_teams : p.x_teams;
  const ulong units = ulong(p.heads.tokens) * walks, first = units * t / teams;
  const uint count = uint(units * (t + 1) / teams - first);
  uint token = uint(first / walks), walk = uint(first - ulong(token) * walks);
  Rope rope;
  bool turned_to_token = false;
  // Where registers allow it a head is fetched while the one before it is worked on.
  const bool AHEAD = R > 0 && R <= 32 / (V * int(sizeof(T)));
  Fetched<T, V, R> xs, y_bars;
  for (uint unit = 0; unit < count; ++unit) {
    const uint number = walk * p.heads.at_once + uint(share.head);
    const bool some = SIMD_WIDTH == 1 || number < heads;
    const long channel = long(some ? number : heads - 1) * width, here = token * stride + channel;
    Bare<T> bare;
    bare.x = bars + long(token) * heads * width + channel;
    if (!AHEAD || unit == 0) {
      xs = fetch<V, R>(in + here, share, all);
      y_bars = fetch<V, R>(bare.x, share, all);
    }
    if (!turned_to_token) {
      rope = rope_of(p.heads, angles, positions[token]);
      rope.back = true;
      if (R > 0 && rope.known) load_rotations(rotations, rope, share, 0, all);
    }
    Fetched<T, V, R> xs_here = xs, y_bars_here = y_bars;
    ++walk;
    turned_to_token = walk < walks;
    if (!turned_to_token) {
      walk = 0;
      ++token;
    }
    if (AHEAD && unit + 1 < count) {
      const uint next = walk * p.heads.at_once + uint(share.head);
      const long at = long(next < heads ? next : heads - 1) * width;
      xs = fetch<V, R>(in + token * stride + at, share, all);
      y_bars = fetch<V, R>(bars + long(token) * heads * width + at, share, all);
    }
    if (!rope.known) {
      FOR_MINE(c, R, (some ? all : 0)) store_pack<V>(out + here, share.at(c), zeros<V>());
      continue;
    }
    float squares = 0, along = 0;
    for (int base = 0; base < all; base += N) {
      turn_fetched<R>(kept, y_bars_here, bare, gains, rotations, rope, share, base, all);
      if (R == 0) load_gains(gains, head, share, base, all - base);
      FOR_SUM(c, N, all - base, squares, along) {
        const Floats<V> s = xs_here.get(base + c, share.at(base + c)), n = kept.get(c), g = gains.get(c);
        squares += dot(s, s);
        UNROLL for (int e = 0; e < V; ++e) along += s.v[e] * (g.v[e] * n.v[e]);
      }
    }
    const float r = inverse_rms(squares, share, width, p.heads.epsilon), slope = share.sum(along) / float(width) * r * r;
    for (int base = 0; base < all; base += N) {
      if (R == 0) {
        turn_fetched<R>(kept, y_bars_here, bare, gains, rotations, rope, share, base, all);
        load_gains(gains, head, share, base, all - base);
      }
      FOR_MINE(c, N, all - base) {
        const int i = share.at(base + c);
        const Floats<V> s = xs_here.get(base + c, i), n = kept.get(c), g = gains.get(c);
        Floats<V> bar;
        UNROLL for (int e = 0; e < V; ++e) bar.v[e] = r * (g.v[e] * n.v[e] - slope * s.v[e]);
        if (some) store_pack<V>(out + here, i, bar);
        if (SCALE) {
          bar = R > 0 ? totals.get(c) : load_pack<V>(scale_bar, i);
          UNROLL for (int e = 0; e < V; ++e) bar.v[e] += some ? n.v[e] * (s.v[e] * r) : 0.0f;
          totals.put(c, bar);
          if (R == 0) store_pack<V>(scale_bar, i, bar);
        }
      }
    }
  }
  if (SCALE && R > 0) FOR_MINE(c, R, all) {
    Floats<V> bar = totals.get(c);
    UNROLL for (int e = 0; e < V; ++e) bar.v[e] = share.sum_of_heads(bar.v[e]);
    if (share.head == 0) store_pack<V>(scale_bar, share.at(c), bar);
  }
}
