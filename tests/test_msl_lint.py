"""The kernels keep to the subset of Metal's language that every target takes; and each rule of it is proven by a text that breaks it."""

import embed
import metal_calls
import msl_lint
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not msl_lint.CLANG, reason="the strict compile needs clang 14 or later (Debian: apt-get install clang)")


@pytest.mark.parametrize("path", embed.FILES, ids=lambda path: path.stem)
def test_every_variant_passes(standin, host_library, path):
    text = embed.assemble(path)
    shapes = {dtype: list(metal_calls.widths_of_shapes(standin, np.dtype(t).itemsize)) for dtype, t in metal_calls.DTYPES.items()}
    heads = {dtype: {standin.shape(width, np.dtype(t).itemsize, head=True) for width in range(1, 600)} for dtype, t in metal_calls.DTYPES.items()}
    spelled = set()
    for kernel in embed.kernels(text):
        variants = list(metal_calls.variants(host_library, kernel))
        variants += [tuple("halves" if word == "apart" else word for word in v) for v in variants if "apart" in v]  # GPUs tell these apart
        assert variants
        for i, variant in enumerate(variants):
            # each variant with one shape that keeps rows and one that reads them again; the first of each dtype with all
            mine = shapes[variant[0]]
            some = mine if variant[0] not in {v[0] for v in variants[:i]} else [mine[i % len(mine)], next(s for s in mine if s[1] == 0)]
            if "rope" in kernel:
                some = [shape for shape in heads[variant[0]] if "adjacent" not in variant or shape[0] % 2 == 0]  # a pack must hold a pair
            spelled |= {f"{kernel}<{', '.join([*variant, *map(str, shape)])}>" for shape in some}
    assert msl_lint.lint(text, sorted(spelled)) == []


def test_a_wrong_instantiation_is_refused():
    text = metal_calls.text_of("rms_norm")
    assert msl_lint.lint(text, ["rms_norm<double, ones, false, 1, 1, 1, 4>"])
    assert msl_lint.lint(text, ["rms_norm<float, ones, false, 1, 1, 1>"])


def snippet(code):
    return f'#pragma METAL fp math_mode(safe)\nusing namespace metal;\n#line 1 "snippet"\n{code}\n'


ADDRESS_SPACE = "needs an address space"
REFUSED = {
    "a pointer without an address space": ("inline float f(const float* x) { return x[0]; }", ADDRESS_SPACE),
    "a reference without one": ("inline float f(const float& x) { return x; }", ADDRESS_SPACE),
    "a member without one": ("struct S { float* p; };", ADDRESS_SPACE),
    "a local without one": ("inline float f(device float* x) { float* q = x; return *q; }", ADDRESS_SPACE),
    "a cast without one": ("inline float f(device float* x) { return *reinterpret_cast<const float*>(x); }", ADDRESS_SPACE),
    "a result without one": ("inline float* f(device float* x) { return x; }", ADDRESS_SPACE),
    "a typedef without one": ("typedef float* P;", ADDRESS_SPACE),
    "a template's pointer without one": ("template <typename T> inline float f(T* x) { return float(*x); }", ADDRESS_SPACE),
    "a template's member without one": ("template <typename T> struct S { T* p; };", ADDRESS_SPACE),
    "a template's local without one": ("template <typename T> inline T f(device T* x) { T* q = x; return *q; }", ADDRESS_SPACE),
    "threadgroup for device": ("inline void f(device float* x, threadgroup float* y) { y = x; }", "changes address space"),
    "a write to const": ("inline void f(device const float* x) { x[0] = 1.0f; }", "not assignable"),
    "const_cast": ("inline void f(device const float* x) { const_cast<device float*>(x)[0] = 1.0f; }", "const_cast"),
    "a method of what is in device memory": (
        "struct S { float x; inline float f() const { return x; } }; inline float g(device const S* s) { return s->f(); }", "not a local"),
    "a global variable": ("float g = 1.0f;", "must be `constant`"),
    "a global that is only const": ("const float g = 1.0f;", "must be `constant`"),
    "a constant without a value": ("constant float g;", "must be initialized"),
    "threadgroup memory in a function": ("inline void f() { threadgroup float s[32]; s[0] = 0; }", "local address space"),
    "a static local": ("inline int f() { static int i = 0; return ++i; }", "static local"),
    "double": ("inline float f(float x) { double y = x; return y; }", "double"),
    "a literal of double": ("inline float f(float x) { return x * 1.0; }", "double precision constant"),
    "a literal of double, in a template": ("template <int N> inline float f(float x) { return x * 1e-6; }", "double precision constant"),
    "long long": ("inline float f(long long x) { return float(x); }", "long long"),
    "size_t": ("inline int f(size_t n) { return int(n); }", "size_t"),
    "arithmetic in half": ("inline half f(half a, half b) { return half(a * b); }", "invalid operands"),
    "arithmetic in bfloat": ("inline bfloat f(bfloat a, bfloat b) { return bfloat(a * b); }", "invalid operands"),
    "a half from a float, unsaid": ("inline half f(float a) { half b = a; return b; }", "no viable conversion"),
    "a bfloat from a float, unsaid": ("inline bfloat f(float a) { bfloat b = a; return b; }", "no viable conversion"),
    "max of mixed types": ("inline float f(float x) { return max(x, 0); }", "ambiguous"),
    "a vector type": ("inline float f(float4 x) { return 1.0f; }", "float4"),
    "exp": ("inline float f(float x) { return exp(x); }", "undeclared identifier 'exp'"),
    "precise::": ("inline float f(float x) { return precise::exp(x); }", "undeclared identifier 'precise'"),
    "an atomic": ("inline void f(device int* x) { atomic_fetch_add(x, 1); }", "undeclared identifier"),
    "std::": ("inline float f(float x) { return std::min(x, 1.0f); }", "undeclared identifier 'std'"),
    "a lambda": ("inline float f(float x) { return [x](float y) { return x + y; }(x); }", "lambda"),
    "recursion": ("inline int f(int x) { return x ? f(x - 1) : 0; }", "recursion"),
    "a template's recursion": ("template <typename T> inline T f(T x) { return x ? f(x - 1) : x; }", "recursion"),
    "a function pointer": ("inline float g(float x) { return x; } inline float f() { float (*p)(float) = g; return p(1.0f); }", "function"),
    "a derived struct": ("struct A {}; struct B : A {};", "derived"),
    "virtual": ("struct S { virtual float f(); };", "virtual"),
    "a union": ("union U { float f; int i; };", "union"),
    "new": ("inline float f() { thread float* p = new float; return *p; }", "new"),
    "goto": ("inline int f() { goto end; end: return 1; }", "goto"),
    "throw": ("inline int f() { throw 1; }", "throw"),
    "asm": ('inline void f() { asm("nop"); }', "asm"),
    "if constexpr": ("template <bool B> inline int f() { if constexpr (B) return 1; else return 0; }", "C++17"),
    "a structured binding": ("struct P { int a, b; }; inline int f(P p) { auto [a, b] = p; return a + b; }", "C++17"),
    "a fold": ("template <int... N> inline int f() { return (N + ...); }", "C++17"),
    "a function that is not inline": ("float f(float x) { return x; }", "declared `inline`"),
    "a method that is not inline": ("struct S { float x; float f() const { return x; } };", "declared `inline`"),
}

