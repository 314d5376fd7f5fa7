// What the kernels need beside MSL itself. This text goes in front of theirs (embed.py).
#include <metal_stdlib>
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#endif
#define SIMD_WIDTH 32
#ifndef SCRATCH
#define SCRATCH threadgroup(0)
#endif
#define UNROLL _Pragma("unroll")
// The loops over a thread's packs of a row. R > 0: a fixed count and a guard, so that what a thread keeps stays in registers.
#define FOR_MINE(c, R, n) UNROLL for (int c = 0; c < (R > 0 ? R : n); ++c) if (c < n)
#define FOR_SUM(c, R, n, ...) FOR_MINE(c, R, n)
