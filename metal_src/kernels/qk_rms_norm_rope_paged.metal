// The q and k heads of a ragged batch, normed and turned as head_rms_norm_rope does, k and v into their slots of a paged cache; or the k heads
// that already lie in their slots, normed and turned there.
// 0 q [tokens, x_stride] T · 1 k, 2 v: likewise, each a buffer of its own or columns of q's · 3 page_table [sequences, table_width] ·
// 4 lengths [sequences]: tokens of each before these · 5 offsets [sequences + 1]: where each begins among these · 6 layer · 7 angles: a table
// [table_rows, pairs, 2] · 8, 9 scales of q and of k [width] · 10 q_out [tokens, heads, width] T · 11 pages [pages, sides, layers, page_size,
// k_heads, width] T, sides: k and v, or k alone · 12 params
// grid: tokens * parts teams of one simdgroup, TEAMS a threadgroup. A team walks its part of a token's heads, 32 / lanes of them at once,
// and keeps the token's angles. No threadgroup memory. bytes: 1 read and 1 write of every head of q, k and v.
#include "head.h"

// A token's position, and its page and the place in it. -1 where it has none; a page id as it stands in the table, which may be any number.
struct Place {
  int position, page;
  uint in_page;
};

// Whatever the data holds, the offsets count as their running maximum: a token's sequence is the one before the first offset beyond it.
inline Place place_of(constant PagedHeadsParams& p, device const int* page_table, device const int* lengths, device const int* offsets,
                      int layer, int token, uint lane) {
  Place place;
  place.position = -1;
  place.page = -1;
  const int count = int(p.sequences);
  int beyond = count + 1, start = 0;
  for (int i = int(lane); i <= count; i += SIMD_WIDTH) {
    const int found = offsets[i] > token ? i : count + 1;
    beyond = found < beyond ? found : beyond;
  }
  const int sequence = simd_min(beyond) - 1;
  if (sequence < 0 || sequence >= count) return place;
  for (int i = int(lane); i <= sequence; i += SIMD_WIDTH) start = offsets[i] > start ? offsets[i] : start;
  const long position = long(lengths[sequence]) + (token + simd_min(-start));
  if (position < 0 || position >= long(p.heads.table_rows)) return place;
  place.position = int(position);

  const uint page_of_sequence = uint(position) / p.page_size;
  if (page_of_sequence >= p.table_width || uint(layer) >= p.layers) return place;
  place.page = page_table[long(sequence) * p.table_width + page_of_sequence];
  place.in_page = uint(position) - page_of_sequence * p.page_size;
  return place;
}

