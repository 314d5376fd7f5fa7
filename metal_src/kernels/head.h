// One head of a token: its threads, its norm, and the turning of its channels.
#pragma once
#include "norm.h"
#include "rope.h"

// The threads that share a head: `lanes` neighbours in a simdgroup, a power of two. One thread, where that is a simdgroup.
struct Share {
  int rank, lanes;
  int head, heads;  // the head's place in the simdgroup, beside others; and how many they are
  // Where pairs are halves, `firsts` of a thread's packs hold first channels, and as many their partners, `apart` packs on. A head of which only
  // part turns is several blocks like that part: of first pack number i, i & block are in blocks before its own, and so are as many partners.
  int firsts, apart, block;
  inline int of(int packs) const { return (packs - rank + lanes - 1) / lanes; }
  inline int first_at(int c) const {
    const int i = rank + c * lanes;
    return i + (i & block);
  }
  inline int at(int c) const { return c < firsts ? first_at(c) : first_at(c - firsts) + apart; }
  inline float sum(float x) const {
    UNROLL for (int mask = SIMD_WIDTH / 2; mask > 0; mask /= 2) {
      const float other = simd_shuffle_xor(x, ushort(mask));
      x += mask < lanes ? other : 0.0f;
    }
    return x;
  }
  // Of what the threads of one place have in all the simdgroup's heads.
  inline float sum_of_heads(float x) const {
    UNROLL for (int mask = SIMD_WIDTH / 2; mask > 0; mask /= 2) {
      const float other = simd_shuffle_xor(x, ushort(mask));
      x += mask >= lanes ? other : 0.0f;
    }
    return x;
  }
};

