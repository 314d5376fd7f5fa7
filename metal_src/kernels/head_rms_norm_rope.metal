// Every head of every token: y = x * rsqrt(mean(x^2) + epsilon) * (scale + scale_offset), and then the pairs (a, b) of its rotated channels
// turn by the token's angles: (y_a cos - y_b sin, y_a sin + y_b cos).
// 0 x [tokens, heads, width] T · 1 k [tokens, k_heads, width] T · 2 positions [tokens] · 3 angles: turns [pairs, 2], or a table of floats
// [table_rows, pairs, 2] · 4, 5 scales of x and of k [width] · 6, 7 the results, like x and k · 8 to 13 copies of x's · 14 params
// grid: tokens * parts teams of one simdgroup, TEAMS a threadgroup. A team walks its part of a token's heads, 32 / lanes of them at once,
// and keeps the token's angles. No threadgroup memory. bytes: 1 read of x and k, 1 write of every result.
#include "norm.h"
#include "rope.h"

// The threads that share a head: `lanes` neighbours in a simdgroup. One thread, where that is a simdgroup.
struct Share {
  int rank, lanes;
  inline int of(int packs) const { return (packs - rank + lanes - 1) / lanes; }
  inline int at(int c) const { return rank + c * lanes; }
};

inline Share share_of(uint lane, uint lanes) {
  Share share;
  share.lanes = SIMD_WIDTH == 1 ? 1 : int(lanes);
  share.rank = int(lane) % share.lanes;
  return share;
}

// One head, before it is normed.
template <typename T, bool IN_T, bool ROUND>
struct Head {
  device const T* x;
  device const uint* scale;
  uint scale_kind;
  float scale_offset;
  float r;
};

// What pack i of a head is multiplied with.
template <int V, typename T, bool IN_T, bool ROUND>
inline Floats<V> load_gain(Head<T, IN_T, ROUND> head, int i) {
  Floats<V> g = load_pack<V>(reinterpret_cast<device const ones*>(head.scale), i);
  if (head.scale_kind == float_scale) g = load_pack<V>(reinterpret_cast<device const float*>(head.scale), i);
  if (head.scale_kind == storage_scale) g = load_pack<V>(reinterpret_cast<device const T*>(head.scale), i);
  UNROLL for (int k = 0; k < V; ++k) g.v[k] = IN_T ? rounded<T>(g.v[k] + head.scale_offset) : g.v[k] + head.scale_offset;
  return g;
}

template <int V, typename T, bool IN_T, bool ROUND>
inline Floats<V> normed(Head<T, IN_T, ROUND> head, Floats<V> x, Floats<V> gain) {
  UNROLL for (int k = 0; k < V; ++k) {
    const float unit = x.v[k] * head.r;
    const float y = (IN_T ? rounded<T>(unit) : unit) * gain.v[k];
    x.v[k] = ROUND ? rounded<T>(y) : y;
  }
  return x;
}

// The rotations of a thread's pairs, the packs base .. base + packs - 1 of it.
template <typename PAIRS, int V, int R>
struct Rotations {
  Kept<V / PAIRS::elements, R / PAIRS::packs> cosine, sine;
};

#ifdef KEPT_IN_SCRATCH

// A head lies in memory as it is, and a pair is two places of it.
template <int V, int R, typename T>
inline float load_head(device const T* x, Share share, int packs, thread Kept<V, R>& kept) {
  float squares = 0;
  FOR_SUM(c, R, packs, squares) {
    const Floats<V> f = load_pack<V>(x, c);
    squares += dot(f, f);
    kept.put(c, f);
  }
  return squares;
}

template <typename PAIRS, int V, int R>
inline void load_rotations(thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share, int, int) {
  FOR_MINE(pair, R, rope.pairs) {
    const Rotation r = rope.rotation_of(pair);
    rotations.cosine.v[pair] = r.cosine;
    rotations.sine.v[pair] = r.sine;
  }
}

template <typename PAIRS, int V, int R, typename HEAD>
inline void rotate(thread Kept<V, R>& kept, thread Rotations<PAIRS, V, R>& rotations, Rope rope, HEAD, Share, int, int) {
  float *const a = kept.v + rope.first, *const b = a + rope.distance, *const cosine = rotations.cosine.v, *const sine = rotations.sine.v;
  FOR_MINE(pair, R, rope.pairs) {
    const int i = pair * PAIRS::elements;
    const Floats<2> f = turned(a[i], b[i], cosine[pair], sine[pair]);
    a[i] = f.v[0];
    b[i] = f.v[1];
  }
}

#else

