"""float64 under x64 is computed in float64 by the reference, and the other dtypes are what they are without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from jax_fusednorm import explain, rms_norm
from ops import assert_trees_close, every_norm, every_op, kernel_calls, loss
from plain import OPTIONS, draw


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def double(arrays):
    # more digits than a float32 has
    return tuple(a.astype(jnp.float64) * (1 + 1e-9 * jnp.arange(a.shape[-1])) for a in arrays)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float64_is_computed_in_float64(options):
    for shape in ((3, 5, 24), (2, 557), (0, 7)):
        x, scale = double([draw(1, shape), draw(2, shape[-1:])])
        got = jax.jit(functools.partial(rms_norm, **options))(x, scale)
        oracle.assert_close(got, oracle.rms_norm(x, scale, **options), "float64")


@every_op
def test_float64_sums_and_scales_of_other_dtypes(tested):
    *rows, scale = tested.arguments((4, 129))
    for scale_dtype in ("float64", "float32", "bfloat16"):
        args = (*double(rows), scale.astype(scale_dtype))
        got = jax.jit(tested.bound(None))(*args)
        assert all(o.dtype == jnp.float64 for o in got)
        expected = getattr(oracle, tested.op.__name__)(*args, **dict(tested.options))
        for g, w in zip(got, expected if isinstance(expected, tuple) else (expected,)):
            oracle.assert_close(g, w, "float64")


@every_op
def test_float64_derivatives(tested):
    args = double(tested.arguments((3, 24)))
    argnums = tuple(range(len(args)))
    evaluate = lambda f: jax.jit(lambda *a: (jax.jvp(f, a, a), jax.vjp(f, *a)[1](f(*a)), jax.hessian(precise_loss(f), argnums)(*a)))
    assert_trees_close(evaluate(tested.bound(None))(*args), evaluate(tested.plain)(*args), rtol=1e-10, atol=1e-10)


def precise_loss(f):
    return lambda *a: sum(jnp.sin(o).sum() for o in f(*a))


@every_norm
def test_float64_checks_numerically(tested):
    from jax.test_util import check_grads

    check_grads(jax.jit(tested.bound(None)), double(tested.arguments((2, 6))), order=2, atol=1e-6, rtol=1e-6)


@every_op
def test_no_kernel_takes_float64(tested):
    args = double(tested.arguments((2, 24)))
    assert kernel_calls(tested.bound(None), *args) == 0
    assert str(explain(tested.op, *args)["cpu"]).startswith("jnp")
    with pytest.raises(NotImplementedError, match=f"(?s){tested.op.__name__}.*float64"):
        tested.bound("kernel")(*args)


@every_op
def test_other_dtypes_do_not_change(implementation, tested):
    for dtype in ("float32", "bfloat16", "float16"):
        args = tested.arguments((3, 257), dtype, "float32")
        f = tested.bound(implementation)
        outs = jax.jit(f)(*args)
        grads = jax.jit(jax.grad(loss(f), range(len(args))))(*args)
        assert [g.dtype for g in grads] == [a.dtype for a in args]
        with jax.enable_x64(False):
            for wide, narrow in zip(outs, jax.jit(f)(*args)):
                oracle.assert_same_bits(wide, narrow)


def test_python_numbers_and_numpy_float64_are_float64_here():
    for x in (np.ones((2, 8)), [[1.0, 2.0]]):
        assert rms_norm(x).dtype == jnp.float64