template <typename PAIRS, int V, int R>
inline Share share_of(uint lane, constant HeadNormRopeParams& p) {
  Share share;
  share.lanes = SIMD_WIDTH == 1 ? 1 : int(p.lanes);
  share.heads = SIMD_WIDTH == 1 ? 1 : int(p.at_once);
  share.rank = int(lane) & (share.lanes - 1);
  share.head = int(lane) * share.heads / SIMD_WIDTH;
  const bool paired = PAIRS::packs == 2;
  share.firsts = paired ? R / 2 : 1 << 30;
  share.apart = paired ? int(p.distance) / V : 0;
  share.block = paired && 2 * p.distance < p.width ? ~(share.apart - 1) : 0;  // then a power of two
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

template <int V, int R, typename HEAD>
inline void load_gains(thread Kept<V, R>& gains, HEAD head, Share share, int base, int packs) {
  FOR_MINE(c, R, packs) gains.put(c, load_gain<V>(head, share.at(base + c)));
}

template <int V, int R, typename U>
inline void store_head(device U* out, thread Kept<V, R>& kept, Share share, int base, int packs) {
  FOR_MINE(c, R, packs) store_pack<V>(out, share.at(base + c), kept.get(c));
}

// The rotations of a thread's pairs, the packs base .. base + packs - 1 of it.
template <typename PAIRS, int V, int R>
struct Rotations {
  Kept<V / PAIRS::elements, R / PAIRS::packs> cosine, sine;
};

// A thread's packs of a head, and how many of them it takes at a time: all, or of heads of any width (R = 0) eight.
#ifdef KEPT_IN_SCRATCH

template <int R>
struct Taken {
  enum { packs = R };
};
template <int R>
inline int packs_of(Share, int packs) { return packs; }

// Bit for bit.
template <int V, int N, typename T>
inline void copy_head(device T* to, device const T* from, Share, int packs) {
  FOR_MINE(i, N, packs) copy_pack<V>(to, from, i);
}

template <typename T, typename PAIRS, int V, int R>
struct HeadsAhead {
  enum { count = 1 };
};

// A thread has whole heads, which stay in the cache: each is read twice, and a pair is two places of it. The squares of a head are summed
// before the head in front of it is turned, so that neither waits for the other's last steps.
template <typename T, int V, int R>
struct Ahead {
  float squares;
};

template <int V, int R, typename T>
inline void ask_for(thread Ahead<T, V, R>& ahead, device const T* x, Share, int packs) {
  float squares = 0;
  FOR_SUM(i, R, packs, squares) {
    const Floats<V> f = load_pack<V>(x, i);
    squares += dot(f, f);
  }
  ahead.squares = squares;
}

template <int V, int R, typename T>
inline float sum_of_squares(thread Ahead<T, V, R>& ahead, Share, int, thread Kept<V, R>&) {
  return ahead.squares;
}

template <typename PAIRS, int V, int R>
inline void load_rotations(thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share, int, int) {
  FOR_MINE(pair, R, rope.pairs) {
    const Rotation r = rope.rotation_of(pair);
    rotations.cosine.v[pair] = r.cosine;
    rotations.sine.v[pair] = r.sine;
  }
}

template <int V, int R, typename HEAD, typename U>
inline void pass_channels(device U* out, HEAD head, thread Kept<V, R>& gains, int first, int last) {
  FOR_MINE(i, R, last - first) store_pack<V>(out, first + i, normed(head, load_pack<V>(head.x, first + i), gains.get(first + i)));
}

template <typename PAIRS, int V, int R, typename HEAD, typename U>
inline void turn_into(device U* out, HEAD head, thread Kept<V, R>& gains, thread Rotations<PAIRS, V, R>& rotations, Rope rope, int width) {
  const int step = PAIRS::elements, first = rope.first, distance = step == 2 ? 1 : rope.distance;
  FOR_MINE(pair, R, rope.pairs) {
    const int a = first + step * pair, b = a + distance;
    Floats<V> y_a = normed(head, load_pack<V>(head.x, a), gains.get(a)), y_b = normed(head, load_pack<V>(head.x, b), gains.get(b));
    const Floats<2> f = turned(y_a.v[0], y_b.v[0], rotations.cosine.v[pair], rotations.sine.v[pair]);
    y_a.v[0] = f.v[0];
    y_b.v[0] = f.v[1];
    store_pack<V>(out, a, y_a);
    store_pack<V>(out, b, y_b);
  }
  const int end = first + step * rope.pairs;  // of the first channels, or of all
  pass_channels(out, head, gains, 0, first);
  if (step == 1) pass_channels(out, head, gains, end, first + distance);
  pass_channels(out, head, gains, step == 1 ? end + distance : end, width);
}

template <int ALL, typename PAIRS, int V, int R, typename HEAD>
inline void turn_head(thread Kept<V, R>& kept, HEAD head, thread Kept<V, R>& gains, thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share,
                      int, int width) {
  turn_into(kept.v, head, gains, rotations, rope, width);
}

template <int ALL, typename PAIRS, int V, int R, typename HEAD, typename U>
inline void turn_and_store(device U* out, thread Kept<V, R>&, HEAD head, thread Kept<V, R>& gains, thread Rotations<PAIRS, V, R>& rotations,
                           Rope rope, Share, int, int width, bool) {
  turn_into(out, head, gains, rotations, rope, width);
}

#else

template <int R>
struct Taken {
  enum { packs = R > 0 ? R : 8 };
};
template <int R>
inline int packs_of(Share share, int packs) { return R > 0 ? R : share.of(packs); }

// Bit for bit.
template <int V, int N, typename T>
inline void copy_head(device T* to, device const T* from, Share share, int packs) {
  for (int base = 0; base < packs; base += N) {
    Pack<T, V> held[N];
    FOR_MINE(c, N, packs - base) held[c] = reinterpret_cast<device const Pack<T, V>*>(from)[share.at(base + c)];
    FOR_MINE(c, N, packs - base) reinterpret_cast<device Pack<T, V>*>(to)[share.at(base + c)] = held[c];
  }
}

// How many heads a thread asks for ahead: as many as it has registers for.
template <typename T, typename PAIRS, int V, int R>
struct HeadsAhead {
  enum { words = R * V * int(sizeof(T)) / 4, count = words == 0 || words > 12 || PAIRS::packs * PAIRS::elements == 1 ? 1 : words > 8 ? 2 : 3 };
};

// A head as it comes from memory, asked for while those in front of it are turned.
template <typename T, int V, int R>
struct Ahead {
  Fetched<T, V, R> packs;
};

template <int V, int R, typename T>
inline void ask_for(thread Ahead<T, V, R>& ahead, device const T* x, Share share, int packs) {
  ahead.packs = fetch<V, R>(x, share, packs);
}

// The thread's part of the sum: eight sums, element e in sum e % 8, and then theirs. Keeps the packs it takes last.
template <int V, int R, int N, typename T>
inline float sum_of_squares(thread Ahead<T, V, R>& ahead, Share share, int packs, thread Kept<V, N>& kept) {
  float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int base = 0; base < packs; base += N) {
    FOR_MINE(c, N, packs - base) {
      Floats<V> f = ahead.packs.get(base + c, share.at(base + c));
      UNROLL for (int k = 0; k < V; ++k) {
        f.v[k] = held(f.v[k]);  // the words will be the next head's
        sums[(c * V + k) % 8] = fma(f.v[k], f.v[k], sums[(c * V + k) % 8]);
      }
      kept.put(c, f);
    }
  }
  UNROLL for (int stride = 4; stride > 0; stride /= 2)
    UNROLL for (int i = 0; i < stride; ++i) sums[i] += sums[i + stride];
  return sums[0];
}

