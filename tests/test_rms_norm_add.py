"""rms_norm_add against the float64 oracle: both roundings of the norm, and the derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import DTYPE_PAIRS, DTYPES, EDGE_WIDTHS, LEADING, MODELS, ROWS, SCALE_DTYPES, TAIL_WIDTHS, WIDTHS, some
from jax_fusednorm import rms_norm_add
from plain import draw, draw_scale, options_for

NORM_ROUNDINGS = ("float32", "storage")


def run(implementation, calls, **options):
    """One compilation for many shapes."""
    op = functools.partial(rms_norm_add, implementation=implementation, **options)
    return jax.jit(lambda calls: [op(*call) for call in calls])(calls)


def check(implementation, calls, **options):
    for call, got in zip(calls, run(implementation, calls, **options)):
        want, residual = oracle.rms_norm_add(*call, **options), oracle.wide(call[1])
        with np.errstate(invalid="ignore"):
            size = np.maximum(np.abs(want), np.maximum(np.abs(residual), np.abs(want - residual)))
        oracle.assert_sum_close(got, want, size, call[0].dtype, what=f"shape {call[0].shape} {options}")


def calls_for(shapes, dtype, scale_dtype):
    return [(draw(1, shape, dtype, spread=2.0), draw(2, shape, dtype), draw_scale(3, shape[-1], scale_dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype, scale_dtype", DTYPE_PAIRS)
def test_every_width_dtype_and_option(implementation, dtype, scale_dtype):
    for i, options in enumerate(options_for(scale_dtype)):
        for j, norm_rounding in enumerate(NORM_ROUNDINGS):
            widths = some(implementation, WIDTHS, 2 * i + j, 8)
            check(implementation, calls_for([(2, width) for width in widths], dtype, scale_dtype),
                  norm_rounding=norm_rounding, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_around_every_boundary(implementation, dtype):
    widths = some(implementation, TAIL_WIDTHS + EDGE_WIDTHS, 0, 7)
    check(implementation, calls_for([(2, width) for width in widths], dtype, dtype))


def test_rows_leading_dimensions_and_model_widths(implementation):
    shapes = [(rows, 257) for rows in ROWS] + [(*leading, 24) for leading in LEADING] + [case.shape for case in MODELS]
    check(implementation, calls_for(shapes, "bfloat16", "float32"))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_cast_is_where_it_should_be(implementation, dtype, scale_dtype):
    x, residual, scale = draw(12, (128, 2048), dtype), draw(13, (128, 2048), dtype), draw_scale(14, 2048, scale_dtype)
    for options in options_for(scale_dtype):
        wants = {rounding: oracle.rms_norm_add(x, residual, scale, norm_rounding=rounding, **options) for rounding in NORM_ROUNDINGS}
        assert (wants["float32"] != wants["storage"]).mean() > 0.01  # this sample can tell the two apart
        for rounding, want in wants.items():
            [got] = run(implementation, [(x, residual, scale)], norm_rounding=rounding, **options)
            differing = oracle.ulps(np.asarray(got), want, dtype) > 0
            assert differing.mean() <= 1e-3, f"{rounding} {options}: {differing.mean():.2%} of the elements differ"


def test_zeros_tiny_rows_and_what_is_not_a_number(implementation):
    for dtype in DTYPES:
        [(x, residual, scale)] = calls_for([(9, 557)], dtype, dtype)
        x = x.at[0].set(0).at[1].set(jnp.asarray(1e-20, dtype)).at[3, 5].set(jnp.nan).at[5, 0].set(jnp.inf)
        residual = residual.at[1].set(0).at[7, 2].set(jnp.inf)
        check(implementation, [(x, residual, scale)])
        [got] = run(implementation, [(x, residual, scale)])
        oracle.assert_same_bits(got[0], residual[0])
        assert np.isnan(np.asarray(got[3], np.float32)).all() and np.isinf(np.asarray(got[7, 2], np.float32))


@pytest.mark.parametrize("dtype, scale_dtype", DTYPE_PAIRS)
def test_derivatives(implementation, dtype, scale_dtype):
    for options in options_for(scale_dtype):
        for shape in ((33, 7), (5, 557)):
            [(x, residual, scale)] = calls_for([shape], dtype, scale_dtype)
            scales, primals = () if scale is None else (scale,), (x, residual, *(() if scale is None else (scale,)))
            tangents = (draw(24, shape, dtype), draw(25, shape, dtype), *(draw(23, s.shape, s.dtype) for s in scales))
            cotangent = draw(26, shape, dtype)
            op = functools.partial(rms_norm_add, implementation=implementation, **options)
            tangent, vjp = jax.jit(lambda p, t, c: (jax.jvp(op, p, t)[1], jax.vjp(op, *p)[1](c)))(primals, tangents, cotangent)
            late = not options["multiply_before_cast"]
            want, size = oracle.rms_norm_jvp(x, scale, tangents[0], tangents[2] if scales else None, **options)
            # the norm's tangent is rounded before the residual's is added
            oracle.assert_derivative_close(tangent, want + oracle.wide(tangents[1]), size + np.abs(oracle.wide(tangents[1])), dtype,
                                           rounded_factors=True, what=f"tangent {options}")
            want, size, want_scale = oracle.rms_norm_vjp(x, scale, cotangent, **options)
            oracle.assert_derivative_close(vjp[0], want, size, dtype, rounded_factors=late, what=f"cotangent of x {options}")
            oracle.assert_same_bits(vjp[1], cotangent, what="cotangent of residual")
            if scales:
                oracle.assert_scale_cotangent_close(vjp[2], want_scale, scale.dtype, what=f"cotangent of scale {options}")


def test_the_backward_pass_is_the_norms_kernel_and_keeps_no_residual(kernel):
    x, residual, scale = calls_for([(8, 64)], "float32", "float32")[0]
    _, backward = jax.vjp(functools.partial(rms_norm_add, implementation=kernel), x, residual, scale)
    kept = jax.tree.leaves(backward)
    assert sorted(a.shape for a in kept) == [(8, 64), (64,)]
    text = jax.jit(lambda x, r, s: jax.vjp(functools.partial(rms_norm_add, implementation=kernel), x, r, s)[1](x)).lower(
        x, residual, scale).as_text()
    assert "rms_norm_cotangent_v" in text
