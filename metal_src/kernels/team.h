// A team: the threads that own one row. One simdgroup, or SG simdgroups of a threadgroup; one thread when the host compiles this.
#pragma once
#include "dtypes.h"

template <int SG>
struct Team {
  int rank;                    // this thread's place in the team
  threadgroup float* partial;  // SG floats

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
};

template <int SG>
inline Team<SG> team_of(uint lane, uint simdgroup, threadgroup float* partial) {
  Team<SG> team;
  team.rank = int(simdgroup) % SG * SIMD_WIDTH + int(lane);
  team.partial = partial;
  return team;
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
