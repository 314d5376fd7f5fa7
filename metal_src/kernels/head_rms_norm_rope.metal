// Every head of every token: y = x * rsqrt(mean(x^2) + epsilon) * (scale + scale_offset), and then the pairs (a, b) of its rotated channels
// turn by the token's angles: (y_a cos - y_b sin, y_a sin + y_b cos).
// 0 x [tokens, x_stride] T, its heads x_start on · 1 k: likewise, which may be the same array · 2 positions [tokens] · 3 angles: turns [pairs, 2], or a table of floats
// [table_rows, pairs, 2] · 4, 5 scales of x and of k [width] · 6, 7 the results [tokens, heads or k_heads, width] T · 8 to 13 copies of x's · 14 params
// grid: tokens * parts teams of one simdgroup, TEAMS a threadgroup. A team walks its part of a token's heads, 32 / lanes of them at once,
// and keeps the token's angles. No threadgroup memory. bytes: 1 read of x and k, 1 write of every result.
#include "head.h"

// The head that a thread takes in a walk of its team; or, if there is none for it, another thread's.
struct Found {
  bool of_k, some;
  uint head;
  long channel;  // its first, among those of the token's heads
};

inline Found find_head(constant HeadNormRopeParams& p, uint walk, Share share) {
  Found found;
  found.of_k = walk >= p.x_walks;
  const uint heads = found.of_k ? p.k_heads : p.heads;
  found.head = (found.of_k ? walk - p.x_walks : walk) * p.at_once + uint(share.head);
  found.some = found.head < heads;
  if (!found.some) found.head = heads - 1;
  found.channel = long(found.head) * p.width;
  return found;
}

// The results for x, as many as are wanted of the copies.
template <typename T>
struct Results {
  device T *out, *copy0, *copy1, *copy2, *copy3, *copy4, *copy5;
  inline device T* copy(uint i) const { return i == 0 ? copy0 : i == 1 ? copy1 : i == 2 ? copy2 : i == 3 ? copy3 : i == 4 ? copy4 : copy5; }
};

// Stores packs of a head.
template <int V, int N, typename T>
OUT_OF_LINE void store_everywhere(constant HeadNormRopeParams& p, Results<T> x, device T* k_out, uint token, Found at, thread Kept<V, N>& kept,
                                  Share share, int base, int packs) {
  store_head((at.of_k ? k_out : x.out) + at.channel, kept, share, base, packs);
  for (uint i = 0; i < (at.of_k ? 0 : p.copies); ++i) {
    const long sequence = token / p.sequence, place = token % p.sequence;
    const long of_copy = p.head_major >> i & 1 ? ((sequence * p.heads + at.head) * p.sequence + place) * p.width
                                               : long(token) * p.heads * p.width + at.channel;
    const uint type = p.copy_types >> 2 * i & 3;
    if (type == float_copy) store_head(reinterpret_cast<device float*>(x.copy(i)) + of_copy, kept, share, base, packs);
    if (type == bfloat_copy) store_head(reinterpret_cast<device bfloat*>(x.copy(i)) + of_copy, kept, share, base, packs);
    if (type == half_copy) store_head(reinterpret_cast<device half*>(x.copy(i)) + of_copy, kept, share, base, packs);
  }
}

// T: storage. IN_T: round to T before the scale, and multiply in T. ROUND: round to T before the rotation. PAIRS: how pairs lie.
// V: elements a load. R: packs that a thread has of a head, and keeps; 0: any number, read twice.
// SG: 1. TEAMS: simdgroups a threadgroup.
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
  const uint token = p.parts == 1 ? team : team / p.parts;  // a division takes as long as a dozen of anything else
  const Share share = share_of<PAIRS, V, R>(lane, p);
  const int all = packs_of<R>(share, int(p.width) / V), N = Taken<R>::packs;
  x += long(token) * p.x_stride + p.x_start;
  x_out += long(token) * p.heads * p.width;
  k += long(token) * p.k_stride + p.k_start;
  k_out += long(token) * p.k_heads * p.width;
  Results<T> results;
  results.out = x_out;
  results.copy0 = copy0;
  results.copy1 = copy1;
  results.copy2 = copy2;
  results.copy3 = copy3;
  results.copy4 = copy4;
  results.copy5 = copy5;

  const uint walks = p.x_walks + p.k_walks;
  uint walk = team - token * p.parts;
  const int AHEAD = HeadsAhead<T, PAIRS, V, R>::count;
  Ahead<T, V, R> ahead[AHEAD];
  UNROLL for (int i = 0; i < AHEAD; ++i) {
    if (walk + i * p.parts >= walks) continue;
    const Found at = find_head(p, walk + i * p.parts, share);
    ask_for(ahead[i], (at.of_k ? k : x) + at.channel, share, all);
  }
  Kept<V, N> kept = keep<V, N>(scratch, 0, p.width), gains = keep<V, N>(scratch, 1, p.width);
  const Rope rope = rope_of(p, angles, positions[token]);
  if (!rope.known) {
    for (; walk < walks; walk += p.parts) {
      const Found at = find_head(p, walk, share);
      for (int base = 0; at.some && base < all; base += N) {
        FOR_MINE(c, N, all - base) kept.put(c, zeros<V>());
        store_everywhere(p, results, k_out, token, at, kept, share, base, all - base);
      }
    }
    return;
  }

  Rotations<PAIRS, V, N> rotations;
  rotations.cosine = keep<V / PAIRS::elements, N / PAIRS::packs>(scratch, 2, p.width);
  rotations.sine = keep<V / PAIRS::elements, N / PAIRS::packs>(scratch, 3, p.width);
  if (R > 0) load_rotations(rotations, rope, share, 0, all);
  Head<T, IN_T, ROUND> head;
  head.scale_kind = p.scale;
  head.scale_offset = p.scale_offset;
  int gains_of = -1;
  while (walk < walks) {
    UNROLL for (int i = 0; i < AHEAD && (i == 0 || walk < walks); ++i) {
      const Found at = find_head(p, walk, share);
      head.x = (at.of_k ? k : x) + at.channel;
      head.scale = at.of_k ? k_scale : x_scale;
      if (R > 0 && gains_of != int(at.of_k)) load_gains(gains, head, share, 0, all);
      gains_of = at.of_k;
      const float squares = sum_of_squares(ahead[i], share, all, kept);
      if (walk + AHEAD * p.parts < walks) {
        const Found later = find_head(p, walk + AHEAD * p.parts, share);
        ask_for(ahead[i], (later.of_k ? k : x) + later.channel, share, all);
      }
      head.r = inverse_rms(squares, share, p.width, p.epsilon);
      walk += p.parts;
#ifdef KEPT_IN_SCRATCH
      // straight from memory to memory, where no one else wants the values
      if (at.of_k || p.copies == 0) {
        turn_into((at.of_k ? k_out : x_out) + at.channel, head, gains, rotations, rope, all);
        continue;
      }
#endif
      for (int base = 0; base < all; base += N) {
        turn_head<R>(kept, head, gains, rotations, rope, share, base, all);
        if (at.some) store_everywhere(p, results, k_out, token, at, kept, share, base, all - base);
      }
    }
  }
}
