// MSL words for clang as it compiles C++ for OpenCL, which knows address spaces, and plain C++14. Nothing here runs.
// A function that is not declared here is outside the subset, and so is one of other types: there MSL has no overload, or several, or answers
// in another type.
#pragma once

#ifdef __OPENCL_CPP_VERSION__
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#undef kernel
#else
#define device
#define threadgroup
#define thread
#define constant const
#endif
#define kernel inline  // OpenCL's kernels cannot be templates
#define SCRATCH scratch

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;

// Storage types convert, explicitly, and do nothing else.
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float f);
  template <typename F>
  explicit bfloat(F f) = delete;
  explicit operator float() const;
};
struct Half {
  ushort bits;
  Half() = default;
  explicit Half(float f);
  template <typename F>
  explicit Half(F f) = delete;
  explicit operator float() const;
};
#define half Half  // half is a keyword here, of a type with arithmetic

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

float simd_sum(float x);
float simd_shuffle(float x, ushort lane);
float simd_shuffle_xor(float x, ushort mask);
int simd_min(int x);
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

template <typename X>
float simd_sum(X) = delete;
template <typename X>
float simd_shuffle(X, ushort) = delete;
template <typename X>
float simd_shuffle_xor(X, ushort) = delete;
template <typename X>
int simd_min(X) = delete;
template <typename A, typename B, typename C>
float fma(A, B, C) = delete;
template <typename X>
float rint(X) = delete;
template <typename X>
float rsqrt(X) = delete;
template <typename A, typename B>
float max(A, B) = delete;
template <typename A, typename B>
float min(A, B) = delete;
template <typename A, typename B>
uint mulhi(A, B) = delete;

template <typename T>
struct Scalar {
  enum { bits = 0 };
};
#define SCALAR(T)                       \
  template <>                           \
  struct Scalar<T> {                    \
    enum { bits = 8 * int(sizeof(T)) }; \
  };
SCALAR(bfloat) SCALAR(half) SCALAR(ushort) SCALAR(short) SCALAR(uint) SCALAR(int) SCALAR(float) SCALAR(ulong) SCALAR(long)
#undef SCALAR
template <bool>
struct Where;
template <>
struct Where<true> {
  typedef int type;
};
// Of scalars, and it keeps the size.
template <typename To, typename From,
          typename Where<int(Scalar<To>::bits) != 0 && int(Scalar<To>::bits) == int(Scalar<From>::bits)>::type = 0>
To as_type(From from) {
  return __builtin_bit_cast(To, from);
}
}  // namespace metal
