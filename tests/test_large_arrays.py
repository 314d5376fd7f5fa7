"""Every op, and the derivatives that have kernels, on arrays of more than 2^31 elements, on a GPU 2^32: rows that repeat give results that do.

    python -m pytest --slow --implementations jnp,host tests/test_large_arrays.py      # up to 12 GB
    python -m pytest --slow --implementations jnp,cuda tests/test_large_arrays.py      # up to 60 GB of the GPU's

The offsets of each kernel alone, on memory that hardly exists: test_offsets.py.
"""

import ctypes
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_fusednorm as fused
from plain import draw, draw_scale

ROWS, WIDTH = 1031, 4096  # of a block, which has no power of two of rows: where an offset wraps lies another row
HEADS, K_HEADS, CHANNELS, PAGE = 32, 2, 128, 64
READ, PRIVATE, FIXED, ANYWHERE, NORESERVE = 1, 2, 0x10, 0x20, 0x4000  # of Linux's mman.h


def repeated(block, times, implementation):
    """The block so many times along its first axis; for the CPU it is one block of memory, mapped again and again, where that can be done."""
    values = np.asarray(block)
    if implementation != "cuda" and hasattr(os, "memfd_create") and values.nbytes % os.sysconf("SC_PAGE_SIZE") == 0:
        return jax.device_put(_mapped(values, times), jax.devices("cpu")[0])
    return jax.jit(lambda b: jnp.broadcast_to(b, (times, *b.shape)).reshape(-1, *b.shape[1:]))(block)


def _mapped(values, times):
    libc, file = ctypes.CDLL(None), os.memfd_create("block")
    assert os.write(file, values.tobytes()) == values.nbytes
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    base = libc.mmap(None, times * values.nbytes, READ, PRIVATE | ANYWHERE | NORESERVE, -1, 0)
    for at in range(base, base + times * values.nbytes, values.nbytes):
        assert libc.mmap(at, values.nbytes, READ, PRIVATE | FIXED, file, 0) == at
    os.close(file)
    memory = (ctypes.c_char * (times * values.nbytes)).from_address(base)  # for as long as the process lives: it is hardly any
    return np.frombuffer(memory, values.dtype).reshape(-1, *values.shape[1:])


def assert_repeats(got, want, times, axis=0):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape[axis] == times * want.shape[axis]
    for i in range(times):
        part = got.take(range(i * want.shape[axis], (i + 1) * want.shape[axis]), axis) if axis else got[i * len(want):(i + 1) * len(want)]
        assert np.array_equal(part.view(np.uint16), want.view(np.uint16)), f"block {i} of {times}"


def gated(y, scale, **options):
    return fused.gated_group_rms_norm(y, y, scale, group_size=512, **options)


def pulled(op, x, scale, **options):
    return jax.vjp(functools.partial(op, **options), x, scale)[1](x)


# name: of rows and a scale, (results with as many rows; and then sums over rows)
OF_ROWS = {
    "rms_norm": lambda x, s, **o: ([fused.rms_norm(x, s, **o)], []),
    "add_rms_norm": lambda x, s, **o: (fused.add_rms_norm(x, x, s, **o), []),
    "rms_norm_add": lambda x, s, **o: ([fused.rms_norm_add(x, x, s, **o)], []),
    "gated_group_rms_norm": lambda x, s, **o: ([gated(x, s, **o)], []),
    "tangent": lambda x, s, **o: ([jax.jvp(lambda v: fused.rms_norm(v, s, **o), (x,), (x,))[1]], []),
    "cotangent": lambda x, s, **o: (lambda bar: (bar[:1], bar[1:]))(pulled(fused.rms_norm, x, s, **o)),
    "cotangent of a sum": lambda x, s, **o: (lambda bar: (bar[:1], bar[1:]))(
        pulled(lambda v, s, **o: fused.add_rms_norm(v, v, s, return_sum=False, **o), x, s, **o)),
    "cotangent of a gated norm": lambda x, s, **o: (lambda bar: (bar[:1], bar[1:]))(pulled(gated, x, s, **o)),
}


