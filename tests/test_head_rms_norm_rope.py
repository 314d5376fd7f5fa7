"""head_rms_norm_rope and qk_rms_norm_rope against the float64 oracle: every width, style, position and option."""

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import plain
from cases import DTYPES, SCALE_DTYPES, some
from jax_fusednorm import EXPORT_CHECKS, head_rms_norm_rope, qk_rms_norm_rope, rope_table
from ops import assert_trees_close, kernel_calls, kernels_expected, loss
from plain import draw, draw_scale

WIDTHS = (2, 8, 16, 30, 64, 80, 96, 128, 160, 256, 512, 576)
PLACES = (("neox", "prefix"), ("neox", "suffix"), ("interleaved", "prefix"), ("interleaved", "suffix"), ("proportional", "prefix"))
POSITIONS = (0, 1, 4095, 32767, 131071, 262143, 999999, 16777215)


def rope_dims(width):
    return sorted({width, width // 4 * 2, width // 8 * 2, 0})


def run(implementation, calls, op=head_rms_norm_rope):
    """One compilation for many calls (args, options)."""
    options = [o for _, o in calls]
    return jax.jit(lambda args: [op(*a, implementation=implementation, **o) for a, o in zip(args, options)])([a for a, _ in calls])


def check(implementation, calls):
    for (args, options), got in zip(calls, run(implementation, calls)):
        want, size = oracle.head_rms_norm_rope(*args, **options)
        before = options.get("round_before_rope") or not options.get("multiply_before_cast", True)
        oracle.assert_rotated_close(got, want, size, args[0].dtype, rounded_before=before, what=f"{args[0].shape} {options}")


def arguments(width, dtype, *, tokens=3, heads=3, scale_dtype="float32", positions=None, lead=()):
    x = draw(1, (*lead, tokens, heads, width), dtype, spread=1.0)
    return x, draw_scale(2, width, scale_dtype), jnp.asarray(np.arange(tokens) * 37 + 5 if positions is None else positions)


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
    calls = [(arguments(width, dtype, tokens=9, scale_dtype=scale_dtype), dict(scale_offset=float(i % 2) if scale_dtype else 0.0, style=style, **order))
             for i, (order, scale_dtype) in enumerate(itertools.product(casts, SCALE_DTYPES)) for width, style in ((64, "neox"), (24, "interleaved"))]
    check(implementation, some(implementation, calls, 0, 2))


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


def test_one_kernel_for_everything(implementation):
    x, scale, positions = arguments(64, "bfloat16")
    op = functools.partial(head_rms_norm_rope, implementation=implementation, copies=(("float32", "head_major"), ("bfloat16", "token_major")))
    assert kernel_calls(op, x, scale, positions) == kernels_expected(implementation)
    both = functools.partial(qk_rms_norm_rope, implementation=implementation)
    assert kernel_calls(both, x, x, scale, scale, positions) == kernels_expected(implementation)


# ---- transforms ----

def formula(x, scale, positions, style="neox", placement="prefix", rope_dim=None, freqs_cis=None):
    """The textbook, for JAX to differentiate."""
    width = x.shape[-1]
    rope_dim = width if rope_dim is None else rope_dim
    y = plain.rms_norm(x.astype(jnp.float32), scale)
    if freqs_cis is None:
        angle = positions[..., None].astype(jnp.float32) * np.asarray(
            oracle.inverse_frequencies(rope_dim, 1e4, width if style == "proportional" else None), np.float32)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
    else:
        cos, sin = freqs_cis[positions, ::2], freqs_cis[positions, 1::2]
    a, b = np.asarray(oracle.pairs_of(width, rope_dim, style, placement)).T
    c, s = cos[..., None, :], sin[..., None, :]
    return y.at[..., a].set(y[..., a] * c - y[..., b] * s).at[..., b].set(y[..., a] * s + y[..., b] * c).astype(x.dtype)


@pytest.mark.parametrize("style, rope_dim", (("neox", 8), ("interleaved", 4)))
def test_derivatives(implementation, style, rope_dim):
    x, scale, positions = arguments(8, "float32", lead=(2,))
    options = dict(style=style, rope_dim=rope_dim)

    def ours(x, scale):
        return head_rms_norm_rope(x, scale, positions, implementation=implementation, **options),

    def theirs(x, scale):
        return formula(x, scale, positions, **options),

    for derivative in (lambda f: jax.grad(loss(f), (0, 1)), lambda f: lambda *a: jax.jvp(f, a, (jnp.cos(a[0]), jnp.sin(a[1])))[1],
                       lambda f: jax.jacfwd(jax.grad(loss(f), 1), 1)):
        assert_trees_close(jax.jit(derivative(ours))(x, scale), jax.jit(derivative(theirs))(x, scale), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_derivatives_take_roundings_for_the_identity(implementation, dtype):
    x, scale, positions = arguments(16, dtype, tokens=9)
    cotangent = draw(3, x.shape, dtype)
    casts = (dict(), dict(round_before_rope=True), dict(multiply_before_cast=False))
    calls = [dict(style=style, placement=placement, rope_dim=8, **cast) for (style, placement), cast in zip(PLACES, (*casts, *casts))]

    @jax.jit
    def ours(x, scale):
        return [jax.vjp(lambda x, s: head_rms_norm_rope(x, s, positions, implementation=implementation, **options), x, scale)[1](cotangent)
                for options in calls]

    for options, (of_x, of_scale) in zip(calls, ours(x, scale)):
        places = {k: options[k] for k in ("style", "placement", "rope_dim")}
        wanted, of_scale_wanted = jax.vjp(lambda x, s: formula(x, s, positions, **places), *(a.astype(jnp.float32) for a in (x, scale)))[1](
            cotangent.astype(jnp.float32))
        assert of_x.dtype == x.dtype
        unit = float(jnp.finfo(dtype).eps)
        # the norm in x's dtype is a factor of the scale's cotangent, the scale in that dtype of x's
        np.testing.assert_allclose(of_x.astype(jnp.float32), wanted, rtol=2 * unit, atol=unit, err_msg=str(options))
        assert_trees_close(of_scale, of_scale_wanted, rtol=1e-2, atol=1e-2, what=str(options))


def test_frequency_factors_are_a_constant(implementation):
    x, scale, positions = arguments(8, "float32")
    op = functools.partial(head_rms_norm_rope, implementation=implementation)
    gradient = jax.jit(jax.grad(lambda factors: jnp.sin(op(x, scale, positions, freq_factors=factors)).sum()))(jnp.ones(4))
    oracle.assert_same_bits(gradient, np.zeros(4, np.float32))


def test_derivatives_of_a_table_and_of_copies(implementation):
    x, scale, positions = arguments(8, "float32")
    table = rope_table(128, 8)

    def ours(x, table):
        out, copy = head_rms_norm_rope(x, scale, positions, freqs_cis=table, implementation=implementation, copies=(("float32", "head_major"),))
        return out, jnp.swapaxes(copy, -2, -3)

    def theirs(x, table):
        return (formula(x, scale, positions, freqs_cis=table),) * 2

    got, want = (jax.grad(loss(f), (0, 1))(x, table) for f in (ours, theirs))
    assert_trees_close(got, want, rtol=1e-4, atol=1e-4)


def test_derivatives_of_queries_and_keys(implementation):
    q, k = draw(1, (3, 4, 8)), draw(2, (3, 2, 8))
    scales = draw_scale(3, 8, "float32"), draw_scale(4, 8, "float32")
    positions = jnp.arange(3)

    def ours(q, k, *scales):
        return qk_rms_norm_rope(q, k, *scales, positions, implementation=implementation)

    def theirs(q, k, *scales):
        return formula(q, scales[0], positions), formula(k, scales[1], positions)

    got, want = (jax.grad(loss(f), (0, 1, 2, 3))(q, k, *scales) for f in (ours, theirs))
    assert_trees_close(got, want, rtol=1e-4, atol=1e-4)


def test_positions_have_no_tangent(implementation):
    x, scale, positions = arguments(8, "float32")
    op = functools.partial(head_rms_norm_rope, implementation=implementation)
    zero = np.zeros(positions.shape, jax.dtypes.float0)
    _, tangent = jax.jvp(op, (x, scale, positions), (x, scale, zero))
    assert_trees_close(tangent, jax.jvp(lambda x, s: op(x, s, positions), (x, scale), (x, scale))[1])
    assert jax.grad(lambda x, s, p: op(x, s, p).sum(), 2, allow_int=True)(x, scale, positions).dtype == jax.dtypes.float0


def test_vmap_over_every_argument(implementation):
    op = functools.partial(head_rms_norm_rope, implementation=implementation, rope_dim=8)
    x, scale, positions = draw(1, (4, 3, 2, 16)), draw(2, (4, 16)), jnp.arange(12).reshape(4, 3)
    for axes in ((0, None, None), (0, None, 0), (None, None, 0), (0, 0, None), (1, None, None), (0, 0, 0)):
        args = [a if axis is not None else a[0] for a, axis in zip((x, scale, positions), axes)]
        if axes[0] == 1:
            args[0] = jnp.moveaxis(x, 0, 1)
        got = jax.jit(jax.vmap(op, axes))(*args)
        want = jnp.stack([op(*(a if axis is None else jnp.take(a, i, axis) for a, axis in zip(args, axes))) for i in range(4)])
        assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


def test_vmap_over_tables_and_factors(implementation):
    x, scale, positions = arguments(8, "float32")
    op = functools.partial(head_rms_norm_rope, x, scale, positions, implementation=implementation)
    for option, values in (("freqs_cis", draw(3, (4, 90, 8))), ("freq_factors", 1.0 + jnp.arange(16.0).reshape(4, 4))):
        got = jax.jit(jax.vmap(lambda value: op(**{option: value})))(values)
        assert_trees_close(got, jnp.stack([op(**{option: value}) for value in values]), rtol=1e-5, atol=1e-5)


def test_scan_and_remat(implementation):
    x, scale, positions = arguments(16, "float32")

    def step(x, position):
        return jax.checkpoint(lambda x: head_rms_norm_rope(x, scale, positions + position, implementation=implementation))(x), None

    def chained(x):
        return (jax.lax.scan(step, x, jnp.arange(4))[0] ** 2 * jnp.arange(16)).sum()

    def unrolled(x):
        for i in range(4):
            x = formula(x, scale, positions + i)
        return (x ** 2 * jnp.arange(16)).sum()

    assert_trees_close(jax.jit(jax.grad(chained))(x), jax.jit(jax.grad(unrolled))(x), rtol=1e-4, atol=1e-4)


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


def test_exports_with_any_number_of_tokens(implementation):
    tokens, = jax.export.symbolic_shape("t")
    shapes = [jax.ShapeDtypeStruct((tokens, heads, 16), jnp.bfloat16) for heads in (4, 2)]
    structs = *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32)
    q, k = draw(1, (5, 4, 16), "bfloat16"), draw(2, (5, 2, 16), "bfloat16")

    def call(implementation, q, k, positions):
        return qk_rms_norm_rope(q, k, None, None, positions, implementation=implementation)

    def exported(value, **options):
        program = jax.export.export(jax.jit(functools.partial(call, value)), **options)(*structs)
        return jax.export.deserialize(program.serialize())

    want = call("jnp", q, k, jnp.arange(5))
    everywhere = exported("auto", platforms=("cpu", "cuda", "tpu"))
    here = exported(implementation, disabled_checks=EXPORT_CHECKS)
    for program in (everywhere, here):
        assert_trees_close(program.call(q, k, jnp.arange(5)), want, rtol=2e-2, atol=2e-2)
    assert ("custom_call @jax_fusednorm" in here.mlir_module()) == (implementation != "jnp")
