// What a launch tells a kernel beside its buffers: plain structs of 4-byte members, read by the handlers and by every kernel target.
#pragma once

struct NormParams {
  uint rows;
  uint width;
  float epsilon;
  float scale_offset;
};

struct GatedGroupNormParams {
  uint rows;
  uint groups;      // of a row
  uint width;       // of a group
  uint blocks;      // the rows are cut into this many, one team for each group of each; forward: blocks of one row
  uint gate_width;  // of a row of the gate, which has the columns gate_start ... gate_start + groups * width
  uint gate_start;
  uint gate_aligned;  // every group of the gate starts at a multiple of a pack's alignment
  uint silu;          // the gate's activation: 1 silu, 0 sigmoid
  float epsilon;
};

struct NormDerivativeParams {
  uint rows;
  uint width;
  uint teams;  // cotangent: the rows are cut into this many blocks, one team each
  float epsilon;
};
