// product[row, n] = the sum over k of x[row, k] * weight, for few rows: what takes time is reading the weight, once.
// A row is summed in the same order whatever the number of rows.
#include "norm.h"

// Row n of a weight [outputs, width]; after the last one comes the last one again.
template <int V, int R, typename T, typename TEAM>
inline Fetched<T, V, R> fetch_weight(device const T* weight, uint n, constant MatvecParams& p, TEAM team, int mine) {
  return fetch<V, R>(weight + long(n < p.outputs ? n : p.outputs - 1) * p.width, team, mine);
}

// A team in which a thread that has fewer packs than others reads the row's last one, too: no load waits for a branch, and the memory reads
// nothing twice.
template <int SG>
struct Clamped {
  Team<SG> team;
  int last;
  inline int at(int c) const { return team.at(c) < last ? team.at(c) : last; }
};

// This thread's part of the sum over a row: that of the packs which are `mine`.
template <int V, int R, typename T, typename TEAM>
inline float part(Fetched<T, V, R> x, Fetched<T, V, R> w, TEAM team, int mine) {
  float sum = 0;
  const int count = R > 0 ? R : mine;
  FOR_SUM(c, R, count, sum) {
    const float of_pack = dot(x.get(c, team.at(c)), w.get(c, team.at(c)));
    sum += R == 0 || c < mine ? of_pack : 0.0f;
  }
  return sum;
}

// The parts of outputs n and after in sums, of a row of x and, if PAIR, of the next one too, which then share what is loaded of the weight.
// x and a row of the weight are in registers, and the next row is on its way. PAIR changes no order of summation.
template <bool PAIR, int V, int R, typename T, int SG>
inline void multiply(device const T* x, device const T* weight, constant MatvecParams& p, uint n, Team<SG> team, int mine,
                     thread float* sums, thread float* next_sums) {
  const Clamped<SG> clamped = {team, int(p.width) / V - 1};
  Fetched<T, V, R> w = fetch_weight<V, R>(weight, n, p, clamped, R);
  const Fetched<T, V, R> a = fetch<V, R>(x, clamped, R), b = fetch<V, R>(PAIR ? x + p.width : x, clamped, R);
  UNROLL for (uint i = 0; i < outputs_a_team; ++i) {
    Fetched<T, V, R> next = w;
    if (i + 1 < outputs_a_team) next = fetch_weight<V, R>(weight, n + i + 1, p, clamped, R);
    sums[i] = part(a, w, clamped, mine);
    if (PAIR) next_sums[i] = part(b, w, clamped, mine);
    w = next;
  }
}

// The same where a row is too wide for that, and on the host: the rows of the weight side by side, so that as many loads are under way.
template <bool PAIR, int V, typename T, int SG>
inline void multiply_in_memory(device const T* x, device const T* weight, constant MatvecParams& p, uint n, Team<SG> team, int mine,
                               thread float* sums, thread float* next_sums) {
  const Fetched<T, V, 0> w0 = fetch_weight<V, 0>(weight, n, p, team, mine), w1 = fetch_weight<V, 0>(weight, n + 1, p, team, mine),
                         w2 = fetch_weight<V, 0>(weight, n + 2, p, team, mine), w3 = fetch_weight<V, 0>(weight, n + 3, p, team, mine);
  float a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
  FOR_SUM(c, 0, mine, a0, a1, a2, a3, b0, b1, b2, b3) {
    const int i = team.at(c);
    const Floats<V> f0 = w0.get(c, i), f1 = w1.get(c, i), f2 = w2.get(c, i), f3 = w3.get(c, i);
    const Floats<V> f = load_pack<V>(x, i);
    Floats<V> g = f;
    if (PAIR) g = load_pack<V>(x + p.width, i);
    UNROLL for (int k = 0; k < V; ++k) {
      a0 += f.v[k] * f0.v[k];
      a1 += f.v[k] * f1.v[k];
      a2 += f.v[k] * f2.v[k];
      a3 += f.v[k] * f3.v[k];
      if (PAIR) {
        b0 += g.v[k] * f0.v[k];
        b1 += g.v[k] * f1.v[k];
        b2 += g.v[k] * f2.v[k];
        b3 += g.v[k] * f3.v[k];
      }
    }
  }
  sums[0] = a0, sums[1] = a1, sums[2] = a2, sums[3] = a3;
  next_sums[0] = b0, next_sums[1] = b1, next_sums[2] = b2, next_sums[3] = b3;
}

template <typename T, int SG>
inline void store_sums(device T* out, uint left, Team<SG> team, thread float* sums) {
  const int count = left < outputs_a_team ? int(left) : outputs_a_team;
  if (team.size() == 1) {
    for (int i = 0; i < count; ++i) out[i] = T(sums[i]);
    return;
  }
  int which;
  const float sum = team.template sums<outputs_a_team>(sums, which);
  if (which < count) out[which] = T(sum);
}

