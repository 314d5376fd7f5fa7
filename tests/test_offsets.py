"""Offsets of 64 bits: every kernel on the last rows of arrays of more than 2^32 elements, of which hardly any is real memory."""

import ctypes
import dataclasses
import functools
import mmap
import struct
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import metal_calls
import oracle
import paged_calls
import jax_fusednorm as fused
from jax_fusednorm import explain, rms_norm
from jax_fusednorm.core import ffi
from metal_driver import COMPLETED, PAGE, launch
from test_head_kernels import INTERLEAVED, NEOX, POSITIONS, Rope, angles_of, assert_turned, inverse_frequencies, turns_of, want_of
from test_matmul_kernels import assert_product
from test_paged_kernels import gpu_calls

BFLOAT = ml_dtypes.bfloat16
FAR = 1 << 33
NORESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python does not know by name


class Sparse:
    """`array` as the part of a larger one, of shape `whole`, that begins at index `at`. The rest reads as zeros, and takes no memory."""

    def __init__(self, array, whole, at):
        whole, at = (tuple(given) + own[len(given):] for given, own in ((whole, array.shape), (at, (0,) * array.ndim)))
        self.bytes = int(np.prod(whole, dtype=np.int64)) * array.itemsize
        self.memory = mmap.mmap(-1, self.bytes + 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
        start = -np.frombuffer(self.memory, np.uint8, 1).ctypes.data % PAGE + 64
        self.whole = np.frombuffer(self.memory, array.dtype, self.bytes // array.itemsize, start).reshape(whole)
        self.address = self.whole.ctypes.data
        self.values = self.whole[(*(slice(i, i + n) for i, n in zip(at, array.shape)), ...)]
        self.values[...] = array


@dataclasses.dataclass
class Far:
    """A call of some teams far from the first one."""

    kernel: str
    variant: tuple
    arrays: list      # Sparse, by buffer
    params: bytes
    first: int        # team, and how many
    count: int
    check: object     # of the arrays afterwards
    shape: tuple = (1, 0, 1, 1)
    floats: int = 1   # of scratch memory on the host


def run(machine, far):
    arrays = machine(far)
    far.check([a.values for a in arrays])


def on_host(library, far):
    params, scratch = np.frombuffer(far.params, np.uint8).copy(), Sparse(np.zeros(1, np.float32), (far.floats,), ())
    ran = library.jax_fusednorm_run_host_teams(
        far.kernel.encode(), (ctypes.c_ubyte * 8)(*map(metal_calls.ARGUMENTS.index, far.variant)), b"v2",
        (ctypes.c_void_p * (len(far.arrays) + 1))(*(a.address for a in far.arrays), params.ctypes.data), ctypes.c_void_p(scratch.address),
        ctypes.c_uint(far.first), ctypes.c_uint(far.first + far.count))
    assert ran, f"there is no {far.kernel} of {far.variant}"
    return far.arrays


def on_gpu(standin, far):
    _, _, simdgroups, teams = far.shape
    assert far.first % teams == 0
    standin.reset()
    standin.misbehave("longest buffer", str(1 << 40))
    standin.run_some(far.first // teams, -(-far.count // teams))
    [pipeline] = standin.pipelines(metal_calls.text_of(far.kernel), [f"{far.kernel}<{', '.join([*far.variant, *map(str, far.shape)])}>"])
    known = standin.run(launch(pipeline, far.arrays, far.params, -(-(far.first + far.count) // teams), teams * simdgroups * 32, 16 * simdgroups))
    assert standin.complaints() == [] and known["$status"] == COMPLETED
    standin.send(pipeline, "release")
    return far.arrays


@pytest.fixture(params=("host", "stand-in"))
def machine(request):
    """run(a Far): the arrays afterwards."""
    if request.param == "host":
        return functools.partial(on_host, request.getfixturevalue("host_library"))
    return functools.partial(on_gpu, request.getfixturevalue("standin"))


def is_gpu(machine):
    return machine.func is on_gpu  # or a stand-in for one


def shape_on(machine, *of, **options):
    return machine.args[0].shape(*of, **options) if is_gpu(machine) else (1, 0, 1, 1)


def placed(arrays, before):
    """Each array after before[its buffer] others of its rows, once, however often it is bound."""
    found = {}
    for i, a in enumerate(arrays):
        found.setdefault(id(a), Sparse(a, (before[i] + len(a),), (before[i],)) if i in before else Sparse(a, (), ()))
    return [found[id(a)] for a in arrays]


# ---- whole rows

ROWS, WIDTH = 4, 64
COUNTS = {"rms_norm_tangent": (0, 2), "rms_norm_cotangent": (0, 2), "gated_group_rms_norm": (0, 3), "gated_group_rms_norm_cotangent": (0, 3)}
VARIANTS = {  # with every operand and result there is
    "rms_norm": ("bfloat", "float", "false"), "rms_norm_add": ("bfloat", "float", "false", "false"),
    "add_rms_norm": ("bfloat", "float", "false", "false", "true"), "rms_norm_tangent": ("bfloat", "true", "true"),
    "rms_norm_cotangent": ("bfloat", "true", "true", "true"), "gated_group_rms_norm": ("bfloat", "bfloat", "bfloat", "float", "false", "true"),
    "gated_group_rms_norm_cotangent": ("bfloat", "bfloat", "bfloat", "false")}


@pytest.mark.parametrize("width", (WIDTH, 4100), ids=("packs", "read again"))
@pytest.mark.parametrize("name", metal_calls.KERNELS)
def test_rows(machine, name, width):
    small = metal_calls.call(name, VARIANTS[name], ROWS, width)
    before = -(-FAR // (8 * width)) * 8
    params = bytearray(small.params)
    for field in COUNTS.get(name, (0,)):  # rows, and blocks of rows
        struct.pack_into("I", params, 4 * field, (before + ROWS) * struct.unpack_from("I", params, 4 * field)[0] // ROWS)
    arrays = placed(small.arrays, {i: before * len(a) // ROWS for i, a in enumerate(small.arrays) if a.ndim == 2})
    run(machine, Far(name, small.variant, arrays, bytes(params), before * small.teams // ROWS, small.teams, small.check,
                     shape_on(machine, width, 2), floats=4 * width))


# ---- projections

def test_rows_of_a_weight(machine):
    rng, outputs, before = np.random.default_rng(1), 8, FAR // WIDTH
    x, weight = (rng.standard_normal(s).astype(BFLOAT) for s in ((3, WIDTH), (outputs, WIDTH)))
    product, whole = np.full((3, outputs), np.nan, BFLOAT), before + outputs
    arrays = [Sparse(x, (), ()), Sparse(weight, (whole,), (before,)), Sparse(product, (3, whole), (0, before))]
    run(machine, Far("matvec", ("bfloat",), arrays, struct.pack("4I", 3, WIDTH, whole, 16), before // 4, outputs // 4,
                     lambda a: assert_product(a[2], x, weight, True), shape_on(machine, WIDTH, 2)))


def test_columns_of_a_weight(machine):
    """Of a team that has the first columns: the last rows of weight and product are far away."""
    rng, strip, rows, width, whole = np.random.default_rng(2), 16, 20, 20, 1 << 28
    x, weight = (rng.standard_normal(s).astype(BFLOAT) for s in ((rows, width), (width, strip)))
    arrays = [Sparse(x, (), ()), Sparse(weight, (width, whole), ()), Sparse(np.full((rows, strip), np.nan, BFLOAT), (rows, whole), ())]
    run(machine, Far("vecmat", ("bfloat",), arrays, struct.pack("4I", rows, width, whole, strip), 0, 1,
                     lambda a: assert_product(a[2], x, weight, False), shape_on(machine, whole, 2), floats=rows * whole))


def test_rows_of_which_some_columns_are_normed(machine):
    rng, width, columns, before = np.random.default_rng(3), WIDTH, 96, FAR // 32
    y, scale = rng.standard_normal((ROWS, columns)).astype(BFLOAT), rng.standard_normal(width).astype(np.float32)
    arrays = [y, scale, np.full((ROWS, width), np.nan, BFLOAT), np.full((ROWS, columns - width), np.nan, BFLOAT)]

    def check(a):
        oracle.assert_close(a[2], oracle.rms_norm(y[:, :width], scale, epsilon=1e-6, scale_offset=0.5), "bfloat16")
        oracle.assert_same_bits(a[3], y[:, width:])

    run(machine, Far("partial_rms_norm", ("bfloat", "float", "false"), placed(arrays, {0: before, 2: before, 3: before}),
                     struct.pack("3I2f", before + ROWS, width, columns, 1e-6, 0.5), before, ROWS, check, shape_on(machine, width, 2), floats=width))


# ---- heads

TOKENS = len(POSITIONS)
TYPES = (np.float32, BFLOAT, np.float16)  # of copies, as the kernel counts them


def run_heads(machine, arrays, check, rope, before, width, heads, k_heads=0, copies=(0, 0, 0), cotangent=()):
    """Of tokens in sequences of two. copies: how many, their types, and which are head-major. cotangent: the rest of its params."""
    shape, interleaved = shape_on(machine, width, 2, head=True), rope.style == INTERLEAVED
    lanes, at_once, pairs = 1, 1, "adjacent" if interleaved else "apart"
    if is_gpu(machine):
        lanes = width // (shape[0] * shape[1])
        at_once, pairs = 32 // lanes, "adjacent" if interleaved else "halves"
    params = struct.pack("24I2f", before + TOKENS, 2, heads, k_heads, width, heads * width, 0, k_heads * width, 0, lanes, at_once,
                         -(-heads // at_once), -(-k_heads // at_once), 1, rope.pairs, 0, 1 if interleaved else rope.pairs, interleaved, 0, 0, 1,
                         *copies, 1e-6, 0.0)
    params += struct.pack(f"{len(cotangent)}I", *cotangent)
    name, options = ("head_rms_norm_rope_cotangent", ("true",)) if cotangent else ("head_rms_norm_rope", ("false", "false"))
    run(machine, Far(name, ("bfloat", *options, pairs), arrays, params, before, TOKENS, check, shape, floats=5 * width))


def wanted(x, rope, scale):
    inverse = inverse_frequencies(rope.pairs)
    angles = angles_of(np.array(POSITIONS, np.int32), inverse)
    return want_of(x, np.cos(angles), np.sin(angles), rope, scale=scale)


@pytest.mark.parametrize("style", (NEOX, INTERLEAVED))
def test_tokens_of_heads(machine, style):
    rng, width, rope = np.random.default_rng(4), 64, Rope(style, 32)
    x, k = (rng.standard_normal((TOKENS, n, width)).astype(BFLOAT) for n in (3, 1))
    scales, before = [rng.standard_normal(width).astype(np.float32) for _ in range(2)], FAR // width
    arrays = [x, k, np.array(POSITIONS, np.int32), np.asarray(turns_of(inverse_frequencies(rope.pairs))), *scales,
              np.full_like(x, np.nan), np.full_like(k, np.nan)]
    arrays += [arrays[6]] * 6

    def check(a):
        for got, given, scale in ((a[6], x, scales[0]), (a[7], k, scales[1])):
            assert_turned(got, *wanted(given, rope, scale), "bfloat16")

    run_heads(machine, placed(arrays, dict.fromkeys((0, 1, 2, 6, 7), before)), check, rope, before, width, 3, 1)


def test_copies_of_heads(machine):
    """In sequences of two tokens."""
    rng, width, count, rope, before = np.random.default_rng(5), 64, 3, Rope(NEOX, 32), FAR // 64
    x, scale = rng.standard_normal((TOKENS, count, width)).astype(BFLOAT), rng.standard_normal(width).astype(np.float32)
    arrays = [x, x, np.array(POSITIONS, np.int32), np.asarray(turns_of(inverse_frequencies(rope.pairs))), scale, scale]
    out = np.full_like(x, np.nan)
    arrays += [out, out, *(np.full(x.shape, np.nan, dtype) for dtype in TYPES),
               *(np.full((TOKENS // 2, count, 2, width), np.nan, dtype) for dtype in TYPES)]

    def check(a):
        want, size = wanted(x, rope, scale)
        assert_turned(a[6], want, size, "bfloat16")
        for dtype, token_major, head_major in zip(TYPES, a[8:11], a[11:14]):
            assert_turned(token_major, want, size, dtype)
            oracle.assert_same_bits(np.swapaxes(head_major, 1, 2).reshape(x.shape), np.ascontiguousarray(token_major))

    befores = dict.fromkeys((0, 2, 6, 8, 9, 10), before) | dict.fromkeys((11, 12, 13), before // 2)
    run_heads(machine, placed(arrays, befores), check, rope, before, width, count, copies=(6, 0b100100100100, 0b111000))


@pytest.mark.parametrize("of", ("x", "k", "the rest of a projection"))
def test_tokens_of_the_cotangents_of_heads(machine, of):
    """A team for each token: of queries, of keys, or of the columns that are neither."""
    rng, width, count, rope, before = np.random.default_rng(6), 64, 3, Rope(NEOX, 32), FAR // 64
    x, bar = (rng.standard_normal((TOKENS, count, width)).astype(BFLOAT) for _ in range(2))
    scale, whole = rng.standard_normal(width).astype(np.float32), before + TOKENS
    turns = np.asarray(turns_of(inverse_frequencies(rope.pairs)))
    out, sums = np.full_like(x, np.nan), np.full((TOKENS, width), np.nan, np.float32)
    arrays = [x, x, np.array(POSITIONS, np.int32), turns, scale, scale, bar, bar, bar, out, out, sums]
    teams = {"x": (whole, 0, 0), "k": (0, whole, 0), "the rest of a projection": (0, 0, whole)}[of]

    def formula(x, scale):
        return fused.head_rms_norm_rope(x, scale, jnp.asarray(POSITIONS), theta=1e6, implementation="jnp")

    def check(a):
        if of == "the rest of a projection":
            oracle.assert_same_bits(a[9][:, 1:], bar[:, :2])
            assert not oracle.wide(a[9][:, 0]).any()
            return
        x_bar, scale_bar = jax.vjp(formula, jnp.asarray(x, jnp.float32), jnp.asarray(scale))[1](jnp.asarray(bar, jnp.float32))
        np.testing.assert_allclose(oracle.wide(a[9]), np.asarray(x_bar), rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(a[11].sum(0), np.asarray(scale_bar), rtol=1e-4, atol=1e-4)

    # a projection of three heads: first a gap, and then v
    rest = (*teams, of not in ("x", "k"), width, 2 * width, 0, 0, 0, 0, width, 0, 0, 0)
    if rest[3]:
        arrays[8] = np.ascontiguousarray(bar[:, :2])
    run_heads(machine, placed(arrays, dict.fromkeys((0, 1, 2, 6, 7, 8, 9, 10, 11), before)), check, rope, before, width, count, count, cotangent=rest)


def paged(machine):
    """(calls of its kernel, the shape that each runs in)"""
    if not is_gpu(machine):
        return [(made, (1, 0, 1, 1)) for made in paged_calls.host_calls(range(0, 60, 3)) if made.variant[0] == "bfloat"]
    calls = gpu_calls(machine.args[0], "bfloat", (64, 64, "neox", "prefix"), (2, 3, 4, 6, 7, 8, 13))
    return [(made, tuple(map(int, name.rstrip(">").split(", ")[-4:]))) for name, made in calls if not made.shared]


def test_tokens_and_slots_of_a_paged_cache(machine):
    """Tokens far from the first, and their keys and values in the last of many pages."""
    slots = zeros = 0
    for made, shape in paged(machine):
        arrays, params, pages = list(made.arrays), bytearray(made.params), len(made.arrays[11])
        before = -(-FAR // min(arrays[i][0].size for i in (0, 1, 2, 10)) // 8) * 8
        pages_before = -(-FAR // arrays[11][0].size)
        table, offsets = arrays[3], arrays[5]
        arrays[3] = np.where((table >= 0) & (table <= pages), table + pages_before, table).astype(np.int32)
        arrays[5] = np.minimum(np.maximum(offsets, 0).astype(np.int64) + before, 2**31 - 1).astype(np.int32)
        struct.pack_into("I", params, 0, before + made.tokens)
        struct.pack_into("I", params, paged_calls.PAGES_IN_PARAMS, pages_before + pages)
        parts = struct.unpack_from("14I", params)[13]
        after = machine(Far("qk_rms_norm_rope_paged", made.variant, placed(arrays, dict.fromkeys((0, 1, 2, 10), before) | {11: pages_before}),
                            bytes(params), before * parts, made.tokens * parts, None, shape, floats=4 * arrays[10].shape[-1]))
        found = made.check([np.ascontiguousarray(a.values) for a in after])
        slots, zeros = slots + found[0], zeros + found[1]
    assert slots > 10 and zeros > 10, "these calls have lost their teeth"


# ---- what no 31 bits can count

@pytest.mark.parametrize("shape", ((1 << 31, 1), (1, 1 << 31), (1 << 16, 1 << 15, 1)))
def test_more_than_31_bits_of_rows_or_columns_run_jnp(host_kernel, shape):
    def decision(shape):
        return explain(rms_norm, jax.ShapeDtypeStruct(shape, jnp.bfloat16))["cpu"]

    assert decision(shape).runs == "jnp" and "needs more than 31 bits to count its rows or columns" in decision(shape).why
    assert decision((shape[0] - 1, *shape[1:]) if shape[0] > 1 else (1, shape[1] - 1)).runs == "host"


@pytest.mark.parametrize("shape", ((1 << 31, 1), (1, 1 << 31)))
def test_the_handlers_refuse_them_too(host_kernel, shape):
    x = jax.device_put(Sparse(np.zeros((1, 1), BFLOAT), shape, (0, 0)).whole, jax.devices("cpu")[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="x has more than 2\\^31 rows or columns"):
        ffi.Call("host")("rms_norm", [jax.ShapeDtypeStruct(shape, x.dtype)], x, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True)