// Heads side by side in a simdgroup turn by the same angles: each head's threads work out their part of them, and all exchange theirs.
template <typename PAIRS, int V, int R>
inline void load_rotations(thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share share, int base, int packs) {
  const int each = V / PAIRS::elements, count = R / PAIRS::packs * each;
  Rotation mine;
  if (rope.table) {  // nothing is to be worked out
    UNROLL for (int i = 0; i < count; ++i) {
      const int pair = rope.pair_of(PAIRS(), share.first_at(base + i / each) * V + i % each * PAIRS::elements);
      mine.cosine = 1;
      mine.sine = 0;
      if (i / each < packs && rope.turns_pair(pair)) mine = rope.rotation_of(pair);
      rotations.cosine.v[i] = mine.cosine;
      rotations.sine.v[i] = mine.sine;
    }
    return;
  }
  UNROLL for (int i = 0; i < count; ++i) {
    const int head = i & (share.heads - 1);  // whose thread works out rotation number i
    if (head == 0) {
      const int own = i + share.head, c = own / each;
      const int pair = rope.pair_of(PAIRS(), share.first_at(base + c) * V + own % each * PAIRS::elements);
      mine.cosine = 1;
      mine.sine = 0;
      if (own < count && c < packs && rope.turns_pair(pair)) mine = rope.rotation_of(pair);
    }
    const ushort from = ushort(head * share.lanes + share.rank);
    rotations.cosine.v[i] = share.heads == 1 ? mine.cosine : simd_shuffle(mine.cosine, from);
    rotations.sine.v[i] = share.heads == 1 ? mine.sine : simd_shuffle(mine.sine, from);
  }
}

// Mostly all pairs of a pack turn: asking for each would cost as much as to turn them.
template <bool ASK, int V>
inline void turn_packs(thread Floats<V>& a, thread Floats<V>& b, Floats<V> cosine, Floats<V> sine, Rope rope, int pair) {
  UNROLL for (int k = 0; k < V; ++k) {
    if (ASK && !rope.turns_pair(pair + k)) continue;
    const Floats<2> f = turned(a.v[k], b.v[k], cosine.v[k], sine.v[k]);
    a.v[k] = f.v[0];
    b.v[k] = f.v[1];
  }
}

