"""add_rms_norm against the float64 oracle: the sum, its norm, both roundings of the sum, and the derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import (DECODE, DTYPE_PAIRS, DTYPES, EDGE_WIDTHS, HUGE_WIDTHS, LEADING, MODELS, ROWS, SCALE_DTYPES, SLOW_ROWS,
                   TAIL_WIDTHS, WIDTHS, some)
from jax_fusednorm import add_rms_norm
from plain import OPTIONS, draw, draw_scale, options_for

SUM_ROUNDINGS = ("float32", "storage")
TIGHT = dict(rtol=1e-5, atol=1e-6)


def run(implementation, calls, **options):
    """One compilation for many shapes."""
    op = functools.partial(add_rms_norm, implementation=implementation, **options)
    return jax.jit(lambda calls: [op(*call) for call in calls])(calls)


def check(implementation, calls, **options):
    for call, (normed, total) in zip(calls, run(implementation, calls, **options)):
        dtype, what = call[0].dtype, f"shape {call[0].shape} {options}"
        want, want_total = oracle.add_rms_norm(*call, **options)
        oracle.assert_same_bits(total, want_total.astype(dtype), what=f"sum, {what}")
        oracle.assert_close(normed, want, dtype, what=f"normed, {what}",
                            **(TIGHT if dtype == jnp.float32 and call[0].shape[-1] <= 32768 else {}))


def calls_for(shapes, dtype, scale_dtype):
    return [(draw(1, shape, dtype, spread=2.0), draw(2, shape, dtype, spread=2.0), draw_scale(3, shape[-1], scale_dtype))
            for shape in shapes]


@pytest.mark.parametrize("dtype, scale_dtype", DTYPE_PAIRS)
def test_every_width_dtype_and_option(implementation, dtype, scale_dtype):
    for i, options in enumerate(options_for(scale_dtype)):
        for j, sum_rounding in enumerate(SUM_ROUNDINGS):
            widths = some(implementation, WIDTHS, 2 * i + j, 8)
            calls = calls_for([(2, width) for width in widths], dtype, scale_dtype)
            check(implementation, calls, sum_rounding=sum_rounding, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_around_every_boundary(implementation, dtype):
    widths = some(implementation, TAIL_WIDTHS + EDGE_WIDTHS, 0, 7)
    check(implementation, calls_for([(2, width) for width in widths], dtype, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(implementation, dtype):
    check(implementation, calls_for([(rows, width) for rows in ROWS for width in (7, 256, 2816)], dtype, "float32"),
          sum_rounding="storage")


def test_decode_and_model_shapes(implementation):
    cases = MODELS if implementation == "jnp" else DECODE + MODELS
    check(implementation, calls_for(sorted({case.shape for case in cases}), "bfloat16", "bfloat16"),
          multiply_before_cast=False, sum_rounding="storage")


def test_widths_beyond_a_shared_buffer_of_256_values(implementation):
    check(implementation, calls_for([(4, width) for width in (257, 2816, 5376, 8192)], "bfloat16", "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("sum_rounding", SUM_ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_widths_and_many_rows(implementation, dtype, sum_rounding):
    shapes = [(2, width) for width in HUGE_WIDTHS] + [(rows, width) for rows in SLOW_ROWS for width in (55, 557, 4096)]
    for options in OPTIONS:
        check(implementation, calls_for(shapes, dtype, dtype), sum_rounding=sum_rounding, **options)


def test_any_leading_dimensions(implementation):
    check(implementation, calls_for([(*leading, 24) for leading in LEADING], "bfloat16", "float32"))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_16_bit_value_is_read_and_written_exactly(implementation, dtype):
    """float16's subnormals too, though XLA's threads take subnormal floats for zero."""
    every = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(dtype)).reshape(64, 1024)
    wide = every.astype(np.float32)
    every = np.where(np.isnan(wide) | ((wide != 0) & (np.abs(wide) < np.finfo(np.float32).tiny)), 1, every).astype(every.dtype)
    for x, residual in ((every, np.zeros_like(every)), (np.zeros_like(every), every)):
        [(_, total)] = run(implementation, [(jnp.asarray(x), jnp.asarray(residual), None)])
        np.testing.assert_array_equal(np.asarray(total, np.float32), every.astype(np.float32))


def test_operands_commute(implementation):
    [(x, residual, scale)] = calls_for([(33, 257)], "bfloat16", "bfloat16")
    one, other = run(implementation, [(x, residual, scale), (residual, x, scale)])
    for a, b in zip(one, other):
        oracle.assert_same_bits(a, b)


@pytest.mark.parametrize("sum_rounding", SUM_ROUNDINGS)
def test_the_sum_is_optional_and_changes_nothing(implementation, sum_rounding):
    for dtype in DTYPES:
        calls = calls_for([(33, 7), (5, 557), (2, 8192)], dtype, dtype)
        both = run(implementation, calls, sum_rounding=sum_rounding)
        alone = run(implementation, calls, sum_rounding=sum_rounding, return_sum=False)
        for (normed, _), only in zip(both, alone):
            oracle.assert_same_bits(only, normed)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_cast_is_where_it_should_be(implementation, dtype, scale_dtype):
    x, residual = draw(12, (128, 2048), dtype), draw(13, (128, 2048), dtype)
    scale = draw_scale(14, 2048, scale_dtype)
    for options in options_for(scale_dtype):
        wants = {rounding: oracle.add_rms_norm(x, residual, scale, sum_rounding=rounding, **options)[0]
                 for rounding in SUM_ROUNDINGS}
        # the two roundings can be told apart on this very sample
        assert (wants["float32"] != wants["storage"]).mean() > 0.05
        roundings = 1 if scale is None or options["multiply_before_cast"] else 2
        for rounding, want in wants.items():
            got, _ = run(implementation, [(x, residual, scale)], sum_rounding=rounding, **options)[0]
            oracle.assert_same_casts(got, want, dtype, roundings=roundings, what=f"{rounding} {options}")


@pytest.mark.parametrize("sum_rounding", SUM_ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_cancel_overflow_or_are_tiny(implementation, dtype, sum_rounding):
    x, scale = draw(15, (8, 300), dtype), draw_scale(16, 300, dtype)
    residual = draw(17, (8, 300), dtype)
    residual = residual.at[0].set(-x[0])                                 # all zero
    x, residual = x.at[1].set(1e-20), residual.at[1].set(1e-20)          # epsilon alone decides
    x, residual = x.at[2, 7].set(6e4), residual.at[2, 7].set(-5.9e4)     # an outlier
    residual = residual.at[3].set(x[3] * jnp.asarray(-0.99, dtype))      # mostly cancelled
    x, residual = x.at[4].set(0), residual.at[4].set(0)
    x = x.at[5].set(jnp.asarray(1e-6, dtype))                            # lost in the rounded sum
    check(implementation, [(x, residual, scale)], sum_rounding=sum_rounding)
    normed = run(implementation, [(x, residual, scale)], sum_rounding=sum_rounding)[0][0]
    assert (np.asarray(normed[np.array([0, 4])]) == 0).all()
    tiny = np.abs(np.asarray(normed[1], np.float64))
    assert tiny.max() < 1e-15 and (dtype == "float16" or tiny.max() > 1e-18)


def test_a_float16_sum_that_overflows(implementation):
    x = jnp.full((2, 129), 6e4, jnp.float16).at[1].set(1.0)
    check(implementation, [(x, x, None)])
    # the unrounded sum norms to ones; the rounded one is infinite, and its norm is not a number
    check(implementation, [(x, x, None)], sum_rounding="storage")


@pytest.mark.parametrize("sum_rounding", SUM_ROUNDINGS)
def test_nan_and_inf_stay_in_their_row(implementation, sum_rounding):
    for dtype in DTYPES:
        [(clean, residual, scale)] = calls_for([(9, 557)], dtype, dtype)
        x = clean.at[1, 5].set(jnp.nan).at[4, 0].set(jnp.inf).at[7, 3].set(-jnp.inf)
        dirty = residual.at[5, 556].set(jnp.nan).at[7, 3].set(jnp.inf)
        got, reference = run(implementation, [(x, dirty, scale), (clean, residual, scale)], sum_rounding=sum_rounding)
        check(implementation, [(x, dirty, scale)], sum_rounding=sum_rounding)
        untouched = np.array([0, 2, 3, 6, 8])
        for a, b in zip(got, reference):
            oracle.assert_same_bits(a[untouched], b[untouched])


DERIVATIVE_SHAPES = ((33, 1), (33, 7), (31, 256), (2, 3, 557), (9, 2816), (0, 24))


@functools.cache
def derivative_arguments(dtype, scale_dtype):
    arguments = []
    for shape in DERIVATIVE_SHAPES:
        scale = () if scale_dtype is None else (draw_scale(22, shape[-1], scale_dtype),)
        dscale = () if scale_dtype is None else (draw(23, shape[-1:], scale_dtype),)
        primals = (draw(20, shape, dtype, spread=1.0), draw(21, shape, dtype, spread=1.0), *scale)
        tangents = (draw(24, shape, dtype), draw(25, shape, dtype), *dscale)
        arguments.append((primals, tangents, (draw(26, shape, dtype), draw(27, shape, dtype))))
    return arguments


@pytest.mark.parametrize("dtype, scale_dtype", DTYPE_PAIRS)
def test_derivatives(implementation, dtype, scale_dtype):
    arguments = derivative_arguments(dtype, scale_dtype)
    for i, options in enumerate(options_for(scale_dtype)):
        for j, sum_rounding in enumerate(SUM_ROUNDINGS):
            op = functools.partial(add_rms_norm, implementation=implementation, sum_rounding=sum_rounding, **options)
            here = some(implementation, arguments, 2 * i + j, 3)
            got = jax.jit(lambda arguments: [(jax.jvp(op, p, t)[1], jax.vjp(op, *p)[1](c)) for p, t, c in arguments])(here)
            for (primals, tangents, cotangents), (jvp, vjp) in zip(here, got):
                check_derivatives(primals, tangents, cotangents, jvp, vjp, sum_rounding=sum_rounding, **options)


def check_derivatives(primals, tangents, cotangents, jvp, vjp, **options):
    x, residual, scale = (*primals, None)[:3]
    what = f"shape {x.shape} {options}"
    late = not options["multiply_before_cast"]
    wants = oracle.add_rms_norm_jvp(x, residual, scale, *(*tangents, None)[:3], **options)
    for name, got, want in zip(("normed", "sum"), jvp, wants):
        # a sum that is rounded before it is normed has a tangent that may be, too
        oracle.assert_derivative_close(got, *want, x.dtype, what=f"tangent of {name}, {what}",
                                       rounded_factors=late + (options["sum_rounding"] == "storage"))
    want, size, want_scale = oracle.add_rms_norm_vjp(x, residual, scale, *cotangents, **options)
    oracle.assert_derivative_close(vjp[0], want, size, x.dtype, rounded_factors=late, what=f"cotangent of x, {what}")
    oracle.assert_same_bits(vjp[1], vjp[0], what=f"cotangent of residual, {what}")
    if scale is not None:
        exact = x.dtype == scale.dtype == jnp.float32
        oracle.assert_scale_cotangent_close(vjp[2], want_scale, scale.dtype, what=f"cotangent of scale, {what}",
                                            tolerance=1e-4 if exact else 1e-2)


def test_derivatives_are_taken_at_the_sum_that_was_normed(implementation):
    # x is lost in the rounded sum but not in the unrounded one: the two slopes differ far beyond the tolerance
    residual = jnp.asarray([[256.0, 1.0] * 8], jnp.bfloat16)
    x = jnp.asarray([[0.9, 0.9] * 8], jnp.bfloat16)
    dn, dsum = draw(28, (1, 16), "bfloat16"), jnp.zeros((1, 16), jnp.bfloat16)
    wants = {}
    for rounding in SUM_ROUNDINGS:
        op = functools.partial(add_rms_norm, sum_rounding=rounding, implementation=implementation)
        got = jax.vjp(op, x, residual)[1]((dn, dsum))[0]
        want, size, _ = oracle.add_rms_norm_vjp(x, residual, None, dn, dsum, sum_rounding=rounding)
        oracle.assert_derivative_close(got, want, size, "bfloat16", what=rounding)
        wants[rounding] = want
    assert np.abs(wants["float32"] - wants["storage"]).max() > 2.0**-9 * np.abs(wants["storage"]).max()
