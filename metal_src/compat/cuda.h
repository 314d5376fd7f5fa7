// MSL words for nvcc. Include every CUDA and system header before this, for it defines common words as macros.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
typedef __nv_bfloat16 bfloat;

#define SIMD_WIDTH 32
#define UNROLL _Pragma("unroll")
#define CUDA_PRAGMA(x) _Pragma(#x)
// The loops over a thread's packs of a row. R > 0: a fixed count with a guard, so that what a thread keeps stays in registers.
#define FOR_MINE(c, R, n) CUDA_PRAGMA(unroll (R > 0 ? R : 2)) for (int c = 0; c < (R > 0 ? R : n); ++c) if (c < n)
#define FOR_SUM(c, R, n, ...) FOR_MINE(c, R, n)

// CUDA spells these as attributes that begin with the words `device` and `constant`, which become macros below.
#undef __device__
#define __device__ __attribute__((__device__))
#undef __constant__
#define __constant__ __attribute__((__constant__))

template <typename To, typename From>
static __device__ inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// One instruction, where a conversion there and back takes a slow one and a shift: the upper half of a pair of which the lower is 0.
#define ROUNDS_BFLOAT
static __device__ inline float rounded_to_bfloat(float x) {
  uint pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
  return as_type<float>(pair);
}

// x as it is now, in a register: nvcc would rather work it out once more where it is used, and keep what it was worked out from.
#define HELD_IN_REGISTER
static __device__ inline float held(float x) {
  asm("" : "+f"(x));
  return x;
}

// Only what CUDA lacks: its own fma, rint, rsqrt, min and max are global overloads, and a second set would be ambiguous.
namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
static __device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
static __device__ inline void simdgroup_barrier(mem_flags) { __syncwarp(); }
static __device__ inline float simd_sum(float x) {
  for (int d = SIMD_WIDTH / 2; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}
static __device__ inline float simd_shuffle(float x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }
static __device__ inline float simd_shuffle_xor(float x, ushort mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
static __device__ inline int simd_min(int x) { return __reduce_min_sync(0xffffffffu, x); }
static __device__ inline uint mulhi(uint a, uint b) { return __umulhi(a, b); }
}  // namespace metal

// The hardware's exp and reciprocal, each within a few units in the last place, subnormal results flushed. They are asked for by name:
// __expf and __fdividef do not flush without --use_fast_math, and spend instructions on what lies below the smallest normal number.
#define HARDWARE_EXP
static __device__ inline float exponential(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.44269504f));
  return e;
}
static __device__ inline float quotient(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
}

#define inline __device__ inline
#define kernel __device__ __forceinline__
#define device
#define constant const
#define threadgroup
#define thread
