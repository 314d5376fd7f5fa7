// How many threads share a row on a GPU: the one place that says it, for Metal and CUDA. The host needs none of this.
// It depends on the width and the element size alone: the shape decides the order of summation, and so a row's bits.
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
constexpr int most_simdgroups = 16;    // of a row
constexpr int rows_a_threadgroup = 4;  // of narrow rows

// Rows up to a size, in ascending order; few, because every kernel is compiled once for each. First the rows that are whole packs of
// load_bytes, then those that are not. Two packs a thread and as many simdgroups as that takes: what keeps an H200 within a few percent
// of a copy, forward and backward.
struct Step {
  uint64_t widest;  // row, in bytes
  int simdgroups;   // a row
  int kept;         // packs, by a thread; more than four would leave too few registers for the rest
  bool packed;
};
constexpr uint64_t any_size = UINT64_MAX;
constexpr int row_steps = 10;
constexpr Step steps[row_steps] = {{1 << 10, 1, 2, true},   {2 << 10, 2, 2, true},   {4 << 10, 4, 2, true},   {8 << 10, 8, 2, true},
                                    {12 << 10, 12, 2, true}, {16 << 10, 16, 2, true}, {32 << 10, 16, 4, true}, {any_size, 16, 0, true},
                                    {1 << 9, 1, 0, false},   {any_size, 8, 0, false}};

// Heads are narrow, and several of a token are walked at once. Those that V * R elements a thread and a power of two of threads fill: then
// the two channels of most pairs are one thread's. 4-byte elements always have a whole simdgroup, which sums them as 256 slots and a tree
// would. The last step takes whatever is left.
constexpr int head_steps = 5;
constexpr Shape head_shapes[head_steps][2] = {  // of 2-byte and of 4-byte elements
    {{8, 2, 1, 2}, {1, 2, 1, 2}}, {{4, 6, 1, 2}, {1, 4, 1, 2}}, {{2, 10, 1, 2}, {1, 8, 1, 2}}, {{2, 9, 1, 2}, {1, 16, 1, 2}}, {{1, 0, 1, 2}, {1, 0, 1, 2}}};
constexpr int step_count = row_steps + head_steps;

// `aligned`: rows of whole packs start at multiples of a pack.
constexpr int step_of(uint32_t width, int element_bytes, bool aligned = true) {
  const uint64_t row_bytes = uint64_t(width) * element_bytes;
  const bool packed = aligned && row_bytes % load_bytes == 0;
  int step = 0;
  while (steps[step].widest < row_bytes || steps[step].packed != packed) ++step;
  return step;
}

constexpr Shape shape_at(int step, int element_bytes) {
  if (step >= row_steps) return head_shapes[step - row_steps][element_bytes == 4];
  const Step s = steps[step];
  return {s.packed ? load_bytes / element_bytes : 1, s.kept, s.simdgroups, s.simdgroups == 1 ? rows_a_threadgroup : 1};
}

constexpr bool every_kept_row_fits() {
  for (const Step& s : steps)
    if (s.kept && uint64_t(s.kept * s.simdgroups * simd_width * load_bytes) < s.widest) return false;
  return true;
}
static_assert(every_kept_row_fits(), "a step whose threads keep too little for its widest row");

// `most`: simdgroups that a threadgroup may have, where the driver allows fewer.
constexpr Shape shape_of(uint32_t width, int element_bytes, bool aligned = true, int most = most_simdgroups) {
  const Shape shape = shape_at(step_of(width, element_bytes, aligned), element_bytes);
  return shape.sg * shape.teams <= most ? shape : Shape{shape.v, 0, most, 1};
}

// Bytes of threadgroup memory: up to four sums of each simdgroup.
constexpr int scratch_of(Shape shape) { return shape.sg > 1 ? 4 * shape.sg * int(sizeof(float)) : 0; }

// Threads that must share a head for a shape to fill it; 0 if none can.
constexpr int lanes_that_fill(uint32_t width, int element_bytes, Shape shape) {
  const uint32_t each = shape.v * shape.r, lanes = each ? width / each : 0;
  const bool some = lanes && width % each == 0 && lanes <= simd_width && (lanes & (lanes - 1)) == 0;
  return some && (element_bytes == 2 || lanes == simd_width) ? int(lanes) : 0;
}

constexpr int head_step_of(uint32_t width, int element_bytes) {
  int step = row_steps;
  while (step < step_count - 1 && !lanes_that_fill(width, element_bytes, shape_at(step, element_bytes))) ++step;
  return step;
}

constexpr Shape shape_of_head(uint32_t width, int element_bytes, int most = most_simdgroups) {
  Shape shape = shape_at(head_step_of(width, element_bytes), element_bytes);
  if (shape.teams > most) shape.teams = most;
  return shape;
}

struct HeadShape {
  int lanes;  // that share a head
  int v;
  bool halves;  // the two channels of a pair that are half a head apart are of one thread
};

// threads: of a team. One has every head to itself.
constexpr HeadShape head_shape(uint32_t width, int element_bytes, int threads) {
  if (threads == 1) return {1, 1, false};
  const Shape shape = shape_of_head(width, element_bytes);
  const int lanes = lanes_that_fill(width, element_bytes, shape);
  return {lanes ? lanes : simd_width, shape.v, lanes > 0 && shape.r % 2 == 0};
}
