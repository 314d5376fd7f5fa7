"""The kernel of head_rms_norm_rope and qk_rms_norm_rope, as a custom call, against float64 formulas written from the specification."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracle
from jax_fusednorm.core import ffi
from plain import draw, draw_scale

NEOX, INTERLEAVED, PROPORTIONAL = range(3)
EPSILON = 1e-6
MOST_COPIES = 6
POSITIONS = (0, 1, 4095, 32767, 131071, 262143, 999999, -7)
WIDTHS = (1, 2, 7, 8, 16, 30, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512, 520, 576, 1100)


@dataclasses.dataclass(frozen=True)
class Rope:
    """`pairs` pairs of a head of `width` channels, of a style, in the first channels or (suffix) the last."""

    style: int
    pairs: int
    suffix: bool = False

    def channels(self, width):
        """(the first channels of the pairs, the second ones)"""
        p, first = np.arange(self.pairs), (width - 2 * self.pairs) * self.suffix
        if self.style == INTERLEAVED:
            return first + 2 * p, first + 2 * p + 1
        return first + p, first + p + (width // 2 if self.style == PROPORTIONAL else self.pairs)

    @property
    def attributes(self):
        return dict(style=np.int32(self.style), suffix=self.suffix)


def ropes(width):
    """Every way to rotate: all channels, an even half, an odd number of pairs, none."""
    half = width // 2
    found = [Rope(style, pairs, suffix) for pairs in sorted({half, half // 2, half // 3, 0})
             for style, suffix in ((NEOX, False), (NEOX, True), (INTERLEAVED, False), (INTERLEAVED, True), (PROPORTIONAL, False))]
    return [rope for rope in found if rope.style != PROPORTIONAL or width % 2 == 0]


def inverse_frequencies(pairs, theta=1e6):
    return np.longdouble(theta) ** -(np.arange(pairs, dtype=np.longdouble) / max(pairs, 1))


def turns_of(inverse):
    """uint32 [pairs, 2]: the part of a turn that a position adds, 64 bits after the point."""
    words = [int(math.ldexp(float(f), 64)) for f in (inverse.astype(np.float64) / (2 * np.pi)) % 1.0]
    return jnp.asarray(np.array([(w >> 32, w & 0xffffffff) for w in words], np.uint32).reshape(-1, 2))


def angles_of(positions, inverse):
    """Exact to 1e-12 or so: the products have 64 bits."""
    turn = np.asarray(positions).astype(np.longdouble)[..., None] * (inverse / (2 * np.arccos(np.longdouble(-1))))
    return (2 * np.pi * (turn - np.rint(turn))).astype(np.float64)


def want_of(x, cosine, sine, rope, *, scale=None, scale_offset=0.0, multiply_before_cast=True, round_before_rope=False, epsilon=EPSILON):
    """(float64 of the result before its last rounding, the size of its summands). cosine, sine: [..., T, pairs]."""
    s = oracle.wide(x)
    with np.errstate(all="ignore"):
        y = s / np.sqrt(np.mean(s * s, -1, keepdims=True) + oracle.wide(np.float32(epsilon)))
        if not multiply_before_cast:
            y = oracle.rounded(y, x.dtype)
        if scale is not None:
            gain = oracle.wide(scale) + scale_offset
            y = y * (gain if multiply_before_cast else oracle.rounded(gain, x.dtype))
        if round_before_rope or not multiply_before_cast:
            y = oracle.rounded(y, x.dtype)
        first, second = rope.channels(x.shape[-1])
        a, b, c, s = y[..., first], y[..., second], cosine[..., None, :], sine[..., None, :]
        out, size = y.copy(), np.abs(y)
        out[..., first], out[..., second] = a * c - b * s, a * s + b * c
        size[..., first] = size[..., second] = np.abs(a) + np.abs(b)
    return out, size


@functools.cache
def compiled(launcher, copies, has_k, attributes):
    def call(x, positions, angles, *rest):
        shape = x.shape
        head_major = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        results = [jax.ShapeDtypeStruct(shape, x.dtype)]
        results += [jax.ShapeDtypeStruct(rest[0].shape, x.dtype)] if has_k else []
        results += [jax.ShapeDtypeStruct(head_major if major else shape, dtype) for dtype, major in copies]
        bits = sum(1 << i for i, (_, major) in enumerate(copies) if major)
        return ffi.Call(launcher)("head_rms_norm_rope", results, x, positions, angles, *rest, has_k=has_k, head_major=np.int64(bits),
                                  **dict(attributes))
    return jax.jit(call)


def run(launcher, x, positions, angles, rope, *rest, copies=(), has_k=False, **options):
    """All the results. rest: k, scales. copies: ((dtype, head-major), ...)."""
    options = dict(epsilon=EPSILON, scale_offset=0.0, multiply_before_cast=True, round_before_rope=False) | options | rope.attributes
    positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), x.shape[:-2])
    return compiled(launcher, copies, has_k, tuple(options.items()))(x, positions, angles, *rest)


def assert_turned(got, want, size, dtype, roundings=0, what="value"):
    """Within the last rounding and what float32 leaves of a pair; a bit more where an earlier rounding may have gone the other way."""
    got = np.asarray(got)
    assert got.dtype == np.dtype(dtype) and got.shape == want.shape, f"{what}: {got.dtype}{got.shape}"
    got, half = oracle.wide(got), {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[oracle.name_of(dtype)]  # of an ulp
    tiny = 2.0**-24 if oracle.name_of(dtype) == "float16" else np.finfo(np.float32).tiny
    error, tight = np.abs(got - want), half * np.abs(want) + 1e-6 * size + tiny
    loose = tight + 4 * half * size * bool(roundings)
    assert np.isfinite(want).all()
    for limit, some in ((loose, 0), (tight, 3e-3 * roundings * error.size + 2 * bool(roundings))):
        wrong = ~(error <= limit)
        assert wrong.sum() <= some, f"{what}: {wrong.sum()} of {wrong.size}, first got {got[wrong][0]!r}, wanted {want[wrong][0]!r}"


def ordinary(seed, shape, dtype):
    """One head of zeros and one of tiny numbers among ordinary ones: they show an epsilon left out."""
    x = np.array(draw(seed, shape, "float32"))
    heads = x.reshape(-1, shape[-1])
    heads[1:2] = 0
    heads[2:3] *= 1e-4
    return jnp.asarray(x.astype(dtype))


def check(kernel, x, rope, positions=POSITIONS, *, scale=None, **options):
    positions = np.resize(np.array(positions, np.int32), x.shape[:-2])
    inverse = inverse_frequencies(rope.pairs)
    angles = angles_of(positions, inverse)
    [got] = run(kernel, x, positions, turns_of(inverse), rope, *([] if scale is None else [scale]), **options)
    want, size = want_of(np.asarray(x), np.cos(angles), np.sin(angles), rope, scale=None if scale is None else np.asarray(scale), **options)
    rounds = x.dtype != jnp.float32
    casts = rounds * (2 * (not options.get("multiply_before_cast", True)) + options.get("round_before_rope", False))
    assert_turned(got, want, size, x.dtype, casts, f"{x.dtype}{list(x.shape)} {rope} {options}")


# ---- numbers

@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_way_to_rotate(kernel, dtype, width):
    x, scale = ordinary(1, (8, 5, width), dtype), draw_scale(2, width, "float32")
    for rope in ropes(width):
        check(kernel, x, rope, scale=scale)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", (80, 128, 100))
def test_every_cast_order_and_scale(kernel, dtype, width):
    x = ordinary(3, (8, 7, width), dtype)
    for scale_dtype in (None, "float32", dtype):
        scale = draw_scale(4, width, scale_dtype)
        for multiply_before_cast, round_before_rope in ((True, False), (True, True), (False, True)):
            for rope in (Rope(NEOX, width // 2), Rope(INTERLEAVED, width // 4)):
                check(kernel, x, rope, scale=scale, scale_offset=0.0 if scale is None else 1.0, multiply_before_cast=multiply_before_cast,
                      round_before_rope=round_before_rope)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_what_does_not_turn_depends_on_no_other_channel(kernel, dtype):
    """To turn it by no angle would not do: a partner that is inf would make it nan, and -0 would become 0. Pairs that end within a pack."""
    for width, rope in ((128, Rope(PROPORTIONAL, 20)), (128, Rope(NEOX, 20, True)), (64, Rope(INTERLEAVED, 13)), (30, Rope(PROPORTIONAL, 5))):
        still = np.setdiff1d(np.arange(width), np.concatenate(rope.channels(width)))
        x = np.array(draw(5, (4, 5, width), "float32"))
        x[..., still[::3]] *= -0.0
        x = jnp.asarray(x.astype(dtype))
        for infinite in (still[:len(still) // 2], still[len(still) // 2:]):
            scale = jnp.ones(width).at[infinite].set(jnp.inf)
            [turned], [plain] = (run(kernel, x, POSITIONS[:4], turns_of(inverse_frequencies(r.pairs)), r, scale) for r in (rope, Rope(rope.style, 0)))
            oracle.assert_same_bits(np.asarray(turned)[..., still], np.asarray(plain)[..., still], what=f"{width} {rope}")
            assert np.isfinite(np.delete(oracle.wide(turned), infinite, -1)).all()


@pytest.mark.parametrize("theta", (1e4, 1e6, 1e7))
def test_angles_stay_right_at_long_positions(kernel, theta):
    """Where the first channels of a head are 1 and the rest 0, and every step to the rotation is exact, it gives cosines and sines."""
    pairs, rng = 64, np.random.default_rng(5)
    x = jnp.zeros((512, 1, 4 * pairs)).at[..., :pairs].set(1.0)  # their mean square is a quarter
    inverse = inverse_frequencies(pairs, theta)
    for most, error in ((1 << 24, 1e-6), (1 << 31, 3e-6)):
        positions = rng.integers(-most, most, 512).astype(np.int32)
        [got] = run(kernel, x, positions, turns_of(inverse), Rope(NEOX, pairs), jnp.full(4 * pairs, 0.5), epsilon=0.0)
        angles = angles_of(positions, inverse)
        cosine, sine = oracle.wide(got)[:, 0, :pairs], oracle.wide(got)[:, 0, pairs:2 * pairs]
        off = np.angle((cosine + 1j * sine) * np.exp(-1j * angles))
        assert np.abs(off).max() <= error
        if most == 1 << 24:
            assert np.abs(cosine - np.cos(angles)).max() <= 1.3e-7 and np.abs(sine - np.sin(angles)).max() <= 1.3e-7


def test_the_polynomials_hold_all_around_the_circle(kernel):
    """Every turn of 18 bits, and the turns next to the quarters' and eighths' borders."""
    borders = (np.arange(-40, 41) + (np.arange(9, dtype=np.int64)[:, None] << 29)).ravel() % (1 << 32)
    turn = np.concatenate([np.arange(1 << 18, dtype=np.int64) << 14, borders])
    pairs = 256
    turn = np.resize(turn, (-(-turn.size // pairs), pairs))
    x = jnp.zeros((1, 1, 4 * pairs)).at[..., :pairs].set(1.0)
    first, last = (turn.shape[0] - 1) * cases.STAND_IN * (kernel == "metal"), turn.shape[0]
    for row in turn[first:last:16 if kernel == "jnp" else 1]:
        table = jnp.asarray(np.stack([row, np.zeros_like(row)], -1).astype(np.uint32))
        [got] = run(kernel, x, 1, table, Rope(NEOX, pairs), jnp.full(4 * pairs, 0.5), epsilon=0.0)
        angle = row / 2.0**32 * 2 * np.pi
        got = oracle.wide(got)[0, 0]
        assert np.abs(got[:pairs] - np.cos(angle)).max() <= 1.3e-7 and np.abs(got[pairs:2 * pairs] - np.sin(angle)).max() <= 1.3e-7


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", (64, 128, 30, 600))
def test_a_table_is_used_as_it_is_and_a_position_outside_it_gives_zeros(kernel, dtype, width):
    rows = 9
    positions = np.array([0, 8, 9, -1, 3, 2**31 - 1, -2**31, 5], np.int32)
    inside = (positions >= 0) & (positions < rows)
    x = ordinary(6, (8, 5, width), dtype)
    hostile = x.at[2].set(jnp.nan)
    for rope in (Rope(NEOX, width // 2), Rope(INTERLEAVED, width // 2), Rope(NEOX, width // 6, suffix=True)):
        table = np.random.default_rng(7).standard_normal((rows, rope.pairs, 2)).astype(np.float32)
        cosine, sine = np.moveaxis(oracle.wide(table)[np.where(inside, positions, 0)], -1, 0)
        got, copy = run(kernel, hostile, positions, jnp.asarray(table.reshape(rows, -1)), rope, copies=((jnp.dtype("float32"), True),))
        want, size = want_of(np.asarray(x), cosine, sine, rope)
        assert_turned(np.asarray(got)[inside], want[inside], size[inside] * (1 + np.abs(table).max()), dtype)
        assert not np.asarray(got)[~inside].any() and not np.asarray(copy)[:, ~inside].any()


# ---- what a result does not depend on

@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", (40, 128))
def test_q_and_k_in_one_call_are_two_calls(kernel, dtype, width):
    scales = [draw_scale(i, width, "float32") for i in (8, 9)]
    rope, angles = Rope(NEOX, width // 4), turns_of(inverse_frequencies(width // 4))
    for q_heads, k_heads in ((5, 2), (1, 1), (8, 8), (3, 0), (0, 3)):
        q, k = draw(10, (2, 3, q_heads, width), dtype), draw(11, (2, 3, k_heads, width), dtype)
        positions = np.arange(6, dtype=np.int32).reshape(2, 3) * 1000
        for some in (scales, []):
            both = run(kernel, q, positions, angles, rope, k, *some, has_k=True)
            for got, x, scale in zip(both, (q, k), some or ([], [])):
                oracle.assert_same_bits(got, run(kernel, x, positions, angles, rope, *([scale] if some else []))[0])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", (96, 128, 7))
def test_copies_hold_the_same_value_in_another_dtype_or_order(kernel, dtype, width):
    x, scale = ordinary(12, (2, 3, 5, width), dtype), draw_scale(13, width, dtype)
    positions = np.arange(6, dtype=np.int32).reshape(2, 3) * 777
    rope, angles = Rope(NEOX, width // 2), turns_of(inverse_frequencies(width // 2))
    [alone] = run(kernel, x, positions, angles, rope, scale)
    kinds = [(jnp.dtype(d), major) for d in cases.DTYPES for major in (False, True)]
    assert len(kinds) == MOST_COPIES
    for copies in (kinds[:1], kinds[1:2], kinds[::-1], kinds[2:5]):
        value, *_ = run(kernel, x, positions, angles, rope, scale, copies=(kinds[0],))[1:]
        got, *made = run(kernel, x, positions, angles, rope, scale, copies=tuple(copies))
        oracle.assert_same_bits(got, alone)
        oracle.assert_same_bits(got, np.asarray(value).astype(got.dtype))
        for copy, (copy_dtype, major) in zip(made, copies):
            want = np.asarray(value).astype(copy_dtype)
            oracle.assert_same_bits(copy, want.swapaxes(1, 2) if major else want, f"{copy_dtype} {major}")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("width", (64, 80, 256, 520))
def test_a_heads_bits_depend_on_nothing_else(kernel, dtype, width):
    """Neither on how many tokens and heads there are, nor on its place among them."""
    tokens, heads = 17, 9
    x, scale = draw(14, (tokens, heads, width), dtype), draw_scale(15, width, "float32")
    rope, angles = Rope(INTERLEAVED, width // 2), turns_of(inverse_frequencies(width // 2))
    positions = np.arange(tokens, dtype=np.int32) * 31
    [whole] = run(kernel, x, positions, angles, rope, scale)
    for t, h in ((0, 0), (16, 8), (5, 3)):
        oracle.assert_same_bits(run(kernel, x[t:t + 1, h:h + 1], positions[t:t + 1], angles, rope, scale)[0], whole[t:t + 1, h:h + 1])
        oracle.assert_same_bits(run(kernel, x[t:, h:], positions[t:], angles, rope, scale)[0], whole[t:, h:])


@pytest.mark.parametrize("dtype, width, heads, rope", (
    ("bfloat16", 128, (5, 6), Rope(NEOX, 64)), ("float32", 40, (2, 1), Rope(INTERLEAVED, 10, suffix=True)), ("float16", 520, (2, 1), Rope(NEOX, 65))),
    ids=lambda value: value if isinstance(value, str) else "")
def test_a_team_that_walks_all_heads_of_a_token_agrees_with_those_that_share_it(kernel, dtype, width, heads, rope):
    """With so many tokens a GPU gives each to one team, and with few to many."""
    tokens = 4200 if kernel == "cuda" else 2100
    _, runs = cases.repeated(kernel, tokens, 20)
    q, k = (draw(i, (tokens, n, width), dtype) for i, n in enumerate(heads))
    scales = [draw_scale(i, width, dtype) for i in (26, 27)]
    inverse, positions = inverse_frequencies(rope.pairs), np.arange(tokens, dtype=np.int32)

    def call(some):
        return run(kernel, q[some], positions[some], turns_of(inverse), rope, k[some], *scales, has_k=True)

    both = call(slice(None))
    angles = angles_of(positions, inverse)
    for got, x, scale in zip(both, (q, k), scales):
        assert_turned(got, *want_of(np.asarray(x), np.cos(angles), np.sin(angles), rope, scale=np.asarray(scale)), dtype)
    for i in (0, tokens // 2, tokens - 1):
        for whole, alone in zip(both, call(slice(i, i + 1))):
            oracle.assert_same_bits(alone[0], whole[i])
    for _ in range(runs):
        for got, first in zip(call(slice(None)), both):
            oracle.assert_same_bits(got, first)


# ---- what is at the edge

@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", (30, 64, 128))
def test_what_is_not_finite_stays_in_its_head(kernel, dtype, width):
    x = draw(18, (4, 6, width), dtype)
    bad = x.at[1, 2, 0].set(jnp.nan).at[2, 5, width - 1].set(jnp.inf)
    for rope in (Rope(NEOX, width // 2), Rope(INTERLEAVED, width // 4), Rope(PROPORTIONAL, width // 4)):
        angles = turns_of(inverse_frequencies(rope.pairs))
        [clean], [got] = (run(kernel, a, np.arange(4), angles, rope) for a in (x, bad))
        got, others = np.asarray(got), np.ones((4, 6), bool)
        others[1, 2] = others[2, 5] = False
        oracle.assert_same_bits(got[others], np.asarray(clean)[others])
        assert np.isnan(got[1, 2]).all()
        # inf * 0: the channel itself and, where it turns, its partner; all else is 0
        first, second = (list(c) for c in rope.channels(width))
        pairs = dict(zip(first + second, second + first))
        nan = np.isin(np.arange(width), [width - 1, pairs.get(width - 1, width - 1)])
        np.testing.assert_array_equal(np.isnan(got[2, 5]), nan)
        assert not got[2, 5][~nan].any()


@pytest.mark.parametrize("shape", ((0, 3, 16), (3, 0, 16), (2, 0, 4, 16), (0, 2, 4, 16)))
def test_nothing_is_made_of_nothing(kernel, shape):
    x = jnp.zeros(shape, jnp.bfloat16)
    got, copy = run(kernel, x, 0, turns_of(inverse_frequencies(8)), Rope(NEOX, 8), copies=((jnp.dtype("float32"), True),))
    assert got.shape == shape and copy.size == 0


def test_what_does_not_fit_is_refused(kernel):
    x, rope, angles = jnp.ones((2, 3, 16)), Rope(NEOX, 8), turns_of(inverse_frequencies(8))
    copies = ((jnp.dtype("float32"), False),)
    for message, *rest in (
            ("the scale has 15 elements, but 16 were wanted", x, 0, angles, rope, jnp.ones(15)),
            ("the scale must be float32 or of x's dtype", x, 0, angles, rope, jnp.ones(16, jnp.bfloat16)),
            ("more pairs than channels", x, 0, turns_of(inverse_frequencies(9)), rope),
            ("the angles must be turns", x, 0, angles.astype(jnp.int32), rope),
            ("no such pairs", x, 0, angles, Rope(PROPORTIONAL, 8, suffix=True)),
            ("no such pairs", x, 0, angles, Rope(3, 8))):
        with pytest.raises(Exception, match=f"head_rms_norm_rope: {message}"):
            jax.block_until_ready(run(kernel, *rest))
    with pytest.raises(Exception, match="more than 6 copies"):
        jax.block_until_ready(run(kernel, x, 0, angles, rope, copies=7 * copies))
    with pytest.raises(Exception, match="k and its one result must have x's dtype, tokens and width"):
        jax.block_until_ready(run(kernel, x, 0, angles, rope, jnp.ones((2, 3, 8)), has_k=True))