ACCEPTED = {
    "pointers in every address space": (
        "template <typename T> inline device T* f(device T* p, threadgroup float* t) {\n"
        "  float a[2]; a[0] = 1.0f; thread float* b = a; thread float& c = a[1]; c = *b + t[0]; return p + int(c); }"),
    "a pointer in a struct": "struct S { threadgroup float* p; device const int* q; inline float f() const { return p[q[0]]; } };",
    "a constant table": "constant float table[] = {1.0f, 2.0f}; inline float f(int i) { return table[i]; }",
    "storage types, converted": "inline half f(bfloat a, half b) { return half(max(float(a), float(b)) * 2.0f); }",
    "64-bit integers": "inline uint f(uint a, uint b) { return uint(ulong(a) * b >> 32) + mulhi(a, b) + as_type<uint>(1.0f); }",
    "barriers": "inline void f() { threadgroup_barrier(mem_flags::mem_threadgroup); simdgroup_barrier(mem_flags::mem_device); }",
    "simd functions": "inline float f(float x, int i) { return simd_sum(x) + simd_shuffle_xor(x, 1) + float(simd_min(i)); }",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_outside_the_subset_is_refused(what):
    code, complaint = REFUSED[what]
    found = msl_lint.lint(snippet(code))
    assert found and any(complaint in line for line in found), found
    assert all(line.startswith("snippet:1: ") for line in found), found


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_is_inside_the_subset_passes(what):
    assert msl_lint.lint(snippet(ACCEPTED[what])) == []


KERNEL = """
struct P { uint n; };
template <typename T>
kernel void k(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant P& p [[buffer(2)]],
    threadgroup float* scratch [[SCRATCH]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  scratch[lane] = float(x[group * p.n + simdgroup]);
  y[lane] = T(scratch[0]);
}"""
SIGNATURES = {
    "buffers out of order": ("buffer(1)", "buffer(3)"),
    "a buffer twice": ("buffer(1)", "buffer(0)"),
    "params that are not last": ("constant P& p [[buffer(2)]]", "device P* p [[buffer(2)]]"),
    "params by value": ("constant P& p", "P p"),
    "a buffer in no memory": ("device T* y", "T* y"),
    "threadgroup memory at a number": ("[[SCRATCH]]", "[[threadgroup(0)]]"),
    "lane and simdgroup exchanged": ("uint lane [[thread_index_in_simdgroup]]", "uint lane [[simdgroup_index_in_threadgroup]]"),
    "another index": ("threadgroup_position_in_grid", "thread_position_in_grid"),
    "a vector index": ("uint group", "uint3 group"),
    "a result": ("kernel void", "kernel int"),
}


def test_a_kernel_passes():
    assert msl_lint.lint(snippet(KERNEL)) == []


@pytest.mark.parametrize("what", SIGNATURES)
def test_another_signature_is_refused(what):
    old, new = SIGNATURES[what]
    assert KERNEL.count(old) == 1
    assert msl_lint.lint(snippet(KERNEL.replace(old, new)))


def test_math_must_be_safe():
    assert "safe" in msl_lint.lint(snippet(KERNEL).replace("safe", "fast"))[0]
