"""rms_norm against the float64 oracle: every width, dtype, option and kind of value, forward and derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import (DECODE, DTYPE_PAIRS, DTYPES, EDGE_WIDTHS, HUGE_WIDTHS, LEADING, MODELS, ROWS, SCALE_DTYPES, SLOW_ROWS,
                   TAIL_WIDTHS, WIDTHS, some)
from jax_fusednorm import rms_norm
from plain import OPTIONS, draw, draw_scale, options_for

# Where summation order is still harmless float32 outputs are held ten times tighter than SPEC asks.
TIGHT = dict(rtol=1e-5, atol=1e-6)


def run(implementation, calls, **options):
    """One compilation for many shapes."""
    op = functools.partial(rms_norm, implementation=implementation, **options)
    return jax.jit(lambda calls: [op(*call) for call in calls])(calls)


def check(implementation, calls, **options):
    for call, got in zip(calls, run(implementation, calls, **options)):
        dtype = call[0].dtype
        oracle.assert_close(got, oracle.rms_norm(*call, **options), dtype, what=f"shape {call[0].shape} {options}",
                            **(TIGHT if dtype == jnp.float32 and call[0].shape[-1] <= 32768 else {}))


def calls_for(shapes, dtype, scale_dtype):
    return [(draw(1, shape, dtype, spread=2.0), draw_scale(2, shape[-1], scale_dtype)) for shape in shapes]


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_dtype_and_option(implementation, dtype, scale_dtype):
    for i, options in enumerate(options_for(scale_dtype)):
        widths = some(implementation, WIDTHS, i, 4)
        check(implementation, calls_for([(2, width) for width in widths], dtype, scale_dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_around_every_boundary(implementation, dtype):
    widths = some(implementation, TAIL_WIDTHS + EDGE_WIDTHS, 0, 7)
    check(implementation, calls_for([(2, width) for width in widths], dtype, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(implementation, dtype):
    check(implementation, calls_for([(rows, width) for rows in ROWS for width in (7, 256, 2816)], dtype, "float32"))


def test_decode_and_model_shapes(implementation):
    cases = MODELS if implementation == "jnp" else DECODE + MODELS
    check(implementation, calls_for(sorted({case.shape for case in cases}), "bfloat16", "bfloat16"),
          multiply_before_cast=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_widths_and_many_rows(implementation, dtype):
    shapes = [(2, width) for width in HUGE_WIDTHS] + [(rows, width) for rows in SLOW_ROWS for width in (55, 557, 4096)]
    for options in OPTIONS:
        check(implementation, calls_for(shapes, dtype, dtype), **options)


def test_any_leading_dimensions(implementation):
    check(implementation, calls_for([(*leading, 24) for leading in LEADING], "bfloat16", "float32"))


@pytest.mark.parametrize("epsilon", (0.0, 1e-12, 1e-5, 0.5))
def test_epsilon_is_added_inside_the_root(implementation, epsilon):
    x = draw(3, (8, 96), spread=3.0)
    check(implementation, [(x, None)], epsilon=epsilon)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_epsilon_is_not_stored_in_the_storage_dtype(implementation, dtype):
    # 1e-8 is zero in float16; with it left out every element would be 1
    x = jnp.full((1, 64), 1e-4, dtype)
    check(implementation, [(x, None)], epsilon=1e-8)
    assert (oracle.rms_norm(x, epsilon=1e-8) < 0.9).all()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_tiny_row_is_scaled_by_epsilon_alone(implementation, dtype):
    x = jnp.full((3, 128), 1e-20, dtype)
    got, want = run(implementation, [(x, None)])[0], oracle.rms_norm(x)
    oracle.assert_close(got, want, dtype, **({} if dtype == "bfloat16" else dict(rtol=1e-5, atol=0.0)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_give_exact_zeros(implementation, dtype):
    got = run(implementation, [(jnp.zeros((3, 257), dtype), draw_scale(4, 257, dtype))])[0]
    assert (np.asarray(got) == 0).all()


@pytest.mark.parametrize("value", (0.75, -3.0, 1e-3, 2.0**10))
def test_constant_rows(implementation, value):
    check(implementation, [(jnp.full((2, 557), value, dtype), None) for dtype in DTYPES])


@pytest.mark.parametrize("dtype, outlier", (("float16", 6e4), ("bfloat16", 1e15), ("float32", 1e15)))
def test_one_outlier_in_a_row(implementation, dtype, outlier):
    x = draw(5, (4, 557), dtype)
    x = x.at[0, 0].set(outlier).at[1, 300].set(-outlier).at[2, 556].set(outlier)
    check(implementation, [(x, draw_scale(6, 557, dtype))])


def test_float16_near_its_largest_and_smallest_values(implementation):
    signs = np.where(np.arange(129) % 3, 1.0, -1.0)
    near_top = jnp.asarray(signs * 65504.0, jnp.float16)[None]
    tiny = jnp.asarray(signs * np.linspace(6e-8, 1e-6, 129), jnp.float16)[None]
    got = run(implementation, [(near_top, None), (tiny, None)])
    check(implementation, [(near_top, None)])
    # subnormal float16 values are ordinary float32 ones: only the result's own rounding may show
    oracle.assert_same_casts(got[1], oracle.rms_norm(tiny), "float16")
    assert np.abs(np.asarray(got[1], np.float32)).max() > 5e-4


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_denormals_are_kept_or_flushed_but_nothing_else(implementation, dtype):
    # XLA:CPU may take denormal operands for zero
    x = (np.asarray(draw(7, (2, 128))) * np.float32(1e-39)).astype(dtype)
    assert (x != 0).mean() > 0.9
    x = jnp.asarray(x)
    got, want = np.asarray(run(implementation, [(x, None)])[0], np.float64), oracle.rms_norm(x)
    assert np.isfinite(got).all()
    kept = np.abs(got - want) <= 2.0**-7 * np.abs(want) + np.finfo(np.float32).tiny
    assert (kept | (got == 0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row(implementation, dtype):
    clean = draw(8, (9, 557), dtype)
    dirty = clean.at[1, 5].set(jnp.nan).at[4, 0].set(jnp.inf).at[5, 556].set(-jnp.inf).at[7, :].set(jnp.nan)
    scale = draw_scale(9, 557, dtype)
    got, reference = run(implementation, [(dirty, scale), (clean, scale)])
    oracle.assert_close(got, oracle.rms_norm(dirty, scale), dtype)
    untouched = np.array([0, 2, 3, 6, 8])
    oracle.assert_same_bits(got[untouched], reference[untouched])


def test_a_non_finite_scale_stays_in_its_column(implementation):
    x, scale = draw(10, (5, 100), "bfloat16"), draw_scale(11, 100, "float32").at[3].set(jnp.inf).at[99].set(jnp.nan)
    check(implementation, [(x, scale)])


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_cast_is_where_it_should_be(implementation, dtype, scale_dtype):
    x, scale = draw(12, (256, 2048), dtype), draw_scale(13, 2048, scale_dtype)
    for options in options_for(scale_dtype):
        got, want = run(implementation, [(x, scale)], **options)[0], oracle.rms_norm(x, scale, **options)
        roundings = 1 if scale is None or options["multiply_before_cast"] else 2
        oracle.assert_same_casts(got, want, dtype, roundings=roundings, what=str(options))
        if scale is not None:  # and the two orders can be told apart on this very sample
            other = dict(options, multiply_before_cast=not options["multiply_before_cast"])
            assert (oracle.rms_norm(x, scale, **other) != want).mean() > 0.05


def test_no_scale_is_a_scale_of_ones(implementation):
    x = draw(14, (33, 257), "bfloat16")
    for mbc in (True, False):
        none, ones = run(implementation, [(x, None), (x, jnp.ones(257))], multiply_before_cast=mbc)
        oracle.assert_same_bits(none, ones)


DERIVATIVE_SHAPES = ((33, 1), (33, 7), (31, 256), (2, 3, 557), (9, 2816), (0, 24))


def derivatives(implementation, shapes, dtype, scale_dtype, **options):
    """The inputs, tangents and cotangents of every shape, and what jvp and vjp make of them."""
    op = functools.partial(rms_norm, implementation=implementation, **options)
    arguments = []
    for shape in shapes:
        primals = (draw(20, shape, dtype, spread=1.0), draw_scale(21, shape[-1], scale_dtype))
        tangents = (draw(22, shape, dtype), None if scale_dtype is None else draw(23, shape[-1:], scale_dtype))
        keep = slice(0, 1 if scale_dtype is None else 2)
        arguments.append((primals[keep], tangents[keep], draw(24, shape, dtype)))

    @jax.jit
    def evaluate(arguments):
        return [(jax.jvp(op, primals, tangents)[1], jax.vjp(op, *primals)[1](cotangent))
                for primals, tangents, cotangent in arguments]

    return arguments, evaluate(arguments)


@pytest.mark.parametrize("dtype, scale_dtype", DTYPE_PAIRS)
def test_derivatives(implementation, dtype, scale_dtype):
    for i, options in enumerate(options_for(scale_dtype)):
        shapes = some(implementation, DERIVATIVE_SHAPES, i, 3)
        found = derivatives(implementation, shapes, dtype, scale_dtype, **options)
        for (primals, tangents, dn), (jvp, vjp) in zip(*found):
            x, scale = (*primals, None)[:2]
            dx, dscale = (*tangents, None)[:2]
            what = f"shape {x.shape} {options}"
            close = functools.partial(oracle.assert_derivative_close, dtype=dtype,
                                      rounded_factors=not options["multiply_before_cast"])
            close(jvp, *oracle.rms_norm_jvp(x, scale, dx, dscale, **options), what=f"tangent, {what}")
            want, size, want_scale = oracle.rms_norm_vjp(x, scale, dn, **options)
            close(vjp[0], want, size, what=f"cotangent of x, {what}")
            if scale is not None:
                exact = {dtype, scale_dtype} == {"float32"}
                oracle.assert_scale_cotangent_close(vjp[1], want_scale, scale_dtype, what=f"cotangent of scale, {what}",
                                                    tolerance=1e-4 if exact else 1e-2)


def test_scale_cotangents_are_summed_in_float32(implementation):
    # a bfloat16 sum stops growing at 256
    x, scale = jnp.ones((4096, 8), jnp.bfloat16), jnp.ones(8, jnp.bfloat16)
    op = functools.partial(rms_norm, implementation=implementation)
    got = jax.jit(jax.grad(lambda scale: op(x, scale).astype(jnp.float32).sum()))(scale)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), 4096.0, rtol=1e-2)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_derivatives_of_extreme_rows(implementation, dtype):
    # a zero row has the slope 1/sqrt(epsilon), an outlier takes the whole derivative, a tiny row none of its own
    x = draw(25, (4, 128), dtype).at[0].set(0).at[1, 7].set(1e10).at[2].set(1e-20)
    dn = draw(26, (4, 128), dtype)
    op = functools.partial(rms_norm, implementation=implementation)
    got = jax.jit(lambda x, dn: jax.vjp(op, x)[1](dn)[0])(x, dn)
    want, size, _ = oracle.rms_norm_vjp(x, None, dn)
    oracle.assert_derivative_close(got, want, size, dtype)


def test_derivatives_keep_nan_and_inf_in_their_row(implementation):
    clean = draw(27, (6, 129))
    dirty, dn = clean.at[2, 3].set(jnp.nan).at[4, 5].set(jnp.inf), draw(28, (6, 129))
    op = functools.partial(rms_norm, implementation=implementation)
    pull = jax.jit(lambda x: jax.vjp(op, x)[1](dn)[0])
    got, reference = np.asarray(pull(dirty)), np.asarray(pull(clean))
    untouched = np.array([0, 1, 3, 5])
    oracle.assert_same_bits(got[untouched], reference[untouched])
    assert np.isnan(got[2]).all()
