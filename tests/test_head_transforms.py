"""head_rms_norm_rope and qk_rms_norm_rope under JAX's transformations: one kernel, derivatives, vmap, scan, remat and export."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import plain
from head_calls import PLACES, arguments
from jax_fusednorm import EXPORT_CHECKS, head_rms_norm_rope, qk_rms_norm_rope, rope_table
from ops import assert_trees_close, kernel_calls, kernels_expected, loss
from plain import draw, draw_scale


def test_one_kernel_for_everything(implementation):
    x, scale, positions = arguments(64, "bfloat16")
    op = functools.partial(head_rms_norm_rope, implementation=implementation, copies=(("float32", "head_major"), ("bfloat16", "token_major")))
    assert kernel_calls(op, x, scale, positions) == kernels_expected(implementation)
    both = functools.partial(qk_rms_norm_rope, implementation=implementation)
    assert kernel_calls(both, x, x, scale, scale, positions) == kernels_expected(implementation)


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
