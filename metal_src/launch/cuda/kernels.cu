// One kernel file for one STEP of launch/shape.h and one element size, BYTES. VARIANTS names the file's variants.
#include "compat/call.h"
#include "launch/cuda/entry.h"
#include "launch/shape.h"

#include "compat/cuda.h"

using cuda::Entry;

constexpr Shape shape = shape_at(STEP, BYTES);
constexpr int threads = shape.sg * shape.teams * SIMD_WIDTH;
// Of a multiprocessor, at least: 128 registers a thread at most, or 64 of a kernel that keeps little and should have much on its way.
constexpr int resident_threads = 512, many_resident_threads = shape.r > 2 ? 512 : 1024;

// Turns a kernel into a __global__ function: buffers by position, the params by value; a simdgroup is a warp, a threadgroup a block.
template <typename T>
struct Passed {
  typedef T type;
};
template <typename T>
struct Passed<const T&> {
  typedef T type;
};

template <int resident, auto K, typename... B>
__global__ void __launch_bounds__(threads, resident / threads) entry(B... buffers) {
  extern __shared__ float scratch[];
  uint simdgroup = threadIdx.x / SIMD_WIDTH;
  if (shape.sg == 1) simdgroup = __shfl_sync(0xffffffffu, simdgroup, 0);  // so nvcc knows that it is one for all of a team
  K(buffers..., scratch, blockIdx.x, threadIdx.x % SIMD_WIDTH, simdgroup);
}

template <int resident, auto K, typename... P, std::size_t... I>
Entry entry_of(void (*)(P...), std::index_sequence<I...>) {
  return reinterpret_cast<Entry>(&entry<resident, K, typename Passed<std::tuple_element_t<I, std::tuple<P...>>>::type...>);
}

#define STORAGE(T) (sizeof(T) == BYTES)
#define PAIRS_FIT(pairs) (shape.v % pairs::elements == 0 && (pairs::packs == 1 || (shape.r > 0 && shape.r % pairs::packs == 0)))  // into packs
// The shape says what is kept; R is the host's choice.
#define SHAPE(R) shape.v, shape.r, shape.sg, shape.teams
#define ENTRY_AMONG(resident, K) entry_of<resident, &K>(&K, std::make_index_sequence<buffers_of(&K)>{})
#define ENTRY(K) ENTRY_AMONG(resident_threads, K)
#define ENTRY_AMONG_MANY(K) ENTRY_AMONG(many_resident_threads, K)
#define FINDER(name) static const cuda::Register register_##name(#name, STEP, BYTES, find_##name);
#include VARIANTS
