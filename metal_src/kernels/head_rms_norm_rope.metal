// Every head of every token: y = x * rsqrt(mean(x^2) + epsilon) * (scale + scale_offset), and then the pairs (a, b) of its rotated channels
// turn by the token's angles: (y_a cos - y_b sin, y_a sin + y_b cos).
// 0 x [tokens, heads, width] T · 1 k [tokens, k_heads, width] T · 2 positions [tokens] · 3 angles: turns [pairs, 2], or a table of floats
// [table_rows, pairs, 2] · 4, 5 scales of x and of k [width] · 6, 7 the results, like x and k · 8 to 13 copies of x's · 14 params
// grid: tokens * parts teams of one simdgroup, TEAMS a threadgroup. A team walks its part of a token's heads, 32 / lanes of them at once,
// and keeps the token's angles. No threadgroup memory. bytes: 1 read of x and k, 1 write of every result.
#include "head.h"

// The head that a thread takes in a walk of its team, if there is one for it.
struct Found {
  bool some, of_k;
  uint head;
  long start;  // its first element
};

inline Found find_head(constant HeadNormRopeParams& p, uint token, uint walk, uint x_walks, uint at_once, uint place) {
  Found found;
  found.of_k = walk >= x_walks;
  const uint heads = found.of_k ? p.k_heads : p.heads;
  found.head = (found.of_k ? walk - x_walks : walk) * at_once + place;
  found.some = found.head < heads;
  found.start = (long(token) * heads + found.head) * p.width;
  return found;
}

// Where a head of x starts in [..., heads, tokens, width].
inline long head_major_start(constant HeadNormRopeParams& p, uint token, Found at) {
  return ((long(token / p.sequence) * p.heads + at.head) * p.sequence + token % p.sequence) * p.width;
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

  const uint at_once = SIMD_WIDTH / uint(share.lanes), place = lane / uint(share.lanes);
  const uint x_walks = (p.heads + at_once - 1) / at_once, walks = x_walks + (p.k_heads + at_once - 1) / at_once;
  uint walk = team % p.parts;
  Found next = find_head(p, token, walk, x_walks, at_once, place);
  Ahead<T, V, R> ahead;
  if (rope.known) ask_for(ahead, (next.of_k ? k : x) + next.start, share, next.some ? all : 0);
  while (walk < walks) {
    const Found at = next;
    const int packs = at.some ? all : 0;
    head.x = (at.of_k ? k : x) + at.start;
    head.scale = at.of_k ? k_scale : x_scale;
    if (all <= R && gains_of != int(at.of_k)) load_gains(gains, head, share, 0, all);
    gains_of = at.of_k;
    if (rope.known) head.r = inverse_rms(ahead, head.x, share, packs, kept, p.width, p.epsilon);
    walk += p.parts;
    next = find_head(p, token, walk, x_walks, at_once, place);
    if (rope.known) ask_for(ahead, (next.of_k ? k : x) + next.start, share, next.some ? all : 0);

    device T* const out = (at.of_k ? k_out : x_out) + at.start;
#ifdef KEPT_IN_SCRATCH
    // straight from memory to memory, where no one else wants the values
    if (rope.known && (at.of_k || p.copies == 0)) {
      turn_into(out, head, gains, rotations, rope, packs);
      continue;
    }
#endif
    for (int base = 0; base < packs; base += R) {
      const int n = packs - base;
      if (rope.known) {
        turn_head(kept, head, gains, rotations, rope, share, base, packs);
      } else {
        FOR_MINE(c, R, n) kept.put(c, zeros<V>());
      }
      store_head(out, kept, share, base, n);
      for (uint i = 0; i < (at.of_k ? 0 : p.copies); ++i) {
        device T* const copy = i == 0 ? copy0 : i == 1 ? copy1 : i == 2 ? copy2 : i == 3 ? copy3 : i == 4 ? copy4 : copy5;
        const long start = p.head_major >> i & 1 ? head_major_start(p, token, at) : at.start;
        const uint type = p.copy_types >> 2 * i & 3;
        if (type == float_copy) store_head(reinterpret_cast<device float*>(copy) + start, kept, share, base, n);
        if (type == bfloat_copy) store_head(reinterpret_cast<device bfloat*>(copy) + start, kept, share, base, n);
        if (type == half_copy) store_head(reinterpret_cast<device half*>(copy) + start, kept, share, base, n);
      }
    }
  }
}