// The thread's part of the sum of squares: eight sums, element e in sum e % 8, and then theirs.
template <int V, int R, typename T>
inline float load_head(device const T* x, Share share, int packs, thread Kept<V, R>& kept) {
  float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int base = 0; base < packs; base += R) {
    FOR_MINE(c, R, packs - base) {
      const Floats<V> f = load_pack<V>(x, share.at(base + c));
      UNROLL for (int k = 0; k < V; ++k) sums[(c * V + k) % 8] = fma(f.v[k], f.v[k], sums[(c * V + k) % 8]);
      kept.put(c, f);
    }
  }
  UNROLL for (int stride = 4; stride > 0; stride /= 2)
    UNROLL for (int i = 0; i < stride; ++i) sums[i] += sums[i + stride];
  return sums[0];
}

template <typename PAIRS, int V, int R>
inline void load_rotations(thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share share, int base, int packs) {
  FOR_MINE(c, R / PAIRS::packs, packs / PAIRS::packs) {
    Floats<V / PAIRS::elements> cosine, sine;
    UNROLL for (int k = 0; k < V / PAIRS::elements; ++k) {
      const int pair = rope.pair_of(share.at(base + c) * V + k * PAIRS::elements);
      Rotation r;
      r.cosine = 1;
      r.sine = 0;
      if (rope.turns_pair(pair)) r = rope.rotation_of(pair);
      cosine.v[k] = r.cosine;
      sine.v[k] = r.sine;
    }
    rotations.cosine.put(c, cosine);
    rotations.sine.put(c, sine);
  }
}

template <int V, int R, typename HEAD>
inline void rotate(thread Kept<V, R>& kept, thread Rotations<halves, V, R>& rotations, Rope rope, HEAD, Share share, int, int packs) {
  FOR_MINE(c, R / 2, packs / 2) {
    Floats<V> a = kept.get(c), b = kept.get(c + R / 2);
    const Floats<V> cosine = rotations.cosine.get(c), sine = rotations.sine.get(c);
    UNROLL for (int k = 0; k < V; ++k) {
      if (!rope.turns_pair(share.at(c) * V + k)) continue;
      const Floats<2> f = turned(a.v[k], b.v[k], cosine.v[k], sine.v[k]);
      a.v[k] = f.v[0];
      b.v[k] = f.v[1];
    }
    kept.put(c, a);
    kept.put(c + R / 2, b);
  }
}

template <int V, int R, typename HEAD>
inline void rotate(thread Kept<V, R>& kept, thread Rotations<adjacent, V, R>& rotations, Rope rope, HEAD, Share share, int base, int packs) {
  FOR_MINE(c, R, packs) {
    Floats<V> y = kept.get(c);
    const Floats<V / 2> cosine = rotations.cosine.get(c), sine = rotations.sine.get(c);
    UNROLL for (int k = 0; k < V / 2; ++k) {
      if (!rope.turns_pair(rope.pair_of(share.at(base + c) * V + 2 * k))) continue;
      const Floats<2> f = turned(y.v[2 * k], y.v[2 * k + 1], cosine.v[k], sine.v[k]);
      y.v[2 * k] = f.v[0];
      y.v[2 * k + 1] = f.v[1];
    }
    kept.put(c, y);
  }
}

template <int V, int R, typename HEAD>
inline void rotate(thread Kept<V, R>& kept, thread Rotations<apart, V, R>& rotations, Rope rope, HEAD head, Share share, int base, int packs) {
  const bool whole = V > 1 && !rope.interleaved && rope.first % V == 0 && rope.distance % V == 0;  // a pack's partners are a pack
  FOR_MINE(c, R, packs) {
    const int channel = share.at(base + c) * V;
    Floats<V> y = kept.get(c), others = zeros<V>();
    const Floats<V> cosine = rotations.cosine.get(c), sine = rotations.sine.get(c);
    if (whole && rope.turns_pair(rope.pair_of(channel))) {
      const int i = (rope.second(channel) ? channel - rope.distance : channel + rope.distance) / V;
      others = normed(head, load_pack<V>(head.x, i), load_gain<V>(head, i));
    }
    UNROLL for (int k = 0; k < V; ++k) {
      if (!rope.turns_pair(rope.pair_of(channel + k))) continue;
      const bool second = rope.second(channel + k);
      const int i = channel + k + (second ? -rope.distance : rope.distance);
      const float other = whole ? others.v[k] : normed(head, load_pack<1>(head.x, i), load_gain<1>(head, i)).v[0];
      const Floats<2> f = turned(second ? other : y.v[k], second ? y.v[k] : other, cosine.v[k], sine.v[k]);
      y.v[k] = second ? f.v[1] : f.v[0];
    }
    kept.put(c, y);
  }
}

#endif

template <int V, int R, typename HEAD>
inline void load_gains(thread Kept<V, R>& gains, HEAD head, Share share, int base, int packs) {
  FOR_MINE(c, R, packs) gains.put(c, load_gain<V>(head, share.at(base + c)));
}

