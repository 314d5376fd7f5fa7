// A team: the threads that own one row. One simdgroup, or SG simdgroups of a threadgroup; one thread when the host compiles this.
#pragma once
#include "dtypes.h"

template <int SG>
struct Team {
  int rank;                    // this thread's place in the team
  threadgroup float* partial;  // 4 SG floats

  inline int size() const { return SG * SIMD_WIDTH; }

  // How many of n packs this thread owns. Its pack number c is pack at(c) of the row.
  inline int share(int n) const { return (n - rank + size() - 1) / size(); }
  inline int at(int c) const { return rank + c * size(); }

  // The sum over the team, in every thread. All threads of the team must call it.
  inline float sum(float x) const {
    x = simd_sum(x);
    if (SG == 1) return x;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody still reads the last sum
    if (rank % SIMD_WIDTH == 0) partial[rank / SIMD_WIDTH] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0;
    for (int s = 0; s < SG; ++s) total += partial[s];
    return total;
  }

  // The same of two values, at the price of one.
  inline Floats<2> sums(float x, float y) const {
    Floats<2> total;
    total.v[0] = simd_sum(x);
    total.v[1] = simd_sum(y);
    if (SG == 1) return total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (rank % SIMD_WIDTH == 0) {
      partial[rank / SIMD_WIDTH] = total.v[0];
      partial[SG + rank / SIMD_WIDTH] = total.v[1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total.v[0] = total.v[1] = 0;
    for (int s = 0; s < SG; ++s) {
      total.v[0] += partial[s];
      total.v[1] += partial[SG + s];
    }
    return total;
  }

  // The same of N values, a power of two up to 4: each comes to one thread, whose `which` says of which it has the sum; the
  // others have N there. At every step two threads share out the values of which both have a part.
  template <int N>
  inline float sums(thread float* x, thread int& which) const {
    const int lane = rank % SIMD_WIDTH;
    UNROLL for (int pairs = N / 2; pairs > 0; pairs /= 2) {
      const int apart = pairs * SIMD_WIDTH / N;
      const bool upper = (lane & apart) != 0;
      UNROLL for (int i = 0; i < pairs; ++i) {
        const float given = upper ? x[i] : x[i + pairs], kept = upper ? x[i + pairs] : x[i];
        x[i] = kept + simd_shuffle_xor(given, ushort(apart));
      }
    }
    UNROLL for (int apart = SIMD_WIDTH / N / 2; apart > 0; apart /= 2) x[0] += simd_shuffle_xor(x[0], ushort(apart));
    which = lane * N % SIMD_WIDTH == 0 ? lane * N / SIMD_WIDTH : N;
    if (SG == 1) return x[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (which < N) partial[rank / SIMD_WIDTH * N + which] = x[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    which = rank < N ? rank : N;
    float total = 0;
    if (rank < N)
      for (int of = 0; of < SG; ++of) total += partial[of * N + rank];
    return total;
  }
};

template <int SG>
inline Team<SG> team_of(uint lane, uint simdgroup, threadgroup float* partial) {
  Team<SG> team;
  team.rank = int(simdgroup) % SG * SIMD_WIDTH + int(lane);
  team.partial = partial;
  return team;
}

// A thread's packs of a row in memory. Where R > 0 on a GPU they are all asked for at once, so that the thread waits for memory once and
// not R times, and held as they came, two 16-bit elements a register; elsewhere each is loaded when it is used.
template <typename T, int V, int R>
struct Fetched {
  device const T* row;
  bool aligned;  // to a pack; else its elements are loaded one by one
#ifndef KEPT_IN_SCRATCH
  enum { held = R > 0 && V * sizeof(T) % 4 == 0 };
  uint words[held ? R * V * int(sizeof(T)) / 4 : 1];
#endif
  inline Floats<V> get(int c, int i) const {  // pack number c of the thread, which is pack i of the row
#ifndef KEPT_IN_SCRATCH
    if (held) {
      Floats<V> f;
      UNROLL for (int k = 0; k < V; ++k) f.v[k] = element(row, words[(c * V + k) * int(sizeof(T)) / 4], k);
      return f;
    }
#endif
    return V == 1 || aligned ? load_pack<V>(row, i) : load_elements<V>(row, i);
  }
};
template <int V, int R>
struct Fetched<ones, V, R> {
  device const ones* row;
  inline Floats<V> get(int, int i) const { return load_pack<V>(row, i); }
};

template <int V, int R, typename TEAM, typename T>
inline Fetched<T, V, R> fetch(device const T* row, TEAM team, int mine, bool aligned = true) {
  Fetched<T, V, R> f;
  f.row = row;
  f.aligned = aligned;
#ifndef KEPT_IN_SCRATCH
  const int n = V * int(sizeof(T)) / 4;
  if (f.held && aligned) FOR_MINE(c, R, mine) {
    const Pack<uint, (n > 0 ? n : 1)> p = reinterpret_cast<device const Pack<uint, (n > 0 ? n : 1)>*>(row)[team.at(c)];
    UNROLL for (int k = 0; k < n; ++k) f.words[c * n + k] = p.v[k];
  }
  if (f.held && !aligned) FOR_MINE(c, R, mine) {
    UNROLL for (int k = 0; k < n; ++k) f.words[c * n + k] = word_of(row, team.at(c) * n + k);
  }
#endif
  return f;
}
template <int V, int R, typename TEAM>
inline Fetched<ones, V, R> fetch(device const ones* row, TEAM, int) {
  Fetched<ones, V, R> f;
  f.row = row;
  return f;
}

// What a thread keeps of a row between two sweeps: R packs in registers; on the host the row, in its scratch memory.
// R = 0: nothing, the row is read again. Kept rows of one kernel have slots 0, 1, ...
#ifdef KEPT_IN_SCRATCH
template <int V, int R>
struct Kept {
  float* v;
  inline void put(int c, Floats<V> f) const {
    if (R > 0) UNROLL for (int k = 0; k < V; ++k) v[c * V + k] = f.v[k];
  }
  inline Floats<V> get(int c) const {
    Floats<V> f;
    UNROLL for (int k = 0; k < V; ++k) f.v[k] = v[c * V + k];
    return f;
  }
};
#else
template <int V, int R>
struct Kept {
  float v[R > 0 ? R * V : 1];
  inline void put(int c, Floats<V> f) {
    if (R > 0) UNROLL for (int k = 0; k < V; ++k) v[c * V + k] = f.v[k];
  }
  inline Floats<V> get(int c) const {
    Floats<V> f;
    UNROLL for (int k = 0; k < V; ++k) f.v[k] = v[c * V + k];
    return f;
  }
};
#endif

template <int V, int R>
inline Kept<V, R> keep(threadgroup float* scratch, int slot, uint width) {
  Kept<V, R> kept;
#ifdef KEPT_IN_SCRATCH
  kept.v = scratch + long(slot) * width;
#endif
  return kept;
}
