// MSL words for `clang -x cl -cl-std=clc++2021`, a compiler that knows address spaces. Nothing here runs.
// A function that is not declared here is outside the subset.
#pragma once

#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#undef kernel
#define kernel  // OpenCL's kernels cannot be templates
#define SCRATCH scratch

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;

// Storage types convert, explicitly, and do nothing else.
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float f);
  explicit operator float() const;
};
struct Half {
  ushort bits;
  Half() = default;
  explicit Half(float f);
  explicit operator float() const;
};
#define half Half  // half is a keyword here, of a type with arithmetic

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
float simd_sum(float x);
float simd_shuffle_xor(float x, ushort mask);
int simd_min(int x);
void simdgroup_barrier(mem_flags);
float fma(float a, float b, float c);
float rint(float x);
float rsqrt(float x);
float max(float a, float b);
float min(float a, float b);
uint max(uint a, uint b);
uint min(uint a, uint b);
int max(int a, int b);
int min(int a, int b);
uint mulhi(uint a, uint b);
template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}
}  // namespace metal
