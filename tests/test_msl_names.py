"""No name of ours is one that Metal's language or its library has, whatever it names; names that only resemble these pass."""

import pytest

import msl_lint
from test_msl_lint import snippet

# Of each list of metal_src/msl_words.py, and each of its patterns.
FOREIGN = {
    "scalars": "uchar int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t ptrdiff_t llong ullong quad complex imaginary",
    "vectors": "bool2 char3 uchar4 short2 ushort3 int4 uint2 long3 ulong4 half2 bfloat3 float4 vec",
    "packed vectors": "packed_bool2 packed_char3 packed_ushort4 packed_uint2 packed_long3 packed_half3 packed_bfloat4 packed_float3 packed_vec",
    "matrices": "half2x2 half3x4 float2x3 float4x4 matrix",
    "textures": "texture1d texture1d_array texture2d texture2d_ms_array texture3d texturecube texturecube_array texture_buffer depth2d depth2d_ms depthcube",
    "other objects": "sampler atomic atomic_int atomic_uint atomic_bool atomic_ulong atomic_float atomic_fetch_add_explicit simdgroup_matrix simdgroup_float8x8",
    "address spaces": "threadgroup_imageblock ray_data object_data",
    "stages": "vertex fragment mesh object visible stitchable intersection",
    "others": "main restrict assert",
    "macros": "INFINITY NAN MAXFLOAT HUGE_VALF HUGE_VALH M_PI_F M_E_F M_LOG2E_F M_SQRT1_2_H FLT_MAX FLT_EPSILON HALF_MAX HALF_MIN FP_ILOGBNAN CHAR_BIT "
              "SCHAR_MIN UCHAR_MAX SHRT_MAX USHRT_MAX INT_MAX INT_MIN UINT_MAX LONG_MIN ULONG_MAX METAL_FUNC",
}
KEYWORDS = ("alignas asm auto bool case char class const constexpr const_cast decltype default delete do double else enum explicit export extern false "
            "float for friend goto if inline int long mutable namespace new noexcept nullptr operator private register return short signed sizeof static "
            "struct switch template this throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while "
            "and and_eq bitand bitor compl not not_eq or or_eq xor xor_eq")
USED = "half bfloat uint ushort ulong device constant thread threadgroup kernel metal as_type"
FUNCTIONS = ("saturate clamp abs sqrt select dot length mix step sign smoothstep min max clz popcount rotate mulhi all any isnan fract sincos exp exp2 log pow "
             "rsqrt fma rint floor trunc cross distance normalize determinant transpose fwidth simd_sum simd_max quad_sum pack_float_to_unorm4x8 "
             "unpack_unorm4x8_to_float threadgroup_barrier")
TYPES = "array enable_if is_same is_integral_v numeric_limits remove_const make_unsigned mem_flags access level coord filter rank ray uniform interpolant"

DECLARED = {
    "a variable": "inline int f() { int NAME = 1; return NAME; }",
    "a variable of a loop": "inline int f() { int n = 0; for (int NAME = 4; NAME > 0; NAME /= 2) n += NAME; return n; }",
    "a variable of a loop's macro": "inline float f(int n) { float x = 0; FOR_MINE(NAME, 0, n) x += float(NAME); return x; }",
    "a parameter": "inline int f(int NAME) { return NAME; }",
    "a parameter that is not used": "inline int f(int NAME) { return 1; }",
    "a field": "struct S { int NAME; };",
    "a method": "struct S { inline int NAME() const { return 1; } };",
    "a function": "inline int NAME(int x) { return x; }",
    "a function's template": "template <typename T> inline T NAME(T x) { return x; }",
    "a struct": "struct NAME { int x; };",
    "a struct in another": "struct S { struct NAME { int x; }; NAME y; };",
    "a typedef": "typedef int NAME;",
    "an alias": "struct S { using NAME = int; };",
    "an enumerator": "enum { NAME, other };",
    "an enumerator of a class": "enum class E { NAME };",
    "an enum": "enum NAME { some };",
    "a template's type": "template <typename NAME> inline int f(NAME x) { return int(x); }",
    "a template's number": "template <int NAME> inline int f() { return NAME; }",
    "a template's parameter that is not used": "template <typename NAME> struct S { int x; };",
    "a constant": "constant int NAME = 1;",
    "a namespace": "namespace NAME { struct S {}; }",
    "a macro": "#define NAME 1",
    "a macro's parameter": "#define TWICE(NAME) 2",
}


