"""The kernel of heads lane by lane, as a GPU would run it, and at every level of the host."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracle
from plain import draw, draw_scale
from test_head_kernels import (
    EPSILON, INTERLEAVED, NEOX, POSITIONS, PROPORTIONAL, Rope, angles_of, assert_turned, inverse_frequencies, ordinary, run, turns_of, want_of)

# ---- the order of the f32 sum

def fused(a, b, c):
    """float32 a * b + c, rounded once."""
    product, c = oracle.wide(a) * oracle.wide(b), oracle.wide(c)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    # rounded to odd, so that float32's is the only rounding
    even = (total.view(np.uint64) & 1) == 0
    total = np.where((lost != 0) & even, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
    return total.astype(np.float32)


def replayed(x, cosine, sine, rope, scale):
    """SPEC 4.3 and 4.4 in float32, one rounding after the other."""
    width = x.shape[-1]
    slots = min(256, 1 << (width - 1).bit_length())
    sums = np.zeros((*x.shape[:-1], slots), np.float32)
    for start in range(0, width, slots):
        part = x[..., start:start + slots]
        sums[..., :part.shape[-1]] = fused(part, part, sums[..., :part.shape[-1]])
    while slots > 1:
        slots //= 2
        sums = sums[..., :slots] + sums[..., slots:]
    r = np.float32(1) / np.sqrt(sums / np.float32(width) + np.float32(EPSILON))
    y = x * r * scale
    first, second = rope.channels(width)
    a, b, c, s = y[..., first], y[..., second], cosine[..., None, :], sine[..., None, :]
    c, s = np.broadcast_to(c, a.shape), np.broadcast_to(s, a.shape)
    y[..., first], y[..., second] = fused(a, c, -(b * s)), fused(a, s, b * c)
    return y


@pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
@pytest.mark.parametrize("width", (8, 16, 64, 80, 128, 192, 256, 512, 576))
def test_the_float32_sum_and_rotation_keep_their_order(standin, width):
    x, scale = np.asarray(draw(19, (6, 5, width), spread=3.0)), np.asarray(draw_scale(20, width, "float32"))
    for rope in (Rope(NEOX, width // 2), Rope(PROPORTIONAL, width // 4), Rope(INTERLEAVED, width // 2)):
        table = np.random.default_rng(21).standard_normal((6, rope.pairs, 2)).astype(np.float32)
        [got] = run("metal", jnp.asarray(x), np.arange(6), jnp.asarray(table.reshape(6, -1)), rope, jnp.asarray(scale))
        oracle.assert_same_bits(got, replayed(x, table[..., 0], table[..., 1], rope, scale))
    assert standin.complaints() == []


# ---- what a GPU is asked to do

@pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("width", (64, 80, 100, 128, 256, 600))
def test_one_dispatch_without_barriers_whatever_copies_are_wanted(standin, dtype, width):
    x, scale = draw(22, (3, 9, width), dtype), draw_scale(23, width, dtype)
    rope, angles = Rope(NEOX, width // 2), turns_of(inverse_frequencies(width // 2))
    kinds = tuple((jnp.dtype(d), major) for d in cases.DTYPES for major in (False, True))
    results = []
    for copies in ((), kinds[2:3], kinds):
        for order in ((1, 0), (2, 3)):  # whatever order the lanes run in
            standin.reset()
            standin.seed(*order)
            made = jax.block_until_ready(run("metal", x, np.arange(3), angles, rope, scale, copies=copies))
            results.append(made[0])
            done = standin.dispatched()
            assert standin.dispatched(1) is None and standin.complaints() == []
            assert (done.barriers, done.threadgroup_memory.read, done.threadgroup_memory.written) == (0, 0, 0)
            wrote = [done.buffers[i].written for i in (6, *range(8, 8 + len(copies)))]
            assert wrote == [a.nbytes for a in made]
            if "halves" in done.kernel.decode():  # the spare threads of a walk read its last head, too
                v, r, _, _ = standin.shape(width, x.dtype.itemsize, head=True)
                heads, at_once = x.shape[-2], 32 * v * r // width
                assert done.buffers[0].read == x.nbytes * -(-heads // at_once) * at_once // heads
            assert done.buffers[0].unique_read == x.nbytes
    for got in results:
        oracle.assert_same_bits(got, results[0])


@pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
def test_pairs_are_found_in_the_threads_own_registers_where_they_can_be(standin):
    for dtype, width, rope, pairs in (
            ("bfloat16", 128, Rope(NEOX, 64), "halves, 8, 2"), ("bfloat16", 96, Rope(NEOX, 48), "halves, 4, 6"),
            ("bfloat16", 80, Rope(PROPORTIONAL, 8), "halves, 2, 10"), ("float32", 128, Rope(NEOX, 64), "halves, 1, 4"),
            ("bfloat16", 256, Rope(INTERLEAVED, 32, suffix=True), "adjacent, 8, 2"), ("bfloat16", 256, Rope(NEOX, 32), "halves, 8, 2"),
            ("bfloat16", 192, Rope(NEOX, 32, suffix=True), "halves, 4, 6"), ("bfloat16", 256, Rope(NEOX, 24), "apart, 8, 2"),
            ("bfloat16", 192, Rope(NEOX, 64, suffix=True), "apart, 4, 6"), ("float32", 128, Rope(NEOX, 32), "apart, 1, 4"),
            ("float32", 128, Rope(INTERLEAVED, 64), "apart, 1, 4"), ("bfloat16", 576, Rope(INTERLEAVED, 288), "adjacent, 2, 9"),
            ("bfloat16", 7, Rope(NEOX, 3), "apart, 1, 0")):
        standin.reset()
        jax.block_until_ready(run("metal", draw(24, (2, 3, width), dtype), 5, turns_of(inverse_frequencies(rope.pairs)), rope))
        assert f"{pairs}, 1, 2>" in standin.dispatched().kernel.decode()


@pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
def test_few_tokens_are_spread_over_many_simdgroups_and_a_token_s_angles_are_read_once_by_each(standin):
    width, heads, k_heads, pairs = 128, 9, 3, 64  # three walks over the heads of x, and one over those of k
    inverse, rope, scales = inverse_frequencies(pairs), Rope(NEOX, pairs), [draw_scale(i, width, "bfloat16") for i in (30, 31)]
    for tokens, parts in ((1, 4), (700, 2), (1100, 1)):
        x, k, positions = draw(28, (tokens, heads, width), "bfloat16"), draw(29, (tokens, k_heads, width), "bfloat16"), np.arange(tokens) * 31
        standin.reset()
        both = jax.block_until_ready(run("metal", x, positions, turns_of(inverse), rope, k, *scales, has_k=True))
        done, angles = standin.dispatched(), angles_of(positions, inverse)
        assert (done.groups, done.threads) == (-(-tokens * parts // 2), 64)
        assert done.buffers[3].read == tokens * parts * pairs * 8
        for got, a, scale in zip(both, (x, k), scales):
            assert_turned(got, *want_of(np.asarray(a), np.cos(angles), np.sin(angles), rope, scale=np.asarray(scale)), "bfloat16")


# ---- instruction sets

class Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in (
        "tokens", "sequence", "heads", "k_heads", "width", "x_stride", "x_start", "k_stride", "k_start", "lanes", "at_once", "x_walks", "k_walks",
        "parts", "pairs", "first", "distance", "interleaved", "table", "table_rows", "scale", "copies", "copy_types", "head_major")] + [
            ("epsilon", ctypes.c_float), ("scale_offset", ctypes.c_float)]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("level", ("v2", "v3", "v4"))
def test_every_level_of_the_host_agrees_with_float64(host_library, level, dtype):
    code = 2 + ("float32", "bfloat16", "float16").index(dtype)
    for width, interleaved in ((128, 0), (128, 1), (22, 0), (7, 1)):
        rope = Rope(INTERLEAVED if interleaved else NEOX, width // 2)
        x, positions = np.asarray(ordinary(25, (8, 5, width), dtype)), np.array(POSITIONS, np.int32)
        inverse, out = inverse_frequencies(rope.pairs), np.zeros_like(x)
        turns = np.asarray(turns_of(inverse))
        params = Params(8, 8, 5, 0, width, 5 * width, 0, 0, 0, 1, 1, 5, 0, 1, rope.pairs, 0, 1 if interleaved else rope.pairs, interleaved, epsilon=EPSILON)
        addresses = [a.ctypes.data for a in (x, x, positions, turns, x, x, *8 * [out])]
        scratch = np.empty(4 * width, np.float32)
        ran = host_library.jax_fusednorm_run_host_kernel(
            b"head_rms_norm_rope", (ctypes.c_ubyte * 8)(code, 0, 0, 7 if interleaved else 8), level.encode(),
            (ctypes.c_void_p * 15)(*addresses, ctypes.addressof(params)), scratch.ctypes.data_as(ctypes.c_void_p), 8)
        if not ran:
            pytest.skip(f"this processor has no {level}")
        angles = angles_of(positions, inverse)
        assert_turned(out, *want_of(x, np.cos(angles), np.sin(angles), rope), dtype)
