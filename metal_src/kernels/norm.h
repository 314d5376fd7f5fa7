// Pieces that the norm kernels share.
#pragma once
#include "params.h"
#include "team.h"

template <int V>
inline Floats<V> zeros() {
  Floats<V> f;
  UNROLL for (int k = 0; k < V; ++k) f.v[k] = 0;
  return f;
}

template <int V>
inline float dot(Floats<V> a, Floats<V> b) {
  float sum = 0;
  UNROLL for (int k = 0; k < V; ++k) sum += a.v[k] * b.v[k];
  return sum;
}

template <int V>
inline Floats<V> add(Floats<V> a, Floats<V> b) {
  UNROLL for (int k = 0; k < V; ++k) a.v[k] += b.v[k];
  return a;
}

template <int V>
inline Floats<V> times(Floats<V> a, Floats<V> b) {
  UNROLL for (int k = 0; k < V; ++k) a.v[k] *= b.v[k];
  return a;
}

// s = x (+ residual) of one row.
template <typename T, bool RESIDUAL, int V, int R>
struct Point {
  Fetched<T, V, R> x, residual;
  inline Floats<V> get(int c, int i) const {
    Floats<V> s = x.get(c, i);
    if (RESIDUAL) s = add(s, residual.get(c, i));
    return s;
  }
};

template <bool RESIDUAL, int V, int R, int SG, typename T>
inline Point<T, RESIDUAL, V, R> fetch_point(device const T* x, device const T* residual, Team<SG> team, int mine) {
  Point<T, RESIDUAL, V, R> s;
  s.x = fetch<V, R>(x, team, mine);
  if (RESIDUAL) s.residual = fetch<V, R>(residual, team, mine);
  return s;
}

// s * r * (scale + offset). IN_T: both factors are rounded to T first (their product fits a float, so it is rounded once, by the store).
template <typename T, bool IN_T, int V>
inline Floats<V> scaled(Floats<V> s, float r, Floats<V> scale, float offset) {
  UNROLL for (int k = 0; k < V; ++k) {
    const float unit = s.v[k] * r, gain = scale.v[k] + offset;
    s.v[k] = IN_T ? rounded<T>(unit) * rounded<T>(gain) : unit * gain;
  }
  return s;
}
