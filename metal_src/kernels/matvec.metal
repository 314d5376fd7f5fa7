// product[row, n] = the sum over k of x[row, k] * weight, for few rows: what takes time is reading the weight, once.
// A row is summed in the same order whatever the number of rows.
#include "norm.h"

// outputs_a_team rows of a weight [outputs, width].
template <typename T, int V, int R>
struct WeightRows {
  Fetched<T, V, R> w0, w1, w2, w3;
};

// Row n; after the last one comes the last one again.
template <int V, int R, typename T, int SG>
inline Fetched<T, V, R> fetch_weight(device const T* weight, uint n, uint width, uint outputs, Team<SG> team, int mine) {
  return fetch<V, R>(weight + long(n < outputs ? n : outputs - 1) * width, team, mine);
}

template <typename T, int SG>
inline void store_outputs(device T* out, uint left, Team<SG> team, Floats<2> low, Floats<2> high) {
  if (team.rank != 0) return;
  out[0] = T(low.v[0]);
  if (left > 1) out[1] = T(low.v[1]);
  if (left > 2) out[2] = T(high.v[0]);
  if (left > 3) out[3] = T(high.v[1]);
}

// Outputs n and after of a row of x, or of two, which then share what is loaded of the weight. PAIR changes no order of summation.
template <bool PAIR, typename T, int V, int R, int SG>
inline void multiply(device const T* x, WeightRows<T, V, R> w, device T* product, constant MatvecParams& p, uint row, uint n,
                     Team<SG> team, int mine) {
  device const T* a = x + long(row) * p.width;
  device const T* b = PAIR ? a + p.width : a;
  float a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
  FOR_SUM(c, R, mine, a0, a1, a2, a3, b0, b1, b2, b3) {
    const int i = team.at(c);
    const Floats<V> w0 = w.w0.get(c, i), w1 = w.w1.get(c, i), w2 = w.w2.get(c, i), w3 = w.w3.get(c, i);
    const Floats<V> f = load_pack<V>(a, i);
    Floats<V> g = f;
    if (PAIR) g = load_pack<V>(b, i);
    UNROLL for (int k = 0; k < V; ++k) {
      a0 += f.v[k] * w0.v[k];
      a1 += f.v[k] * w1.v[k];
      a2 += f.v[k] * w2.v[k];
      a3 += f.v[k] * w3.v[k];
      if (PAIR) {
        b0 += g.v[k] * w0.v[k];
        b1 += g.v[k] * w1.v[k];
        b2 += g.v[k] * w2.v[k];
        b3 += g.v[k] * w3.v[k];
      }
    }
  }
  device T* out = product + long(row) * p.outputs + n;
  store_outputs(out, p.outputs - n, team, team.sums(a0, a1), team.sums(a2, a3));
  if (PAIR) store_outputs(out + p.outputs, p.outputs - n, team, team.sums(b0, b1), team.sums(b2, b3));
}

// weight [outputs, width]: a team has outputs_a_team rows of it, and keeps them in registers if R > 0.
// 0 x [rows, width] · 1 weight · 2 product [rows, outputs] T · 3 params
// grid: ceil(teams / TEAMS) threadgroups of TEAMS * SG * 32 threads, teams = ceil(outputs / outputs_a_team); TEAMS == 1 when SG > 1.
// threadgroup memory: 2 SG floats. bytes: 1 read of weight (R = 0: one for two rows of x, all but the first from the cache), and of x a team.
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
  WeightRows<T, V, R> w;
  w.w0 = fetch_weight<V, R>(weight, n, p.width, p.outputs, team, mine);
  w.w1 = fetch_weight<V, R>(weight, n + 1, p.width, p.outputs, team, mine);
  w.w2 = fetch_weight<V, R>(weight, n + 2, p.width, p.outputs, team, mine);
  w.w3 = fetch_weight<V, R>(weight, n + 3, p.width, p.outputs, team, mine);
  uint row = 0;
  for (; row + 2 <= p.rows; row += 2) multiply<true>(x, w, product, p, row, n, team, mine);
  if (row < p.rows) multiply<false>(x, w, product, p, row, n, team, mine);
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
