"""Positions of heads, and the angles that follow: of any integers, shape and size, from theta, from frequency factors and from a table."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import DTYPES, some
from head_calls import PLACES, arguments, check, run
from jax_fusednorm import head_rms_norm_rope, rope_table
from ops import assert_trees_close
from plain import draw

POSITIONS = (0, 1, 4095, 32767, 131071, 262143, 999999, 16777215)


def angles(implementation, positions, **options):
    """float64 [positions, pairs], as the op turns (1, 0)."""
    x = jnp.zeros((len(positions), 1, 128)).at[..., :64].set(1.0)
    turned = np.asarray(head_rms_norm_rope(x, None, positions, implementation=implementation, **options), np.float64)[:, 0]
    return np.arctan2(turned[:, 64:], turned[:, :64])


@pytest.mark.parametrize("theta", (1e4, 1e6, 1e7))
def test_angles_are_right_at_long_positions(implementation, theta):
    positions = np.array([*POSITIONS, -1, -131071, *np.random.default_rng(0).integers(0, 2**24, 8)])
    got = angles(implementation, jnp.asarray(positions), theta=theta)
    want = positions[:, None] * np.asarray(oracle.inverse_frequencies(128, theta))
    assert np.abs(np.angle(np.exp(1j * (got - want)))).max() <= 1e-6


@pytest.mark.parametrize("dtype", ("int8", "uint8", "int16", "uint16", "int32", "uint32"))
def test_positions_of_any_integer_dtype(implementation, dtype):
    top = int(jnp.iinfo(dtype).max)
    x = draw(1, (4, 2, 16))
    positions = np.array([0, 1, 100, min(top, 2**24)])
    check(implementation, [((x, None, jnp.asarray(positions, dtype)), {})])
    if dtype == "uint32":
        got = run(implementation, [((x, None, jnp.full(4, value, dtype)), {}) for value in (2**32 - 1, 2**31 - 1)])
        oracle.assert_same_bits(*got)


@pytest.mark.parametrize("far, end", ((2**40, 2**31 - 1), (2**31, 2**31 - 1), (-2**40, -2**31), (2**63 + 5, 2**31 - 1)))
def test_positions_beyond_int32_are_its_ends_though_jax_would_cut_them(implementation, far, end):
    x = draw(1, (1, 2, 16))
    want = head_rms_norm_rope(x, None, end, implementation=implementation)
    for positions in (far, [far], np.array([far], "int64" if far < 2**63 else "uint64")):
        oracle.assert_same_bits(head_rms_norm_rope(x, None, positions, implementation=implementation), want)


def test_positions_broadcast(implementation):
    x, scale, _ = arguments(16, "float32", lead=(2,))
    for positions in (7, np.arange(3), np.arange(2)[:, None], np.arange(6).reshape(2, 3), np.arange(3)[None]):
        check(implementation, [((x, scale, jnp.asarray(positions)), {})])


@pytest.mark.parametrize("traced", (False, True))
def test_frequency_factors_divide_the_angles(implementation, traced):
    factors = np.concatenate([np.ones(4), np.full(4, 1e30), [np.inf, 0.3, 8.0, 1.37, 2**-8, 60.0, 0.02, 1e-3]]).astype(np.float32)
    x, scale, _ = arguments(32, "float32", tokens=len(POSITIONS))
    args = (x, scale, jnp.asarray(POSITIONS) // 8)
    op = functools.partial(head_rms_norm_rope, implementation=implementation)
    if traced:
        got = jax.jit(lambda x, s, p, f: op(x, s, p, freq_factors=f))(*args, factors)
    else:
        got = jax.jit(functools.partial(op, freq_factors=factors))(*args)
    want, size = oracle.head_rms_norm_rope(*args, freq_factors=factors)
    oracle.assert_rotated_close(got, want, size, "float32")
    still = slice(4, 9)
    unturned = head_rms_norm_rope(x, scale, None, rope_dim=0, implementation=implementation)
    for half in (0, 16):
        oracle.assert_same_bits(np.asarray(got)[..., half:][..., still], np.asarray(unturned)[..., half:][..., still])


def test_traced_factors_that_are_no_positive_numbers_turn_nothing(implementation):
    x, _, positions = arguments(12, "float32")
    got = jax.jit(lambda f: head_rms_norm_rope(x, None, positions, freq_factors=f, implementation=implementation))(
        jnp.asarray([0.0, -1.0, jnp.nan, -jnp.inf, 1e-40, 1.0]))
    want, size = oracle.head_rms_norm_rope(x, None, positions, freq_factors=np.array([np.inf] * 5 + [1.0]))
    oracle.assert_rotated_close(got, want, size, "float32")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_table(implementation, dtype):
    """Tokens with a position outside it are zeros, whatever they hold."""
    positions = jnp.asarray([0, 9, -1, 10, 2**31 - 1, -2**31, 4])
    calls = []
    for (style, placement), (width, rope_dim) in itertools.product(PLACES, ((16, 16), (64, 16), (80, 40))):
        x, scale, _ = arguments(width, dtype, tokens=len(positions))
        x = x.at[2:6, 1].set(jnp.nan)
        calls += [((x, scale, positions), dict(style=style, placement=placement, freqs_cis=draw(8, (10, rope_dim))))]
    check(implementation, some(implementation, calls, DTYPES.index(dtype), 2))


def test_a_table_gives_what_theta_gives(implementation):
    args = arguments(64, "float32")
    table = rope_table(128, 64, theta=5e5)
    got = run(implementation, [(args, dict(freqs_cis=table)), (args, dict(theta=5e5))])
    assert_trees_close(*got, rtol=1e-6, atol=1e-6)


def test_an_empty_table(implementation):
    x, scale, positions = arguments(16, "bfloat16")
    assert (np.asarray(run(implementation, [((x, scale, positions), dict(freqs_cis=jnp.zeros((0, 16))))])[0]) == 0).all()
