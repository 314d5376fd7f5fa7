// Every head of every token: y = x * rsqrt(mean(x^2) + epsilon) * (scale + scale_offset), and then the pairs (a, b) of its rotated channels
// turn by the token's angles: (y_a cos - y_b sin, y_a sin + y_b cos).
// 0 x [tokens, heads, width] T · 1 k [tokens, k_heads, width] T · 2 positions [tokens] · 3 angles: turns [pairs, 2], or a table of floats
// [table_rows, pairs, 2] · 4, 5 scales of x and of k [width] · 6, 7 the results, like x and k · 8 to 13 copies of x's · 14 params
// grid: tokens * parts teams of one simdgroup, TEAMS a threadgroup. A team walks its part of a token's heads, 32 / lanes of them at once,
// and keeps the token's angles. No threadgroup memory. bytes: 1 read of x and k, 1 write of every result.
#include "head.h"

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
      float squares = sum_of_squares(head.x, share, packs, kept);
      for (int mask = share.lanes / 2; mask > 0; mask /= 2) squares += simd_shuffle_xor(squares, ushort(mask));
      head.r = rsqrt(squares / float(p.width) + p.epsilon);
    }
    device T* const out = (of_k ? k_out : x_out) + start;
#ifdef KEPT_IN_SCRATCH
    // straight from memory to memory, where no one else wants the values
    if (rope.known && (of_k || p.copies == 0)) {
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
