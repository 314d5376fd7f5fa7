// How many threads share a row on a GPU: the one place that says it, for Metal and CUDA. The host needs none of this.
// It must depend on the width and the element size alone: the shape decides the order of summation, and so a row's bits.
#pragma once
#include <cstdint>

// The last four template arguments of every kernel.
struct Shape {
  int v;      // elements a load
  int r;      // packs that a thread keeps; 0: the row is read again
  int sg;     // simdgroups a row
  int teams;  // rows a threadgroup; 1 when sg > 1
};

constexpr int simd_width = 32;
constexpr int load_bytes = 16;         // the widest load; XLA's buffers start at multiples of 64
constexpr int most_packs_kept = 4;     // a thread's; more would leave too few registers for the rest
constexpr int most_simdgroups = 16;    // of a row
constexpr int rows_a_threadgroup = 4;  // of narrow rows

inline int power_of_two_from(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Few packs a thread and many simdgroups: what kept an H200 at 97 to 100 % of a copy from width 1,024 to 16,384 (1x4, 1x8, 2x8, 2x16 and
// 4x16 packs a thread x simdgroups a row, of eight bfloat16 each).
// `most`: simdgroups that a threadgroup may have, where the driver allows fewer.
inline Shape shape_of(uint32_t width, int element_bytes, int most = most_simdgroups) {
  Shape shape;
  shape.v = load_bytes / element_bytes;
  while (width % shape.v) shape.v /= 2;  // every row starts at a multiple of the pack, and holds whole packs
  const int packs = int(width / shape.v);
  const int simdgroups = (packs + simd_width - 1) / simd_width;
  shape.sg = 1;
  while (2 * shape.sg <= most && shape.sg < simdgroups / (shape.sg < 8 ? 1 : 2)) shape.sg *= 2;
  const int threads = shape.sg * simd_width;
  const int packs_a_thread = power_of_two_from((packs + threads - 1) / threads);
  shape.r = packs_a_thread <= most_packs_kept ? packs_a_thread : 0;
  shape.teams = shape.sg > 1 ? 1 : most < rows_a_threadgroup ? most : rows_a_threadgroup;
  return shape;
}
