// The q and k heads of a ragged batch, normed and turned as head_rms_norm_rope does, k and v into their slots of a paged cache; or the k heads
// that already lie in their slots, normed and turned there.
// 0 q [tokens, q_stride] T · 1 k, 2 v: likewise, each a buffer of its own or columns of q's · 3 page_table [sequences, table_width] ·
// 4 lengths [sequences]: tokens of each before these · 5 offsets [sequences + 1]: where each begins among these · 6 layer · 7 angles: a table
// [table_rows, pairs, 2] · 8, 9 scales of q and of k [width] · 10 q_out [tokens, heads, width] T · 11 pages [pages, sides, layers, page_size,
// k_heads, width] T, sides: k and v, or k alone · 12 params
// grid: tokens * parts teams of one simdgroup, TEAMS a threadgroup. A team walks its part of a token's heads, 32 / lanes of them at once,
// and keeps the token's angles. No threadgroup memory. bytes: 1 read and 1 write of every head of q, k and v.
#include "head.h"

// A token's position, which the table may not have, and its slot: the first element of its k in pages. -1 where it has none.
struct Place {
  int position;
  long slot;
};

// Whatever the data holds, the offsets count as their running maximum: a token's sequence is the one before the first offset beyond it.
inline Place place_of(constant PagedHeadsParams& p, device const int* page_table, device const int* lengths, device const int* offsets,
                      int layer, int token, uint lane) {
  Place place;
  place.position = -1;
  place.slot = -1;
  const int count = int(p.sequences);
  int beyond = count + 1, start = 0;
  for (int i = int(lane); i <= count; i += SIMD_WIDTH) {
    const int found = offsets[i] > token ? i : count + 1;
    beyond = found < beyond ? found : beyond;
  }
  const int sequence = simd_min(beyond) - 1;
  if (sequence < 0 || sequence >= count) return place;
  for (int i = int(lane); i <= sequence; i += SIMD_WIDTH) start = offsets[i] > start ? offsets[i] : start;
  const uint position = uint(lengths[sequence]) + uint(token + simd_min(-start));  // beyond int32: negative
  place.position = int(position);

  const uint page_of_sequence = position / p.page_size, in_page = position % p.page_size;
  if (page_of_sequence >= p.table_width || uint(layer) >= p.layers) return place;
  const int page = page_table[long(sequence) * p.table_width + page_of_sequence];
  if (uint(page) < p.pages) place.slot = ((long(page) * p.sides * p.layers + layer) * p.page_size + in_page) * p.heads.k_heads * p.heads.width;
  return place;
}

// The heads of one token side by side, and where they go.
template <typename T>
struct Heads {
  device const T* x;
  device T* out;
  uint count;
};

template <typename T>
inline Heads<T> heads_at(device const T* x, device T* out, uint count) {
  Heads<T> heads;
  heads.x = x;
  heads.out = out;
  heads.count = count;
  return heads;
}

// The head that a thread takes in a walk of its team, if there is one for it.
template <typename T>
struct Found {
  bool some;
  device const T* x;
  device T* out;
};

template <typename T>
inline Found<T> find_head(Heads<T> heads, uint walk, Share share, uint lane, uint width) {
  const uint lanes = uint(share.lanes), head = walk * (SIMD_WIDTH / lanes) + lane / lanes;
  Found<T> found;
  found.some = head < heads.count;
  found.x = heads.x + long(head) * width;
  found.out = heads.out + long(head) * width;
  return found;
}

