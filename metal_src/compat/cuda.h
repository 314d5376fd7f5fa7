// MSL words for CUDA, compiled by NVRTC, which has no headers. This text goes in front of the kernels' (embed.py).
#pragma once

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;

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

// The storage types: each conversion is one instruction, and rounds to nearest even.
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit __device__ inline bfloat(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ inline operator float() const { return as_type<float>(uint(bits) << 16); }
};
struct half {
  ushort bits;
  half() = default;
  explicit __device__ inline half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ inline operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

// There and back in one instruction, where two would be a slow one and a shift: the upper half of a pair of which the lower is 0.
#define ROUNDS_BFLOAT
static __device__ inline float rounded_to_bfloat(float x) {
  uint pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
  return as_type<float>(pair);
}

// x as it is now, in a register: the compiler would rather work it out once more where it is used, and keep what it was worked out from.
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

// What a kernel takes as its parameter number N, as a __global__ function takes it: buffers by address, the params by value.
template <typename F, int N>
struct Parameter;
template <typename P, typename... Rest, int N>
struct Parameter<void(P, Rest...), N> : Parameter<void(Rest...), N - 1> {};
template <typename P, typename... Rest>
struct Parameter<void(P*, Rest...), 0> {
  typedef P* type;
};
template <typename P, typename... Rest>
struct Parameter<void(const P&, Rest...), 0> {
  typedef P type;
};

// A simdgroup is a warp, and it is one for all of a team: said so that the compiler knows.
template <int SG>
static __device__ inline uint simdgroup_of_thread() {
  const uint simdgroup = threadIdx.x / SIMD_WIDTH;
  return SG == 1 ? __shfl_sync(0xffffffffu, simdgroup, 0) : simdgroup;
}

#define inline __device__ inline
#define kernel __device__ __forceinline__
#define device
#define constant const
#define threadgroup
#define thread
