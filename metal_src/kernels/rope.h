// Rotary embedding: angles counted in turns, and the ways that the two channels of a pair lie to each other.
// Angles are exact integers until the last step: 64 binary places of a turn, so off by at most 3e-9 rad up to position 2^24 (1e-7 at 2^31),
// and the same on every target. Cosine and sine are then within 1.2e-7.
#pragma once
#include "params.h"
#include "team.h"

// How a pair lies in the threads that share a head: over how many packs of a thread, and of how many elements of a pack.
struct halves {  // (i, i + distance), half of a thread's packs apart
  enum { packs = 2, elements = 1 };
};
struct adjacent {  // (2i, 2i + 1), in one pack
  enum { packs = 1, elements = 2 };
};
struct apart {  // anywhere: what the partner holds is read again
  enum { packs = 1, elements = 1 };
};

struct Rotation {
  float cosine;
  float sine;
};

// The fraction of a turn, in units of 2^-32, after `position` steps of high 2^-32 + low 2^-64 turns. It wraps as angles do.
inline uint turns(int position, uint high, uint low) {
  const uint steps = uint(position);
  const uint turn = steps * high + mulhi(steps, low);
  return turn - (position < 0 ? low : 0u);  // mulhi took the position for 2^32 more
}

// Its cosine and sine: polynomials within an eighth of a turn of the nearest quarter, which the top two bits are.
inline Rotation rotation(uint turn) {
  const uint quarter = (turn + 0x20000000u) >> 30;
  const float a = float(int(turn - (quarter << 30))) * 1.46291807927e-9f;  // 2 pi 2^-32
  const float z = a * a;
  const float sine = fma(fma(fma(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f) * z, a, a);
  const float cosine = fma(fma(fma(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f) * z, z, fma(-0.5f, z, 1.0f));
  // signs are bits: a comparison for each would cost more
  const uint swap = 0u - (quarter & 1u), c = as_type<uint>(cosine), s = as_type<uint>(sine);
  Rotation r;
  r.cosine = as_type<float>(((c & ~swap) | (s & swap)) ^ ((quarter + 1u) >> 1 << 31));
  r.sine = as_type<float>(((s & ~swap) | (c & swap)) ^ (quarter >> 1 << 31));
  return r;
}

// (a, b) turned.
inline Floats<2> turned(float a, float b, float cosine, float sine) {
  Floats<2> f;
  f.v[0] = fma(a, cosine, -(b * sine));
  f.v[1] = fma(a, sine, b * cosine);
  return f;
}

// The rotation of one token.
struct Rope {
  device const uint* angles;
  int position;
  bool table, known;  // known: the table, if there is one, has this position
  bool interleaved;
  bool back;  // it turns the other way, as cotangents do
  int pairs, first, distance;

  // The pair that a channel belongs to, and whether it is the second of the two. Pairs outside 0 .. pairs - 1 do not turn.
  inline bool second(int channel) const { return interleaved ? (channel - first) % 2 != 0 : channel - first >= distance; }
  inline int pair_of(int channel) const {
    const int i = channel - (second(channel) ? distance : 0) - first;
    return interleaved && i >= 0 ? i / 2 : i;
  }
  inline int pair_of(halves, int channel) const { return channel - first; }  // of the first of the two
  inline int pair_of(adjacent, int channel) const { return (channel - first) >> 1; }
  inline int pair_of(apart, int channel) const { return pair_of(channel); }
  inline bool turns_pair(int pair) const { return uint(pair) < uint(pairs); }

  // A pair's entry says how far it turns at each position, or its cosine and sine at this one.
  inline Rotation rotation_of(int pair) const {
    const Pack<uint, 2> entry = reinterpret_cast<device const Pack<uint, 2>*>(angles)[table ? long(position) * pairs + pair : long(pair)];
    Rotation r;
    r.cosine = as_type<float>(entry.v[0]);
    r.sine = as_type<float>(entry.v[1]);
    if (!table) r = rotation(turns(position, entry.v[0], entry.v[1]));
    if (back) r.sine = -r.sine;
    return r;
  }
};

inline Rope rope_of(constant HeadNormRopeParams& p, device const uint* angles, int position) {
  Rope rope;
  rope.angles = angles;
  rope.position = position;
  rope.table = p.table != 0;
  rope.known = !rope.table || uint(position) < p.table_rows;
  rope.interleaved = p.interleaved != 0;
  rope.back = false;
  rope.pairs = int(p.pairs);
  rope.first = int(p.first);
  rope.distance = int(p.distance);
  return rope;
}
