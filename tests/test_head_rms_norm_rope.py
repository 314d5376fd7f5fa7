"""head_rms_norm_rope and qk_rms_norm_rope against the float64 oracle: every width, style and order of casts, copies, and a head's bits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import DTYPES, SCALE_DTYPES, some
from head_calls import PLACES, arguments, check, run
from jax_fusednorm import head_rms_norm_rope, qk_rms_norm_rope
from plain import draw, draw_scale

WIDTHS = (2, 8, 16, 30, 64, 80, 96, 128, 160, 256, 512, 576)


def rope_dims(width):
    return sorted({width, width // 4 * 2, width // 8 * 2, 0})


@pytest.mark.parametrize("place", PLACES, ids=lambda value: value if isinstance(value, str) else "-".join(value))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_and_rope_dim(implementation, dtype, place):
    style, placement = place
    cases = [(width, rope_dim) for width in WIDTHS for rope_dim in rope_dims(width)]
    cases = some(implementation, cases, 3 * PLACES.index(place) + DTYPES.index(dtype), 6)
    check(implementation, [(arguments(width, dtype), dict(style=style, placement=placement, rope_dim=rope_dim)) for width, rope_dim in cases])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_and_order_of_casts(implementation, dtype):
    casts = (dict(), dict(round_before_rope=True), dict(multiply_before_cast=False))
    calls = [(arguments(width, dtype, tokens=9, scale_dtype=scale_dtype),
              dict(scale_offset=float(i % 2) if scale_dtype else 0.0, style=style, **order))
             for i, (order, scale_dtype) in enumerate(itertools.product(casts, SCALE_DTYPES)) for width, style in ((64, "neox"), (24, "interleaved"))]
    check(implementation, some(implementation, calls, 0, 2))


def test_decode_batches(implementation):
    x = draw(3, (5, 1, 4, 64), "bfloat16")
    check(implementation, [((x, draw_scale(4, 64, "bfloat16"), jnp.asarray([[3], [0], [77], [4095], [12]])), {})])


@pytest.mark.parametrize("shape", ((0, 3, 16), (2, 0, 16), (0, 2, 3, 16), (1, 1, 16), (65, 1, 16), (1, 33, 16), (7, 5, 1, 16)))
def test_any_number_of_tokens_and_heads(implementation, shape):
    x = draw(5, shape, "bfloat16")
    check(implementation, [((x, draw_scale(6, 16, "float32"), jnp.arange(shape[-3])), dict(theta=500.0))])


def test_the_partner_of_a_partly_rotated_head(implementation):
    """Channel 11 of 512 turns with 267, by an angle whose exponent is 22 / 512."""
    x = jnp.zeros((1, 1, 512)).at[..., 11].set(1.0)
    got = np.asarray(run(implementation, [((x, None, jnp.asarray([9])), dict(theta=1e6, rope_dim=128, style="proportional"))])[0])[0, 0]
    angle = 9 / 1e6 ** (22 / 512)
    assert set(np.flatnonzero(got)) == {11, 267}
    np.testing.assert_allclose(got[[11, 267]], np.array([np.cos(angle), np.sin(angle)]) / np.sqrt(1 / 512 + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_of_the_same_values(implementation, dtype):
    copies = tuple(itertools.product(DTYPES, ("token_major", "head_major")))
    for style, lead in (("neox", ()), ("interleaved", (2,))):
        args = arguments(64, dtype, tokens=5, lead=lead)
        (out, *made), alone = run(implementation, [(args, dict(copies=(*copies, copies[1]), style=style)), (args, dict(style=style))])
        oracle.assert_same_bits(out, alone)
        want, size = oracle.head_rms_norm_rope(*args, style=style)
        for (copy_dtype, layout), copy in zip((*copies, copies[1]), made, strict=True):
            natural = copy if layout == "token_major" else np.swapaxes(copy, -2, -3)
            oracle.assert_rotated_close(natural, want, size, copy_dtype, what=f"{copy_dtype} {layout}")
            if copy_dtype == dtype:
                oracle.assert_same_bits(natural, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_values_stay_in_their_head(implementation, dtype):
    x, scale, positions = arguments(64, dtype, tokens=4)
    clean = run(implementation, [((x, scale, positions), {})])[0]
    for value in (np.nan, np.inf, -np.inf):
        got = run(implementation, [((x.at[1, 2, 5].set(value), scale, positions), {})])[0]
        assert np.isnan(np.asarray(got, np.float32)[1, 2]).any()
        others = np.ones(x.shape[:2], bool)
        others[1, 2] = False
        oracle.assert_same_bits(np.asarray(got)[others], np.asarray(clean)[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_head_alone(kernel, dtype):
    """Not on the number of tokens and heads, nor on where among them it is."""
    for width, style in ((64, "neox"), (80, "interleaved")):
        x, scale, _ = arguments(width, dtype, tokens=40, heads=8)
        positions = jnp.arange(40)
        whole, one, some_ = run(kernel, [((x, scale, positions), dict(style=style)), ((x[7:8, 3:4], scale, positions[7:8]), dict(style=style)),
                                                 ((x[5:18, 2:5], scale, positions[5:18]), dict(style=style))])
        oracle.assert_same_bits(one, np.asarray(whole)[7:8, 3:4])
        oracle.assert_same_bits(some_, np.asarray(whole)[5:18, 2:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys(implementation, dtype):
    positions = jnp.asarray([[0, 1, 2], [40, 41, 42]])
    scales = draw_scale(3, 64, "float32"), draw_scale(4, 64, dtype)
    for heads, scales in (((4, 2), scales), ((3, 3), (scales[1],) * 2), ((8, 1), (None, None)), ((2, 0), (None, scales[1]))):
        q, k = (draw(i, (2, 3, h, 64), dtype) for i, h in enumerate(heads))
        options = dict(theta=1e6)
        got = run(implementation, [((q, k, *scales, positions), options)], qk_rms_norm_rope)[0]
        for out, x, scale in zip(got, (q, k), scales):
            want, size = oracle.head_rms_norm_rope(x, scale, positions, **options)
            oracle.assert_rotated_close(out, want, size, dtype)


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x = draw(1, (4, 3, 24)).astype(jnp.float64) * (1 + 1e-9 * jnp.arange(24))
        scale, positions = draw_scale(2, 24, "float32"), jnp.asarray([0, 5, 131071, 2**24])
        for style in ("neox", "interleaved"):
            got = jax.jit(functools.partial(head_rms_norm_rope, style=style))(x, scale, positions)
            want, size = oracle.head_rms_norm_rope(x, scale, positions, style=style)
            oracle.assert_rotated_close(got, want, size, "float64")
        ends = [head_rms_norm_rope(x, scale, jnp.full(4, position)) for position in (2**40, 2**31 - 1, -2**40, -2**31)]
        oracle.assert_same_bits(ends[0], ends[1])
        oracle.assert_same_bits(ends[2], ends[3])