def refused(code):
    """{where: all that is wrong there}"""
    found = {}
    for line in msl_lint.lint(snippet(code)):
        where, what = line.split(": ", 1)
        found[where] = f"{found.get(where, '')}{what}\n"
    return found


@pytest.mark.parametrize("what", FOREIGN)
def test_a_word_that_the_kernels_have_no_use_for_is_refused_wherever_it_stands(what):
    words = FOREIGN[what].split()
    found = refused("\n".join(f"struct S{i} {{ int {word}; }};" for i, word in enumerate(words)))
    for i, word in enumerate(words):
        assert f"`{word}` is a word of MSL" in found[f"snippet:{i + 1}"]


@pytest.mark.parametrize("how", DECLARED)
@pytest.mark.parametrize("word", ("half", "thread", "kernel"))  # a type, an address space, neither
def test_a_word_that_they_do_use_is_refused_as_a_name(word, how):
    assert "snippet:1" in refused(DECLARED[how].replace("NAME", word))


@pytest.mark.parametrize("word", USED.split())
def test_so_is_every_word_like_it(word):
    assert "snippet:1" in refused(f"struct S {{ float {word}; }};")
    assert "snippet:1" in refused(f"template <typename T> inline float f(float {word}) {{ return 1.0f; }}")


def test_no_keyword_is_a_name():
    """The compilers know them; but they may be macros in C++."""
    words = KEYWORDS.split()
    found = refused("\n".join(f"#define {word} 1" for word in words))
    for i, word in enumerate(words):
        assert f"`{word}` is a word of MSL or of its library, and here a macro's" in found[f"snippet:{i + 1}"]
    assert "snippet:1" in refused("struct S { float xor; };")


@pytest.mark.parametrize("scalar", ("float", "T"))
def test_a_function_of_scalars_has_no_name_of_the_library(scalar):
    words = [word for word in FUNCTIONS.split() if scalar == "T" or word not in ("fma", "rint", "rsqrt", "simd_sum")]  # these the shim has
    template = "template <typename T> " if scalar == "T" else ""
    found = refused("\n".join(f"{template}inline {scalar} {word}({scalar} x, thread {scalar}& y) {{ return x; }}" for word in words))
    for i, word in enumerate(words):
        assert f"`{word}` is a name of metal_stdlib" in found[f"snippet:{i + 1}"]


def test_nothing_else_of_program_scope_has_one():
    words = [*FUNCTIONS.split(), *TYPES.split()]
    words = [word for word in words if word not in ("min", "max", "mulhi", "fma", "rint", "rsqrt", "simd_sum", "threadgroup_barrier", "mem_flags")]
    for each in ("struct NAME {{ int x; }};", "constant int NAME = 1;", "enum {{ NAME, other{i} }};", "typedef int NAME;", "template <int N> struct NAME {{}};"):
        found = refused("\n".join(each.replace("NAME", word).format(i=i) for i, word in enumerate(words)))
        for i, word in enumerate(words):
            assert f"`{word}` is a name of metal_stdlib" in found[f"snippet:{i + 1}"]


ACCEPTED = {
    "names that hold a word": "struct S { int halves, half_copy, device_count, threads, kernels, constants, uints; float vec_of, main_row, texture, depth; };",
    "a local like a function": "inline int f(int step, int sign) { const int length = step; int distance = sign; return length + distance; }",
    "a field and a method like a function": "struct S { int dot, level; inline int abs() const { return dot + level; } inline int clamp(int x) const { return x; } };",
    "a function of what is ours": (
        "template <int V> struct F { float v[V]; }; template <int V> inline float dot(F<V> a, F<V> b) { return a.v[0] * b.v[0]; }\n"
        "struct P { float x, y; }; inline float length(P p) { return p.x + p.y; } inline float clamp(thread P& p, float low) { return p.x + low; }\n"
        "inline float select(device const float* x, int i) { return x[i]; }"),
    "words in a comment": "// half float4 texture2d and sampler\n/* main\nvertex */\ninline int f() { return 1; }",
    "types where types stand": (
        "template <typename T> inline T f(uint x) { return T(float(x)); } inline half g(device const half*, bfloat) { return f<half>(sizeof(bfloat)); }"),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_other_names_pass(what):
    assert refused(ACCEPTED[what]) == {}