// The first element of a token's k in pages; -1 where it has none.
inline long slot_of(constant PagedHeadsParams& p, int layer, Place place) {
  long slot = -1;
  if (uint(place.page) < p.pages)
    slot = ((long(place.page) * p.sides * p.layers + layer) * p.page_size + place.in_page) * p.heads.k_heads * p.heads.width;
  return slot;
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

// The head that a thread takes in a walk of its team; or, if there is none for it, another thread's.
template <typename T>
struct Found {
  bool some;
  device const T* x;
  device T* out;
};

template <typename T>
inline Found<T> find_head(Heads<T> heads, uint walk, constant PagedHeadsParams& p, Share share) {
  const uint head = walk * p.heads.at_once + uint(share.head);
  Found<T> found;
  found.some = head < heads.count;
  const long channel = long(found.some ? head : heads.count - 1) * p.heads.width;
  found.x = heads.x + channel;
  found.out = heads.out + channel;
  return found;
}

// T: storage. IN_T: round to T before the scale, and multiply in T. ROUND: round to T before the rotation. PAIRS: how pairs lie.
// V: elements a load. R: packs that a thread has of a head, and keeps; 0: any number, read twice.
// SG: 1. TEAMS: simdgroups a threadgroup.
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
  const uint width = p.heads.width, parts = p.heads.parts, q_walks = p.heads.x_walks;
  const uint token = parts == 1 ? team : team / parts;
  const Share share = share_of<PAIRS, V, R>(lane, p.heads);
  const int all = packs_of<R>(share, int(width) / V), N = Taken<R>::packs;
  const Heads<T> qs = heads_at(q + long(token) * p.heads.x_stride + p.heads.x_start, q_out + long(token) * p.heads.heads * width, p.heads.heads);

  // q is asked for before it is known where k goes: that takes several reads, one after another
  uint walk = team - token * parts;
  const int AHEAD = HeadsAhead<T, PAIRS, V, R>::count;
  Ahead<T, V, R> ahead[AHEAD];
  UNROLL for (int i = 0; i < AHEAD; ++i) {
    if (walk + i * parts < q_walks) ask_for(ahead[i], find_head(qs, walk + i * parts, p, share).x, share, all);
  }
  const Place place = place_of(p, page_table, lengths, offsets, layer[0], int(token), lane);
  Rope rope = rope_of(p.heads, angles, place.position);
  rope.table = true;  // always
  if (!rope.known) {
    for (; walk < q_walks; walk += parts) {
      const Found<T> at = find_head(qs, walk, p, share);
      FOR_MINE(c, R, (at.some ? all : 0)) store_pack<V>(at.out, share.at(c), zeros<V>());
    }
    return;
  }

  Rotations<PAIRS, V, N> rotations;
  rotations.cosine = keep<V / PAIRS::elements, N / PAIRS::packs>(scratch, 2, width);
  rotations.sine = keep<V / PAIRS::elements, N / PAIRS::packs>(scratch, 3, width);
  if (R > 0) load_rotations(rotations, rope, share, 0, all);

  // the page's id has been on its way since it was found
  const long first = slot_of(p, layer[0], place);
  const bool stores = first >= 0, in_place = p.has_k == 0;
  device T* const slot = pages + (stores ? first : 0);
  const uint walks = q_walks + (stores ? p.heads.k_walks : 0), v_walks = stores && p.has_v != 0 ? p.heads.k_walks : 0;
  const Heads<T> ks = heads_at(in_place ? slot : k + long(token) * p.heads.k_stride + p.heads.k_start, slot, p.heads.k_heads);
  const Heads<T> vs = heads_at(v + long(token) * p.v_stride + p.v_start, slot + long(p.layers) * p.page_size * p.heads.k_heads * width,
                               p.heads.k_heads);
  UNROLL for (int i = 0; i < AHEAD; ++i) {
    const uint later = walk + i * parts;
    if (later >= q_walks && later < walks) ask_for(ahead[i], find_head(ks, later - q_walks, p, share).x, share, all);
  }
  for (uint copied = walk; v_walks > 0 && copied < walks + v_walks; copied += parts) {  // last in order, first in time: they need only a slot
    if (copied < walks) continue;
    const Found<T> at = find_head(vs, copied - walks, p, share);
    if (at.some) copy_head<V, N>(at.out, at.x, share, all);
  }

  Head<T, IN_T, ROUND> head;
  head.scale_kind = p.heads.scale;
  head.scale_offset = p.heads.scale_offset;
  Kept<V, N> kept = keep<V, N>(scratch, 0, width), gains = keep<V, N>(scratch, 1, width);
  int gains_of = -1;
  while (walk < walks) {
    // i == 0: with a second test of the first walk GCC's code takes twice as long, and with an if inside nvcc's a twentieth longer
    UNROLL for (int i = 0; i < AHEAD && (i == 0 || walk < walks); ++i) {
      const bool of_k = walk >= q_walks;
      const Found<T> at = of_k ? find_head(ks, walk - q_walks, p, share) : find_head(qs, walk, p, share);
      head.x = at.x;
      head.scale = of_k ? k_scale : q_scale;
      if (R > 0 && gains_of != int(of_k)) load_gains(gains, head, share, 0, all);
      gains_of = of_k;
      const float squares = sum_of_squares(ahead[i], share, all, kept);
      const uint later = walk + AHEAD * parts;
      if (later < walks) {
        const Found<T> to = later >= q_walks ? find_head(ks, later - q_walks, p, share) : find_head(qs, later, p, share);
        ask_for(ahead[i], to.x, share, all);
      }
      head.r = inverse_rms(squares, share, width, p.heads.epsilon);
      turn_and_store<R>(at.out, kept, head, gains, rotations, rope, share, all, at.some ? int(width) : 0, of_k && in_place);
      walk += parts;
    }
  }
}
