// What MSL and C++ compilers spell alike but C++ lacks: the scalar types, and the functions of one thread.
// In an unnamed namespace: the kernels are compiled once per instruction set, and the linker must not merge the copies.
#pragma once
#include <cstdint>
#include <type_traits>

namespace {

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Both storage types convert in integers: what vectorizes on every level, rounds to nearest even, keeps nan and subnormals.
// Magnitudes are compared as signed, which AVX2 can do, and selected by mask: GCC keeps a branch for ?: here.
inline int32_t choose(bool first, int32_t a, int32_t b) {
  const int32_t mask = -int32_t(first);
  return (a & mask) | (b & ~mask);
}

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit inline bfloat(float f) {
    const int32_t u = as_type<int32_t>(f);
    const int32_t even = int32_t(uint32_t(u) + 0x7fffu + ((uint32_t(u) >> 16) & 1u));
    bits = uint16_t(uint32_t(choose((u & 0x7fffffff) > 0x7f800000, u | 0x400000, even)) >> 16);
  }
  inline operator float() const { return as_type<float>(uint32_t(bits) << 16); }
};

struct half {
  uint16_t bits;
  half() = default;
  explicit inline half(float f) {
    const int32_t u = as_type<int32_t>(f), a = u & 0x7fffffff;
    const int32_t normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;            // rebias and round
    const int32_t tiny = as_type<int32_t>(as_type<float>(a) + 0.5f) - 0x3f000000;       // the addition rounds at 2^-24
    int32_t h = choose(a < 0x38800000, tiny, normal);
    h = choose(a >= 0x477ff000, 0x7c00, h);
    h |= -int32_t(a > 0x7f800000) & 0x7e00;
    bits = uint16_t(h | int32_t(uint32_t(u) >> 16 & 0x8000u));
  }
  // No step may be a subnormal float, though the value is: XLA's threads take those for zero.
  inline operator float() const {
    const int32_t a = bits & 0x7fff;
    const int32_t tiny = as_type<int32_t>(float(a) * as_type<float>(0x33800000u));                     // times 2^-24
    const int32_t widened = choose(a < 0x400, tiny, (a << 13) + 0x38000000) | (-int32_t(a >= 0x7c00) & 0x7f800000);
    return as_type<float>(widened | int32_t(uint32_t(bits & 0x8000u) << 16));
  }
};

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline uint mulhi(uint a, uint b) { return uint(uint64_t(a) * b >> 32); }
}  // namespace metal

}  // namespace
