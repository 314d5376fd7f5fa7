"""The kernels keep to the subset of Metal's language that every target takes; and each rule of it is proven by a text that breaks it."""

import embed
import metal_calls
import msl_lint
import msl_variants
import pytest


def test_a_wrong_instantiation_is_refused():
    text = metal_calls.text_of("rms_norm")
    assert msl_lint.lint(text + msl_variants.lines(["rms_norm<float, ones, false, 1, 1, 1, 4>"])) == []
    assert msl_lint.lint(text + msl_variants.lines(["rms_norm<double, ones, false, 1, 1, 1, 4>"]))
    assert msl_lint.lint(text + msl_variants.lines(["rms_norm<float, ones, false, 1, 1, 1>"]))


METAL = (embed.ROOT / "compat/metal.h").read_text("utf-8")


def snippet(code):
    return f'#line 1 "metal.h"\n{METAL}#line 1 "snippet.h"\nusing namespace metal;\n#line 1 "snippet"\n{code}\n'


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
    "max of mixed types": ("inline float f(float x) { return max(x, 0); }", "deleted function 'max'"),
    "a vector type": ("inline float f(float4 x) { return 1.0f; }", "float4"),
    "exp": ("inline float f(float x) { return exp(x); }", "undeclared identifier 'exp'"),
    "precise::": ("inline float f(float x) { return precise::exp(x); }", "undeclared identifier 'precise'"),
    "an atomic": ("inline void f(device int* x) { atomic_fetch_add(x, 1); }", "undeclared identifier"),
    "std::": ("inline float f(float x) { return std::min(x, 1.0f); }", "undeclared identifier 'std'"),
    "a lambda": ("inline float f(float x) { return [x](float y) { return x + y; }(x); }", "lambda"),
    "recursion": ("inline int f(int x) { return x ? f(x - 1) : 0; }", "recursion"),
    "a template's recursion": ("template <typename T> inline T f(T x) { return x ? f(x - 1) : x; }", "recursion"),
    "recursion through another": ("inline int g(int); inline int f(int x) { return x ? g(x - 1) : 0; } inline int g(int x) { return f(x); }", "recursion"),
    "recursion through another, in templates": (
        "template <typename T> inline T g(T); template <typename T> inline T f(T x) { return x ? g(x) : x; }"
        "template <typename T> inline T g(T x) { return f(x); }", "recursion"),
    "a method's recursion": ("struct S { int n; inline int f(int x) const { return x ? f(x - 1) : n; } };", "recursion"),
    "a method's recursion through another": (
        "struct S { inline int f(int x) const { return g(x); } inline int g(int x) const { return x ? f(x - 1) : 0; } };", "recursion"),
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
    "a bit-field": ("struct S { uint a : 3; };", "bit-field"),
    "any number of arguments": ("inline int f(int n, ...) { return n; }", "variadic"),
    "an array of a variable size": ("inline float f(int n) { float x[n]; x[0] = 1.0f; return x[0]; }", "variable length"),
    "a static member": ("struct S { static const int n = 3; };", "must be `constant`"),
    "a string": ('inline int f() { return "text"[0]; }', "the string"),
    "a character beyond ASCII": ("inline float f(float \u00e9) { return \u00e9; }", "outside of comments"),
    **{f"the keyword {word}": (code, f"`{word}` is not of the subset") for word, code in {
        "noexcept": "inline int f() noexcept { return 1; }",
        "register": "inline int f() { register int i = 1; return i; }",
        "thread_local": "thread_local int i;",
        "volatile": "inline int f(volatile device int* x) { return x[0]; }",
        "mutable": "struct S { mutable int i; };",
        "friend": "struct S { friend struct T; };",
        "extern": "extern constant int i;",
        "typeid": "inline bool f(int x) { return typeid(x) == typeid(int); }",
        "dynamic_cast": "struct S {}; inline thread S* f(thread S* s) { return dynamic_cast<thread S*>(s); }",
        "wchar_t": "struct S { wchar_t c; };",
        "delete": "struct S { S(int) = delete; };",
    }.items()},

    # C++14, without extensions
    "a hexadecimal float": ("inline float f() { return 0x1.8p3f; }", "C++17"),
    "a deduced template argument": ("template <typename T> struct S { T x; }; template <typename T> S(T) -> S<T>; inline float f() { return S{1.0f}.x; }", "C++17"),
    "static_assert without words": ("static_assert(sizeof(int) == 4);", "C++17"),
    "a member initialized by its name": ("struct P { int a, b; }; inline int f() { P p = {.a = 1, .b = 2}; return p.a; }", "designated"),
    "a value that is a block": ("inline int f(int x) { return ({ int y = x; y; }); }", "GNU"),
    "an omitted operand": ("inline int f(int x) { return x ?: 1; }", "GNU"),
    "a range of cases": ("inline int f(int x) { switch (x) { case 0 ... 3: return 1; default: return 0; } }", "GNU"),
    "an array of nothing": ("struct S { int n; int x[0]; };", "zero size"),
    "a compound literal": ("struct P { int a; }; inline int f() { return (P){1}.a; }", "compound literals"),
    "a struct without a name": ("struct S { struct { int a; }; };", "anonymous structs"),
    "__builtin_": ("inline float f(float x) { return __builtin_sqrtf(x); }", "compiler's own"),
    "__attribute__": ("inline __attribute__((always_inline)) float f(float x) { return x; }", "compiler's own"),
    "another compiler's word": ("inline int f(device int* x) { __global int* y = x; return y[0]; }", "compiler's own"),
    "a name with a capital after an underscore": ("inline float f(float _X) { return _X; }", "compiler's own"),

    # address spaces
    "a pointer through an integer": ("inline threadgroup int* f(device int* x) { return reinterpret_cast<threadgroup int*>(reinterpret_cast<ulong>(x)); }",
                                     "from an integer"),
    "an integer from a pointer": ("inline ulong f(device int* x) { return ulong(x); }", "from an integer"),
    "a pointer from an integer": ("inline device int* f(ulong x) { return (device int*)x; }", "from an integer"),
    "an integer from a template's pointer": (
        "template <typename T> inline ulong f(device T* x) { return reinterpret_cast<ulong>(x); }"
        "inline ulong g(device int* x) { return f(x); }", "from an integer"),
    "the bits of a pointer": ("inline ulong f(device int* x) { return as_type<ulong>(x); }", "no matching function for call to 'as_type'"),
    "a method of what is in device memory, in a template": (
        "template <typename T> struct S { T x; inline T f() const { return x; } };"
        "template <typename T> inline T g(device const S<T>* s) { return s->f(); } inline int h(device const S<int>* s) { return g(s); }", "not a local"),

    # functions that MSL lacks, or of which it has several or another
    **{f"deleted: {call}": (f"inline auto f(int i, uint u, ulong l, float x, half h) {{ return {call}; }}", "deleted") for call in (
        "simd_sum(i)", "simd_sum(l)", "simd_sum(h)", "simd_min(x)", "simd_min(u)", "simd_shuffle(i, 1)", "simd_shuffle_xor(u, 1)", "rsqrt(i)", "rsqrt(h)",
        "rint(i)", "fma(i, i, i)", "fma(x, x, i)", "fma(x, 2, x)", "max(x, i)", "max(l, l)", "min(i, u)", "min(h, h)", "mulhi(i, i)", "mulhi(l, l)",
        "mulhi(u, 3)", "half(i)", "bfloat(u)", "bfloat(h)")},
    "as_type of another size": ("inline float f(ushort x) { return as_type<float>(x); }", "no matching function for call to 'as_type'"),
    "as_type of a struct": ("struct S { uint x; }; inline float f(S x) { return as_type<float>(x); }", "no matching function for call to 'as_type'"),

    # directives
    "another header": ("#include <metal_atomic>", "#include <metal_atomic>"),
    "what only Metal's compiler defines": ("#ifdef __METAL__\n#endif", "no target of ours defines it"),
    "a branch for a version": ("#if __METAL_VERSION__ >= 310\n#endif", "#if __METAL_VERSION__ >= 310"),
    "contraction": ("#pragma METAL fp contract(fast)", "#pragma METAL fp contract(fast)"),
    "contraction, in a function": ("inline float f(float x) {\n#pragma METAL fp contract(fast)\n  return x; }", "#pragma METAL fp contract(fast)"),
    "contraction in a macro": ('#define FAST _Pragma("METAL fp contract(fast)")', "the string"),
    "another math mode": ("#pragma METAL fp math_mode(fast)", "#pragma METAL fp math_mode(fast)"),
    "the math mode twice": ("#pragma METAL fp math_mode(safe)", "#pragma METAL fp math_mode(safe)"),
    "the math mode twice, where it can be said": ("#if __METAL_VERSION__ >= 320\n#pragma METAL fp math_mode(safe)\n#endif", "must be said once"),
    "#undef": ("#undef half", "#undef half"),
    "a name put together": ("#define TYPE(n) float##n", "put together"),
    "a broken line": ("#define TWO \\\n  2", "outside of comments"),
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
    "the functions of the library, of the types that it has them for": (
        "inline float f(float x, int i, uint u) { return max(x, 1.0f) + float(max(i, 1)) + float(min(u, 1u)) + rint(x) + rsqrt(x) + fma(x, x, x); }"),
    "branches of other targets": "#ifndef KEPT_IN_SCRATCH\ninline float f(float x) { return x; }\n#else\ninline float f() { return 1; }\n#endif",
    "an overload that calls the other": "struct S { inline int f(int x) const { return x; } inline int f(float x) const { return f(int(x)); } };",
    "static_assert": 'static_assert(sizeof(int) == 4, "words");',
    "C++14": "template <typename T> inline auto f(T x) { return x; } inline int g() { return f(0b101) + f(1'000); }",
    "simd functions": "inline float f(float x, int i) { return simd_sum(x) + simd_shuffle_xor(x, 1) + float(simd_min(i)); }",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_outside_the_subset_is_refused(what):
    code, complaint = REFUSED[what]
    found = msl_lint.lint(snippet(code))
    assert found and any(complaint in line for line in found), found
    assert all(line.startswith("snippet:") for line in found if complaint != "must be said once"), found


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
    "a buffer beyond the last": ("constant P& p [[buffer(2)]]", "".join(f"device T* b{i} [[buffer({i})]], " for i in range(2, 31))
                                 + "constant P& p [[buffer(31)]]"),
    "a kernel twice": ("  y[lane] = T(scratch[0]);\n}", "}" + KERNEL.partition("struct P { uint n; };")[2]),
    "a kernel that nobody would find": ("kernel void k", "kernel\nvoid k"),
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


@pytest.mark.parametrize("said", ["", "#pragma METAL fp math_mode(safe)\n", "#if __METAL_VERSION__ >= 320\n#pragma METAL fp math_mode(fast)\n#endif\n",
                                  "#if __METAL_VERSION__ >= 310\n#pragma METAL fp math_mode(safe)\n#endif\n"])
def test_math_must_be_safe(said):
    right = "#if __METAL_VERSION__ >= 320\n#pragma METAL fp math_mode(safe)\n#endif\n"
    assert snippet(KERNEL).count(right) == 1
    assert any("math_mode(safe) must be said once" in line for line in msl_lint.lint(snippet(KERNEL).replace(right, said)))
