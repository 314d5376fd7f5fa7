// MSL words for a C++ compiler: a team is one thread. Include system headers before this, for it defines common words as macros.
#pragma once
#include <cstdint>
#include <type_traits>

#define inline inline __attribute__((always_inline))  // a call left in a loop would keep it from being vectorized
#define OUT_OF_LINE __attribute__((noinline))
#include "compat/cpp.h"

#define SIMD_WIDTH 1
#define KEPT_IN_SCRATCH
#define UNROLL _Pragma("GCC unroll 64")
#define HOST_PRAGMA(x) _Pragma(#x)
// The loops over a thread's packs of a row: vectorized, and R does not bound them.
#define FOR_MINE(c, R, n) HOST_PRAGMA(omp simd) for (int c = 0; c < n; ++c)
#define FOR_SUM(c, R, n, ...) HOST_PRAGMA(omp simd reduction(+ : __VA_ARGS__)) for (int c = 0; c < n; ++c)

namespace {
namespace metal {
inline void threadgroup_barrier(mem_flags) {}
inline void simdgroup_barrier(mem_flags) {}
inline float simd_sum(float x) { return x; }
inline float simd_shuffle_xor(float x, ushort) { return x; }
inline int simd_min(int x) { return x; }
// Where there is no such instruction a call for each element would be slower than the rest; nothing here needs it to be fused.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float fma(float a, float b, float c) { return a * b + c; }
#endif
}  // namespace metal
}  // namespace

#define kernel inline
#define device
#define constant const
#define threadgroup
#define thread