// T: storage. IN_T: round to T before the scale, and multiply in T. ROUND: round to T before the rotation. PAIRS: how pairs lie.
// V: elements a load. R: packs that a thread keeps; of a longer head it takes R at a time, and reads them twice. SG: 1.
// TEAMS: simdgroups a threadgroup.
template <typename T, bool IN_T, bool ROUND, typename PAIRS, int V, int R, int SG, int TEAMS>
kernel void qk_rms_norm_rope_paged(
    device const T* q [[buffer(0)]],
    device const T* k [[buffer(1)]],
    device const T* v [[buffer(2)]],
    device const int* page_table [[buffer(3)]],
    device const int* lengths [[buffer(4)]],
    device const int* offsets [[buffer(5)]],
    device const int* layer [[buffer(6)]],
    device const uint* angles [[buffer(7)]],
    device const uint* q_scale [[buffer(8)]],
    device const uint* k_scale [[buffer(9)]],
    device T* q_out [[buffer(10)]],
    device T* pages [[buffer(11)]],
    constant PagedHeadsParams& p [[buffer(12)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint team = group * TEAMS + simdgroup;
  if (team >= p.heads.tokens * p.heads.parts) return;
  const uint token = team / p.heads.parts, width = p.heads.width;
  const Place place = place_of(p, page_table, lengths, offsets, layer[0], int(token), lane);
  const bool stores = place.slot >= 0, in_place = p.has_k == 0;
  device T* const slot = pages + (stores ? place.slot : 0);
  const Heads<T> qs = heads_at(q + long(token) * p.q_stride + p.q_start, q_out + long(token) * p.heads.heads * width, p.heads.heads);
  const Heads<T> ks = heads_at(in_place ? slot : k + long(token) * p.k_stride + p.k_start, slot, stores ? p.heads.k_heads : 0);
  const Heads<T> vs = heads_at(v + long(token) * p.v_stride + p.v_start, slot + long(p.layers) * p.page_size * p.heads.k_heads * width,
                               stores && p.has_v != 0 ? p.heads.k_heads : 0);

  const Share share = share_of(lane, p.heads.lanes);
  const int all = share.of(int(width) / V);
  const uint at_once = SIMD_WIDTH / uint(share.lanes);
  const uint q_walks = (qs.count + at_once - 1) / at_once;
  const uint k_walks = (ks.count + at_once - 1) / at_once;
  const uint v_walks = (vs.count + at_once - 1) / at_once;
  uint walk = team % p.heads.parts;
  const Rope rope = rope_of(p.heads, angles, place.position);
  if (!rope.known) {
    for (; walk < q_walks; walk += p.heads.parts) {
      const Found<T> at = find_head(qs, walk, share, lane, width);
      FOR_MINE(c, 0, (at.some ? all : 0)) store_pack<V>(at.out, share.at(c), zeros<V>());
    }
    return;
  }

  Head<T, IN_T, ROUND> head;
  head.scale_kind = p.heads.scale;
  head.scale_offset = p.heads.scale_offset;
  Kept<V, R> kept = keep<V, R>(scratch, 0, width), gains = keep<V, R>(scratch, 1, width);
  Rotations<PAIRS, V, R> rotations;
  rotations.cosine = keep<V / PAIRS::elements, R / PAIRS::packs>(scratch, 2, width);
  rotations.sine = keep<V / PAIRS::elements, R / PAIRS::packs>(scratch, 3, width);
  if (all <= R) load_rotations(rotations, rope, share, 0, all);
  int gains_of = -1;

  Found<T> next = find_head(walk < q_walks ? qs : ks, walk < q_walks ? walk : walk - q_walks, share, lane, width);
  Ahead<T, V, R> ahead;
  ask_for(ahead, next.x, share, next.some ? all : 0);
  while (walk < q_walks + k_walks) {
    const Found<T> at = next;
    const bool of_k = walk >= q_walks;
    const int packs = at.some ? all : 0;
    head.x = at.x;
    head.scale = of_k ? k_scale : q_scale;
    if (all <= R && gains_of != int(of_k)) load_gains(gains, head, share, 0, all);
    gains_of = of_k;
    head.r = inverse_rms(ahead, head.x, share, packs, kept, width, p.heads.epsilon);
    walk += p.heads.parts;
    next = find_head(walk < q_walks ? qs : ks, walk < q_walks ? walk : walk - q_walks, share, lane, width);
    ask_for(ahead, next.x, share, next.some ? all : 0);
    turn_and_store(at.out, kept, head, gains, rotations, rope, share, packs, at.some ? int(width) : 0, of_k && in_place);
  }
  for (; walk < q_walks + k_walks + v_walks; walk += p.heads.parts) {
    const Found<T> at = find_head(vs, walk - q_walks - k_walks, share, lane, width);
    FOR_MINE(c, 0, (at.some ? all : 0)) copy_pack<V>(at.out, at.x, share.at(c));
  }
}
