"""The names that Metal's language and its standard library take, each list once. What a kernel text may not declare, and what it may not even say."""

import itertools
import re


def _words(text):
    return frozenset(text.split())


KEYWORDS = _words("""
    alignas alignof asm auto bool break case catch char char16_t char32_t class const constexpr const_cast continue decltype default delete do
    double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept nullptr
    operator private protected public register reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    and and_eq bitand bitor compl not not_eq or or_eq xor xor_eq""")  # C++14's, and its alternative tokens
# Of these, what MSL has not, or the kernels do without.
UNUSED_KEYWORDS = _words("""
    asm catch char16_t char32_t const_cast delete double dynamic_cast export extern friend goto mutable new noexcept register thread_local throw try
    typeid union virtual volatile wchar_t""")

# What the kernels are written in: to be used, never declared.
QUALIFIERS = _words("device constant thread threadgroup")
USED = _words("half bfloat uint ushort ulong kernel metal as_type") | QUALIFIERS

_SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float", "double")
SCALARS = _words("""
    uchar int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t ptrdiff_t intptr_t uintptr_t llong ullong quad complex imaginary""")
VECTORS = frozenset(map("".join, itertools.product(("", "packed_"), _SCALARS, "234"))) | {"vec", "packed_vec"}
MATRICES = frozenset(map("".join, itertools.product(("half", "bfloat", "float", "double"), "234", "x", "234"))) | {"matrix"}
OBJECTS = re.compile(r"(texture|depth)(1d|2d|3d|cube|_buffer)\w*|sampler|atomic(_\w+)?|simdgroup_(matrix|b?float|half)\w*")
SPACES = _words("threadgroup_imageblock ray_data object_data")
STAGES = _words("vertex fragment mesh object visible stitchable intersection")
OTHERS = _words("main restrict assert")
MACROS = re.compile(r"INFINITY|NAN|MAX(FLOAT|HALF|BFLOAT|DOUBLE)|HUGE_VAL[FH]?|M_[A-Z0-9_]+|(FLT|HALF|BFLT|DBL|FP|METAL)_\w+|CHAR_BIT|"
                    r"([SU]?CHAR|U?SHRT|U?INT|U?LONG|U?LLONG)_(MAX|MIN)")

FUNCTIONS = _words("""
    clamp mix saturate sign smoothstep step
    abs absdiff addsat clz ctz extract_bits hadd insert_bits mad24 madhi madsat max max3 median3 min min3 mul24 mulhi popcount reverse_bits rhadd
    rotate subsat
    all any isfinite isinf isnan isnormal isordered isunordered select signbit
    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh cospi divide exp exp10 exp2 fabs fdim floor fma fmax fmax3 fmedian3 fmin fmin3
    fmod fract frexp ilogb ldexp log log10 log2 modf nextafter pow powr rint round rsqrt sin sincos sinh sinpi sqrt tan tanh tanpi trunc
    cross distance distance_squared dot faceforward length length_squared normalize reflect refract determinant transpose
    dfdx dfdy fwidth discard_fragment get_num_samples get_sample_position interpolate move forward swap addressof declval
    threadgroup_barrier simdgroup_barrier simdgroup_load simdgroup_store simdgroup_multiply simdgroup_multiply_accumulate""")
FUNCTION_FAMILIES = re.compile(r"(simd|quad)_\w+|(un)?pack_(float|half|snorm|unorm|srgb)\w+|make_filled_\w+|os_log\w*")
# Its types, and other names that are no functions.
TYPES = _words("""
    access address bias border_color compare_func component coord filter gradient2d gradient3d gradientcube interpolant interpolation level
    lod_clamp max_anisotropy mem_flags memory_order min_lod_clamp mip_filter thread_scope uniform
    array array_ref bool_constant common_type conditional conditional_t decay decay_t enable_if enable_if_t extent extents dextents false_type
    integral_constant numeric_limits rank tensor true_type underlying_type void_t
    command_buffer compute_command cull_mode depth_clip_mode function_table imageblock intersection_function_table intersection_params
    intersection_query intersection_result intersector mesh_grid_properties patch_control_point primitive_type ray raytracing render_command
    topology triangle_data triangle_fill_mode visible_function_table winding""")
TYPE_FAMILIES = re.compile(r"(is|has)_\w+|(add|remove)_(const|cv|volatile|pointer|reference|[lr]value_reference|extent|all_extents)(_t)?|"
                           r"make_(un)?signed(_t)?|memory_order_\w+|imageblock_\w+|(rg?b?a?|rgb10a2|rg11b10)(8|16|32)?[us]norm\w*")


def foreign(word):
    """Whether MSL reserves a word that the kernels have no use for."""
    return (word in SCALARS | VECTORS | MATRICES | SPACES | STAGES | OTHERS or bool(OBJECTS.fullmatch(word)) or bool(MACROS.fullmatch(word)))


def reserved(word):
    """Whether nothing of ours may have this name: a variable, a field, a type, a macro, whatever it is."""
    return word in KEYWORDS or word in USED or foreign(word)


def in_library(word):
    """Whether it is a name of metal_stdlib: with `using namespace metal`, one of ours at program scope is ambiguous with it."""
    return (word in FUNCTIONS or word in TYPES or bool(FUNCTION_FAMILIES.fullmatch(word)) or bool(TYPE_FAMILIES.fullmatch(word)))
