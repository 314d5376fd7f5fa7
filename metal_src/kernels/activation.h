// The gate's activations.
#pragma once
#include "dtypes.h"

#ifndef HARDWARE_EXP  // else compat/ has these two, which are accurate enough and faster
// exp(x) within 1.2 units in the last place where the result lies between 2^-126.5 and 2^127.5; below that 0, above it inf; nan of nan.
// x = n log 2 + r: adding 1.5 * 2^23 rounds to n and leaves it in the last bits. n's product with the first part of log 2 is exact.
inline float exponential(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -88.0f ? -88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float e = 0.0013814539f;  // minimax of the relative error, 3e-9, over half of log 2 either way
  e = e * r + 0.0083687454f;
  e = e * r + 0.041668389f;
  e = e * r + 0.16666521f;
  e = e * r + 0.49999994f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  return e * as_type<float>((as_type<uint>(shifted) + 127u) << 23);
}
inline float quotient(float a, float b) { return a / b; }
#endif

// silu: x / (1 + exp(-x)), which is nan at -inf and 0 at what is finite and far below 0; else sigmoid: 1 / (1 + exp(-x)).
template <int V>
inline Floats<V> activation(Floats<V> x, bool silu) {
  UNROLL for (int k = 0; k < V; ++k) x.v[k] = quotient(silu ? x.v[k] : 1.0f, 1.0f + exponential(-x.v[k]));
  return x;
}

// The activation and its derivative, from the sigmoid of x.
template <int V>
inline Floats<V> activated(Floats<V> x, Floats<V> sigmoid, bool silu) {
  UNROLL for (int k = 0; k < V; ++k) x.v[k] = silu ? x.v[k] * sigmoid.v[k] : sigmoid.v[k];
  return x;
}
template <int V>
inline Floats<V> activation_slope(Floats<V> x, Floats<V> sigmoid, bool silu) {
  UNROLL for (int k = 0; k < V; ++k) {
    const float s = sigmoid.v[k], rest = 1.0f - s;
    x.v[k] = silu ? s * (1.0f + x.v[k] * rest) : s * rest;
  }
  return x;
}