@pytest.fixture
def times(kernel):
    """How many blocks are enough."""
    if kernel == "metal" and cases.STAND_IN:
        pytest.skip("a stand-in would take days")
    return (1 << 31 + (kernel == "cuda")) // (ROWS * WIDTH) + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(kernel, times, name):
    call = jax.jit(functools.partial(OF_ROWS[name], implementation=kernel))
    block, scale = draw(1, (ROWS, WIDTH), "bfloat16"), draw_scale(2, WIDTH, "float32")
    wants, totals = call(block, scale)
    gots, sums = call(repeated(block, times, kernel), scale)
    for got, want in zip(gots, wants):
        assert_repeats(got, want, times)
    for got, want in zip(sums, totals):
        np.testing.assert_allclose(np.asarray(got), times * np.asarray(want), rtol=1e-2, atol=1e-3 * times * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_products(kernel, times):
    """Of small whole numbers: their sums are exact, in whatever order XLA adds."""
    rng = np.random.default_rng(3)
    block, weight = (jnp.asarray(rng.integers(-4, 5, s), jnp.bfloat16) for s in ((ROWS, 8), (WIDTH, 8)))
    call = jax.jit(functools.partial(fused.matmul_partial_rms_norm, implementation=kernel))
    wants = call(block, weight, draw_scale(4, WIDTH // 2, "float32"))
    gots = call(repeated(block, times, kernel), weight, draw_scale(4, WIDTH // 2, "float32"))
    for got, want in zip(gots, wants):
        assert_repeats(got, want, times)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("token_major", "head_major"))
def test_heads(kernel, times, layout):
    call = jax.jit(functools.partial(fused.head_rms_norm_rope, copies=(("bfloat16", layout),), implementation=kernel))
    block, scale, positions = draw(5, (ROWS, HEADS, CHANNELS), "bfloat16"), draw_scale(6, CHANNELS, "float32"), jnp.arange(ROWS) * 37
    wants = call(block, scale, positions)
    gots = call(repeated(block, times, kernel), scale, jnp.tile(positions, times))
    for got, want, axis in zip(gots, wants, (0, 1 if layout == "head_major" else 0)):
        assert_repeats(got, want, times, axis)


@pytest.mark.slow
def test_cotangents_of_heads(kernel, times):
    scale, positions = draw_scale(6, CHANNELS, "float32"), jnp.arange(ROWS) * 37

    @jax.jit
    def call(x, positions):
        return jax.vjp(lambda x: fused.head_rms_norm_rope(x, scale, positions, implementation=kernel), x)[1](x)[0]

    block = draw(5, (ROWS, HEADS, CHANNELS), "bfloat16")
    assert_repeats(call(repeated(block, times, kernel), jnp.tile(positions, times)), call(block, positions), times)


@pytest.mark.slow
def test_queries_and_keys(kernel, times):
    call = jax.jit(functools.partial(fused.qk_rms_norm_rope, implementation=kernel))
    q, k = draw(7, (ROWS, HEADS, CHANNELS), "bfloat16"), draw(8, (ROWS, K_HEADS, CHANNELS), "bfloat16")
    scales, positions = [draw_scale(i, CHANNELS, "float32") for i in (9, 10)], jnp.arange(ROWS) * 37
    wants = call(q, k, *scales, positions)
    gots = call(*(repeated(a, times, kernel) for a in (q, k)), *scales, jnp.tile(positions, times))
    for got, want in zip(gots, wants):
        assert_repeats(got, want, times)


@pytest.mark.slow
def test_a_paged_cache(kernel, times):
    """Sequences of a block each, of which the last one alone has pages."""
    q, k = draw(11, (ROWS, HEADS, CHANNELS), "bfloat16"), draw(12, (ROWS, K_HEADS, CHANNELS), "bfloat16")
    scales, table = [draw_scale(i, CHANNELS, "float32") for i in (13, 14)], fused.rope_table(ROWS, CHANNELS)
    entries = -(-ROWS // PAGE)

    def call(q, k, sequences):
        page_table = np.full((sequences, entries), -1, np.int32)
        page_table[-1] = np.arange(entries)
        cache = fused.PagedKVCache(jnp.zeros((entries, 1, 1, PAGE, K_HEADS, CHANNELS), jnp.bfloat16), jnp.asarray(page_table),
                                   jnp.zeros(sequences, jnp.int32))
        op = jax.jit(functools.partial(fused.qk_rms_norm_rope_paged, layer=0, implementation=kernel))
        q_out, cache = op(q, cache, *scales, table, jnp.arange(sequences + 1, dtype=jnp.int32) * ROWS, k=k)
        return q_out, cache.pages

    want, pages = call(q, k, 1)
    got, after = call(*(repeated(a, times, kernel) for a in (q, k)), times)
    assert_repeats(got, want, times)
    assert_repeats(after, pages, 1)
