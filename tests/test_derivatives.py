"""Every way of differentiating an op gives what JAX makes of the plain formula."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import oracle
from ops import ADD_RMS_NORM, ADD_RMS_NORM_STORAGE, assert_trees_close, every_norm, every_op, kernel_calls, loss
from plain import draw


def like(args, seed):
    return tuple(draw(seed + i, a.shape, a.dtype) for i, a in enumerate(args))


def agree(evaluate, tested, implementation, *args, **tolerance):
    """`evaluate(f)` for the op and for the formula, each compiled once."""
    got = jax.jit(lambda *a: evaluate(tested.bound(implementation))(*a))(*args)
    want = jax.jit(lambda *a: evaluate(tested.plain)(*a))(*args)
    assert_trees_close(got, want, **tolerance)


@every_op
def test_jvp_is_that_of_the_formula(implementation, tested):
    args = tested.arguments((3, 5, 24))
    agree(lambda f: lambda p, t: jax.jvp(f, p, t), tested, implementation, args, like(args, 30))


@every_op
def test_jvp_for_every_subset_of_arguments(implementation, tested):
    args = tested.arguments((4, 12))

    def evaluate(f):
        def each(args, tangents):
            out = []
            for size in range(1, len(args) + 1):
                for moving in itertools.combinations(range(len(args)), size):
                    def g(*values):
                        full = list(args)
                        for i, v in zip(moving, values):
                            full[i] = v
                        return f(*full)
                    out.append(jax.jvp(g, [args[i] for i in moving], [tangents[i] for i in moving])[1])
            return out
        return each

    agree(evaluate, tested, implementation, args, like(args, 31))


@every_op
def test_grad_for_every_subset_of_arguments(implementation, tested):
    args = tested.arguments((2, 3, 12))
    subsets = [s for n in range(1, len(args) + 1) for s in itertools.combinations(range(len(args)), n)]
    agree(lambda f: lambda *a: [jax.grad(loss(f), s)(*a) for s in subsets], tested, implementation, *args)


@every_op
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_vjp_is_the_adjoint_of_jvp(implementation, tested, dtype):
    args = tested.arguments((31, 96), dtype, "float32")
    f, tangents = tested.bound(implementation), like(args, 32)

    @jax.jit
    def both(args, tangents):
        outs, pushed = jax.jvp(f, args, tangents)
        cotangents = like(outs, 33)
        return pushed, cotangents, jax.vjp(f, *args)[1](cotangents)

    pushed, cotangents, pulled = both(args, tangents)
    dots = lambda a, b: sum(np.sum(oracle.wide(x) * oracle.wide(y)) for x, y in zip(a, b))
    size = sum(np.linalg.norm(oracle.wide(a)) * np.linalg.norm(oracle.wide(b)) for a, b in zip(cotangents, pushed))
    assert abs(dots(cotangents, pushed) - dots(pulled, tangents)) <= (1e-5 if dtype == "float32" else 1e-3) * size


@pytest.mark.parametrize("tested", (ADD_RMS_NORM, ADD_RMS_NORM_STORAGE), ids=str)
def test_the_cotangent_of_one_result_alone(implementation, tested):
    args = tested.arguments((5, 24))
    for i in range(2):
        agree(lambda f: lambda *a: jax.grad(lambda *a: jnp.cos(f(*a)[i]).sum(), (0, 1, 2))(*a),
              tested, implementation, *args)
    # the sum passes its cotangent on, bit for bit, and knows nothing of the scale
    f = tested.bound(implementation)
    dsum = draw(34, (5, 24))
    dx, dresidual, dscale = jax.vjp(lambda *a: f(*a)[1], *args)[1](dsum)
    oracle.assert_same_bits(dx, dsum)
    oracle.assert_same_bits(dresidual, dsum)
    assert (np.asarray(dscale) == 0).all()


@every_op
def test_a_result_that_is_not_asked_for_costs_no_derivative(implementation, tested):
    args = tested.arguments((5, 24))
    f = jax.jit(lambda *a: jax.grad(loss(lambda *a: tested.bound(implementation)(*a)[:1]), range(len(args)))(*a))
    g = jax.jit(lambda *a: jax.grad(loss(lambda *a: tested.plain(*a)[:1]), range(len(args)))(*a))
    assert_trees_close(f(*args), g(*args))


@every_op
def test_jacobians(implementation, tested):
    args = tested.arguments((2, 5))
    argnums = tuple(range(len(args)))
    agree(lambda f: lambda *a: (jax.jacfwd(f, argnums)(*a), jax.jacrev(f, argnums)(*a)), tested, implementation, *args)


@every_op
def test_hessian_in_every_mix_of_modes(implementation, tested):
    args = tested.arguments((2, 4))
    argnums = tuple(range(len(args)))

    def evaluate(f):
        g = loss(f)
        return lambda *a: [outer(inner(g, argnums), argnums)(*a)
                           for outer in (jax.jacfwd, jax.jacrev) for inner in (jax.jacfwd, jax.jacrev)]

    agree(evaluate, tested, implementation, *args, rtol=1e-4, atol=1e-4)


@every_op
def test_jvp_of_grad_and_grad_of_jvp(implementation, tested):
    args = tested.arguments((3, 2, 12))
    argnums = tuple(range(len(args)))

    def evaluate(f):
        def both(args, tangents):
            hvp = jax.jvp(jax.grad(loss(f), argnums), args, tangents)
            back = jax.grad(lambda *a: loss(lambda *a: jax.jvp(f, a, tangents)[1])(*a), argnums)(*args)
            also_tangents = jax.grad(lambda *t: loss(lambda *t: jax.jvp(f, args, t)[1])(*t), argnums)(*tangents)
            return hvp, back, also_tangents
        return both

    agree(evaluate, tested, implementation, args, like(args, 35), rtol=1e-4, atol=1e-4)


@every_op
def test_grad_of_grad_norm(implementation, tested):
    args = tested.arguments((3, 12))
    argnums = tuple(range(len(args)))

    def evaluate(f):
        def penalty(*a):
            return sum((g ** 2).sum() for g in jax.grad(loss(f), argnums)(*a))
        return jax.grad(penalty, argnums)

    agree(evaluate, tested, implementation, *args, rtol=1e-4, atol=1e-4)


@every_op
def test_third_order(implementation, tested):
    args = tested.arguments((1, 3))

    def evaluate(f):
        return lambda *a: jax.jacfwd(jax.jacrev(jax.grad(lambda x: loss(f)(x, *a[1:]))))(a[0])

    agree(evaluate, tested, implementation, *args, rtol=1e-3, atol=1e-3)


@every_op
def test_linearize_and_linear_transpose(implementation, tested):
    args = tested.arguments((4, 12))
    cotangents = like(jax.eval_shape(tested.plain, *args), 36)

    def evaluate(f):
        def both(args, tangents, cotangents):
            outs, push = jax.linearize(f, *args)
            pull = jax.linear_transpose(push, *args)
            return outs, push(*tangents), pull(cotangents), jax.linear_transpose(lambda *c: pull(c), *outs)(tangents)
        return both

    agree(evaluate, tested, implementation, args, like(args, 37), cotangents)


@every_norm
def test_numerical_derivatives_to_second_order(implementation, tested):
    args = tested.arguments((2, 6))
    check_grads(jax.jit(tested.bound(implementation)), args, order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2, eps=1e-2)


@every_op
def test_grad_through_vmap_remat_and_scan(implementation, tested):
    args = tested.arguments((2, 3, 12))
    rows, scale = args[:-1], args[-1]

    def evaluate(f):
        def through(rows, scale):
            vmapped = jax.vmap(f, (*[1] * len(rows), None), 1)
            remat = jax.checkpoint(f)
            scanned = lambda *a: jax.lax.scan(lambda c, r: (c + f(*r, a[-1])[0].sum(), f(*r, a[-1])), 0.0, a[:-1])[1]
            return [jax.grad(loss(g), range(len(rows) + 1))(*rows, scale) for g in (vmapped, remat, scanned)]
        return through

    agree(evaluate, tested, implementation, rows, scale)


@every_norm
def test_without_a_scale(implementation, tested):
    if "scale_offset" in dict(tested.options):
        tested = type(tested)(tested.name, tested.op, tested.formula, tested.rows)
    args = tested.arguments((3, 12), scale_dtype=None)
    argnums = tuple(range(len(args)))
    agree(lambda f: lambda *a: (jax.grad(loss(f), argnums)(*a), jax.hessian(loss(f))(*a)), tested, implementation, *args,
          rtol=1e-4, atol=1e-4)


@every_op
def test_cotangents_have_the_dtypes_of_their_primals(implementation, tested):
    for dtype, scale_dtype in (("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")):
        args = tested.arguments((5, 24), dtype, scale_dtype)
        outs, pull = jax.vjp(tested.bound(implementation), *args)
        assert [(c.dtype, c.shape) for c in pull(outs)] == [(a.dtype, a.shape) for a in args]


@every_op
def test_second_order_in_bfloat16_is_that_of_float32(implementation, tested):
    args = tested.arguments((4, 24))
    argnums, tangents = tuple(range(len(args))), like(args, 38)
    stored = lambda arrays: tuple(a.astype(jnp.bfloat16) for a in arrays)
    hvp = lambda f: jax.jit(lambda a, t: jax.jvp(jax.grad(loss(f), argnums), a, t)[1])
    got = hvp(tested.bound(implementation))(stored(args), stored(tangents))
    want = hvp(tested.plain)(*([a.astype(jnp.float32) for a in stored(arrays)] for arrays in (args, tangents)))
    for g, w in zip(got, want):
        assert g.dtype == jnp.bfloat16
        assert np.linalg.norm(oracle.wide(g) - oracle.wide(w)) <= 3e-2 * np.linalg.norm(oracle.wide(w))


@every_op
def test_the_forward_pass_of_a_gradient_runs_the_kernel(implementation, tested):
    args = tested.arguments((5, 24))
    calls = kernel_calls(jax.value_and_grad(loss(tested.bound(implementation))), *args)
    assert calls == 0 if implementation == "jnp" else calls >= 1


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_tangents_of_both_summands_are_added_in_float32(implementation, dtype):
    """A tangent along the sum is all but lost in the norm: of a large one and a small one the small one's is left, but for rounding."""
    x, small = draw(40, (3, 48), dtype), draw(41, (3, 48), dtype)
    residual = jnp.zeros_like(x)

    def pushed(*tangents):
        return jax.jvp(ADD_RMS_NORM.bound(implementation), (x, residual, jnp.ones(48)), (*tangents, jnp.zeros(48)))[1][0]

    both, one = (np.asarray(t, np.float32) for t in (pushed(256 * x, small), pushed(residual, small)))
    np.testing.assert_allclose(both, one, rtol=2e-2, atol=2e-2)
