// Storage types and vector loads. All arithmetic is float; T is only read and written.
#pragma once
#include <metal_stdlib>
using namespace metal;

// Stands for the type of a scale that is not there: it reads as 1, and no memory is touched.
struct ones {};

// V elements of T moved as one load or store. The address must be a multiple of its alignment: the launcher picks V so.
template <typename T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T v[V];
};

// V floats in registers.
template <int V>
struct Floats {
  float v[V];
};

template <int V, typename T>
inline Floats<V> load_pack(device const T* row, int i) {
  const Pack<T, V> p = reinterpret_cast<device const Pack<T, V>*>(row)[i];
  Floats<V> f;
  UNROLL for (int k = 0; k < V; ++k) f.v[k] = float(p.v[k]);
  return f;
}

// The same where an address is a multiple of the element's size, and may be of no more.
template <int V, typename T>
inline Floats<V> load_elements(device const T* row, int i) {
  Floats<V> f;
  UNROLL for (int k = 0; k < V; ++k) f.v[k] = float(row[i * V + k]);
  return f;
}

template <int V>
inline Floats<V> load_pack(device const ones*, int) {
  Floats<V> f;
  UNROLL for (int k = 0; k < V; ++k) f.v[k] = 1.0f;
  return f;
}

template <int V, typename T>
inline void store_pack(device T* row, int i, Floats<V> f) {
  Pack<T, V> p;
  UNROLL for (int k = 0; k < V; ++k) p.v[k] = T(f.v[k]);
  reinterpret_cast<device Pack<T, V>*>(row)[i] = p;
}

// Bit for bit.
template <int V, typename T>
inline void copy_pack(device T* to, device const T* from, int i) {
  const Pack<T, V> p = reinterpret_cast<device const Pack<T, V>*>(from)[i];
  Pack<T, V> copy;
  UNROLL for (int k = 0; k < V; ++k) copy.v[k] = p.v[k];  // one by one: a loop over copies of the whole would not be vectorized
  reinterpret_cast<device Pack<T, V>*>(to)[i] = copy;
}

// Element k of a row of T, from the 4-byte word that holds it.
template <typename T>
inline float element(device const T*, uint word, int k) {
  return float(as_type<T>(ushort(word >> (k % 2 * 16))));
}
inline float element(device const bfloat*, uint word, int k) {  // the upper half of a float
  return as_type<float>(k % 2 ? word & 0xffff0000u : word << 16);
}
inline float element(device const float*, uint word, int) { return as_type<float>(word); }

// Word i of a row of T, which need not start at a multiple of 4 bytes.
template <typename T>
inline uint word_of(device const T* row, int i) {
  device const ushort* halves = reinterpret_cast<device const ushort*>(row);
  return uint(halves[2 * i]) | uint(halves[2 * i + 1]) << 16;
}
inline uint word_of(device const float* row, int i) { return as_type<uint>(row[i]); }

// One round to nearest even to T, back in float.
template <typename T>
inline float rounded(float x) {
  return float(T(x));
}
#ifdef ROUNDS_BFLOAT
template <>
inline float rounded<bfloat>(float x) {
  return rounded_to_bfloat(x);
}
#endif

#ifndef HELD_IN_REGISTER
inline float held(float x) { return x; }
#endif

// Of a function that is compiled once for all places that call it, where that saves much and costs little: on a CPU.
#ifndef OUT_OF_LINE
#define OUT_OF_LINE inline
#endif