template <int V, int R, typename HEAD>
inline void rotate(thread Kept<V, R>& kept, thread Rotations<halves, V, R>& rotations, Rope rope, HEAD, Share share, int, int packs) {
  FOR_MINE(c, R / 2, packs / 2) {
    Floats<V> a = kept.get(c), b = kept.get(c + R / 2);
    const int pair = rope.pair_of(halves(), share.first_at(c) * V);
    if (rope.turns_pair(pair) && pair + V <= rope.pairs) turn_packs<false>(a, b, rotations.cosine.get(c), rotations.sine.get(c), rope, pair);
    else turn_packs<true>(a, b, rotations.cosine.get(c), rotations.sine.get(c), rope, pair);
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
      if (!rope.turns_pair(rope.pair_of(adjacent(), share.at(base + c) * V + 2 * k))) continue;
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

// The packs from `base` on of a head whose squares are summed: normed and turned.
template <int ALL, typename PAIRS, int V, int R, typename HEAD>
inline void turn_head(thread Kept<V, R>& kept, HEAD head, thread Kept<V, R>& gains, thread Rotations<PAIRS, V, R>& rotations, Rope rope, Share share,
                      int base, int packs) {
  if (ALL == 0) {  // nothing is kept
    FOR_MINE(c, R, packs - base) kept.put(c, load_pack<V>(head.x, share.at(base + c)));
    load_gains(gains, head, share, base, packs - base);
    load_rotations(rotations, rope, share, base, packs - base);
  }
  FOR_MINE(c, R, packs - base) kept.put(c, normed(head, kept.get(c), gains.get(c)));
  rotate(kept, rotations, rope, head, share, base, packs - base);
}

// A head's channels, each read again, normed, turned and written by one thread, which need not be the one that summed its square.
template <typename HEAD, typename U>
inline void turn_in_place(device U* out, HEAD head, Rope rope, Share share, int width) {
  for (int pair = share.rank; pair < (width > 0 ? rope.pairs : 0); pair += share.lanes) {
    const int a = rope.first + pair * (rope.interleaved ? 2 : 1), b = a + rope.distance;
    const Floats<1> y_a = normed(head, load_pack<1>(head.x, a), load_gain<1>(head, a)), y_b = normed(head, load_pack<1>(head.x, b), load_gain<1>(head, b));
    const Rotation r = rope.rotation_of(pair);
    const Floats<2> f = turned(y_a.v[0], y_b.v[0], r.cosine, r.sine);
    out[a] = U(f.v[0]);
    out[b] = U(f.v[1]);
  }
  for (int i = share.rank; i < width; i += share.lanes)
    if (!rope.turns_pair(rope.pair_of(i))) store_pack<1>(out, i, normed(head, load_pack<1>(head.x, i), load_gain<1>(head, i)));
}

// width: of the head, 0 if there is none. in_place: it lies in `out`. A thread that has whole pairs has read all that it writes.
template <int ALL, typename PAIRS, int V, int R, typename HEAD, typename U>
inline void turn_and_store(device U* out, thread Kept<V, R>& kept, HEAD head, thread Kept<V, R>& gains, thread Rotations<PAIRS, V, R>& rotations,
                           Rope rope, Share share, int packs, int width, bool in_place) {
  if (in_place) simdgroup_barrier(mem_flags::mem_device);  // everyone has read what is written now
  if (in_place && PAIRS::packs * PAIRS::elements == 1) {
    turn_in_place(out, head, rope, share, width);
    return;
  }
  for (int base = 0; base < packs; base += R) {
    turn_head<ALL>(kept, head, gains, rotations, rope, share, base, packs);
    if (width > 0) store_head(out, kept, share, base, packs - base);
  }
}

#endif

// 1 / the root of the mean square of a head, of which this thread has a part of the sum.
inline float inverse_rms(float squares, Share share, uint width, float epsilon) { return rsqrt(share.sum(squares) / float(width) + epsilon); }
