// What a launch tells a kernel beside its buffers: plain structs of 4-byte members, read by the handlers and by every kernel target.
#pragma once

struct NormParams {
  uint rows;
  uint width;
  float epsilon;
  float scale_offset;
};

struct NormDerivativeParams {
  uint rows;
  uint width;
  uint teams;  // cotangent: the rows are cut into this many blocks, one team each
  float epsilon;
};