template <int V, int R, typename U>
inline void store_head(device U* out, thread Kept<V, R>& kept, Share share, int base, int packs) {
  FOR_MINE(c, R, packs) store_pack<V>(out, share.at(base + c), kept.get(c));
}

// T: storage. IN_T: round to T before the scale, and multiply in T. ROUND: round to T before the rotation. PAIRS: how pairs lie.
// V: elements a load. R: packs that a thread keeps; of a longer head it takes R at a time, and reads them twice. SG: 1.
// TEAMS: simdgroups a threadgroup.
template <typename T, bool IN_T, bool ROUND, typename PAIRS, int V, int R, int SG, int TEAMS>
kernel void head_rms_norm_rope(
    device const T* x [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const int* positions [[buffer(2)]],
    device const uint* angles [[buffer(3)]],
    device const uint* x_scale [[buffer(4)]],
    device const uint* k_scale [[buffer(5)]],
    device T* x_out [[buffer(6)]],
    device T* k_out [[buffer(7)]],
    device T* copy0 [[buffer(8)]],
    device T* copy1 [[buffer(9)]],
    device T* copy2 [[buffer(10)]],
    device T* copy3 [[buffer(11)]],
    device T* copy4 [[buffer(12)]],
    device T* copy5 [[buffer(13)]],
    constant HeadNormRopeParams& p [[buffer(14)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint team = group * TEAMS + simdgroup;
  if (team >= p.tokens * p.parts) return;
  const uint token = team / p.parts;
  const Share share = share_of(lane, p.lanes);
  const int all = share.of(int(p.width) / V);
  const Rope rope = rope_of(p, angles, positions[token]);
  Head<T, IN_T, ROUND> head;
  head.scale_kind = p.scale;
  head.scale_offset = p.scale_offset;

  Kept<V, R> kept = keep<V, R>(scratch, 0, p.width), gains = keep<V, R>(scratch, 1, p.width);
  Rotations<PAIRS, V, R> rotations;
  rotations.cosine = keep<V / PAIRS::elements, R / PAIRS::packs>(scratch, 2, p.width);
  rotations.sine = keep<V / PAIRS::elements, R / PAIRS::packs>(scratch, 3, p.width);
  if (rope.known && all <= R) load_rotations(rotations, rope, share, 0, all);
  int gains_of = -1;

  const uint at_once = SIMD_WIDTH / uint(share.lanes), x_walks = (p.heads + at_once - 1) / at_once, k_walks = (p.k_heads + at_once - 1) / at_once;
  for (uint walk = team % p.parts; walk < x_walks + k_walks; walk += p.parts) {
    const int of_k = walk >= x_walks;
    const uint heads = of_k ? p.k_heads : p.heads, number = (of_k ? walk - x_walks : walk) * at_once + lane / share.lanes;
    const int packs = number < heads ? all : 0;  // the last of them may leave threads without a head
    const long start = (long(token) * heads + number) * p.width;
    head.x = (of_k ? k : x) + start;
    head.scale = of_k ? k_scale : x_scale;
    if (all <= R && gains_of != of_k) load_gains(gains, head, share, 0, all);
    gains_of = of_k;
    if (rope.known) {
      float squares = load_head(head.x, share, packs, kept);
      for (int mask = share.lanes / 2; mask > 0; mask /= 2) squares += simd_shuffle_xor(squares, ushort(mask));
      head.r = rsqrt(squares / float(p.width) + p.epsilon);
    }
    for (int base = 0; base < packs; base += R) {
      const int n = packs - base;
      if (all > R && rope.known) {
        FOR_MINE(c, R, n) kept.put(c, load_pack<V>(head.x, share.at(base + c)));
        load_gains(gains, head, share, base, n);
        load_rotations(rotations, rope, share, base, n);
      }
      FOR_MINE(c, R, n) kept.put(c, rope.known ? normed(head, kept.get(c), gains.get(c)) : zeros<V>());
      if (rope.known) rotate(kept, rotations, rope, head, share, base, n);
      store_head((of_k ? k_out : x_out) + start, kept, share, base, n);
      for (uint i = 0; i < (of_k ? 0 : p.copies); ++i) {
        device T* const copy = i == 0 ? copy0 : i == 1 ? copy1 : i == 2 ? copy2 : i == 3 ? copy3 : i == 4 ? copy4 : copy5;
        const long row = p.head_major >> i & 1 ? (long(token / p.sequence) * heads + number) * p.sequence + token % p.sequence
                                               : long(token) * heads + number;
        const long at = row * p.width;
        const uint type = p.copy_types >> 2 * i & 3;
        if (type == float_copy) store_head(reinterpret_cast<device float*>(copy) + at, kept, share, base, n);
        if (type == bfloat_copy) store_head(reinterpret_cast<device bfloat*>(copy) + at, kept, share, base, n);
        if (type == half_copy) store_head(reinterpret_cast<device half*>(copy) + at, kept, share, base, n);
      }
    }
  }
}