template <bool PAIR, int V, int R, typename T, int SG>
inline void make_outputs(device const T* x, device const T* weight, device T* product, constant MatvecParams& p, uint n, Team<SG> team, int mine) {
  float sums[outputs_a_team], next_sums[outputs_a_team];
  if (R > 0) {
    multiply<PAIR, V, R>(x, weight, p, n, team, mine, sums, next_sums);
  } else if (team.size() == 1 && sizeof(T) == 2 && !PAIR) {
    // of the ways that a CPU could take, the one whose loads its prefetcher foresees
    for (uint i = 0; i < outputs_a_team; ++i)
      sums[i] = part(fetch<V, 0>(x, team, mine), fetch_weight<V, 0>(weight, n + i, p, team, mine), team, mine);
  } else {
    multiply_in_memory<PAIR, V>(x, weight, p, n, team, mine, sums, next_sums);
  }
  store_sums(product + n, p.outputs - n, team, sums);
  if (PAIR) store_sums(product + p.outputs + n, p.outputs - n, team, next_sums);
}

// weight [outputs, width]: a team has outputs_a_team rows of it.
// 0 x [rows, width] · 1 weight · 2 product [rows, outputs] T · 3 params
// grid: ceil(teams / TEAMS) threadgroups of TEAMS * SG * 32 threads, teams = ceil(outputs / outputs_a_team); TEAMS == 1 when SG > 1.
// threadgroup memory: outputs_a_team * SG floats. bytes: for two rows of x 1 read of weight, all but the first from the cache, and of x a team.
template <typename T, int V, int R, int SG, int TEAMS>
kernel void matvec(
    device const T* x [[buffer(0)]],
    device const T* weight [[buffer(1)]],
    device T* product [[buffer(2)]],
    constant MatvecParams& p [[buffer(3)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint n = (group * TEAMS + simdgroup / SG) * outputs_a_team;
  if (n >= p.outputs) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  const int mine = team.share(int(p.width) / V);
  uint row = 0;
  for (; row + 2 <= p.rows; row += 2, x += 2 * p.width, product += 2 * p.outputs)
    make_outputs<true, V, R>(x, weight, product, p, n, team, mine);
  if (row < p.rows) make_outputs<false, V, R>(x, weight, product, p, n, team, mine);
}

// sums += x[k] * weight[k], for `count` rows k of weight: every n-th, so that as many loads are under way.
template <int count, typename T, int V>
inline void add_rows(thread Kept<V, 1>& sums, device const T* x, device const T* weight, uint k, uint step, uint outputs, int pack, int mine) {
  float a[count];
  UNROLL for (uint u = 0; u < count; ++u) a[u] = float(x[k + u * step]);
  FOR_MINE(c, 1, mine) {
    Floats<V> s = sums.get(c);
    UNROLL for (uint u = 0; u < count; ++u) {
      const Floats<V> w = load_pack<V>(weight + long(k + u * step) * outputs, pack + c);
      UNROLL for (int i = 0; i < V; ++i) s.v[i] += a[u] * w.v[i];
    }
    sums.put(c, s);
  }
}

// weight [width, outputs]: a team has p.strip columns of it. On a GPU a thread has one pack of these columns, and every n-th of their
// rows. On the host it is alone: it takes some rows of weight for every row of x, and keeps the sums in its scratch memory.
// Buffers as above. grid: ceil(teams / TEAMS) threadgroups of TEAMS * SG * 32 threads, teams = ceil(outputs / strip); TEAMS == 1 when SG > 1.
// threadgroup memory: 2 SG floats. bytes: 1 read of weight for each row of x, all but the first from the cache; 1 read of x a team.
template <typename T, int V, int R, int SG, int TEAMS>
kernel void vecmat(
    device const T* x [[buffer(0)]],
    device const T* weight [[buffer(1)]],
    device T* product [[buffer(2)]],
    constant MatvecParams& p [[buffer(3)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint first = (group * TEAMS + simdgroup / SG) * p.strip;
  if (first >= p.outputs) return;
  const Team<SG> team = team_of<SG>(lane, simdgroup, scratch);
  const bool alone = team.size() == 1;
  const int packs = int(p.outputs - first < p.strip ? p.outputs - first : p.strip) / V;
  const int across = alone ? 1 : int(p.strip) / V, pack = team.rank % across, mine = alone ? packs : int(pack < packs);
  const uint at_once = alone ? 2 * together : p.width, step = uint(team.size() / across);
  device const T* w = weight + first;
  for (uint start = 0; start < p.width; start += at_once) {
    const uint end = p.width - start < at_once ? p.width : start + at_once;
    for (uint row = 0; row < p.rows; ++row) {
      Kept<V, 1> sums = keep<V, 1>(scratch, int(row), p.outputs);
      if (start == 0) FOR_MINE(c, 1, mine) sums.put(c, zeros<V>());
      device const T* a = x + long(row) * p.width;
      uint k = start + uint(team.rank / across);
      for (; k + (together - 1) * step < end; k += together * step) add_rows<together>(sums, a, w, k, step, p.outputs, pack, mine);
      for (; k < end; k += step) add_rows<1>(sums, a, w, k, step, p.outputs, pack, mine);
      if (end < p.width) continue;
      device T* out = product + long(row) * p.outputs + first;
      if (alone) {
        FOR_MINE(c, 1, mine) store_pack<V>(out, c, sums.get(c));
        continue;
      }
      const Floats<V> s = sums.get(0);
      for (int q = 0; q < packs; ++q) {
        UNROLL for (int i = 0; i < V; ++i) {
          const float total = team.sum(q == pack ? s.v[i] : 0.0f);
          if (team.rank == 0) out[q * V + i] = T(total);
        }
      }
    }
  }
}
