"""vmap: a batch of activations is one more leading axis and keeps the kernel; a batch of scales runs the reference."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from ops import ADD_RMS_NORM, RMS_NORM, assert_trees_close, every_op, kernel_calls, kernels_expected, loss
from plain import draw

BATCH = 3


def batched_arguments(tested, shape, axes, dtype="float32"):
    """Arguments with an axis of BATCH where `axes` (one entry per argument) has a number."""
    def one(i, axis, shape):
        if axis is None:
            return draw(40 + i, shape, dtype)
        axis = axis % (len(shape) + 1)
        return draw(40 + i, (*shape[:axis], BATCH, *shape[axis:]), dtype)
    return tuple(one(i, axis, shape if i < tested.rows else shape[-1:]) for i, axis in enumerate(axes))


def looped(f, axes, out_axes):
    """What vmap means, one element of the batch at a time."""
    def call(*args):
        each = [f(*(a if axis is None else jnp.take(a, b, axis) for a, axis in zip(args, axes))) for b in range(BATCH)]
        return tuple(jnp.stack(outs, out_axes) for outs in zip(*each))
    return call


def check(tested, implementation, shape, axes, out_axes=0):
    f = tested.bound(implementation)
    args = batched_arguments(tested, shape, axes)
    got = jax.jit(jax.vmap(f, axes, out_axes))(*args)
    assert_trees_close(got, jax.jit(looped(tested.plain, axes, out_axes))(*args), what=f"{axes} -> {out_axes}")


@every_op
@pytest.mark.parametrize("out_axes", (0, 1, 2, -1))
def test_every_in_axis_and_out_axis(implementation, tested, out_axes):
    for axis in (0, 1, 2, -1):
        check(tested, implementation, (4, 12), (axis,) * tested.rows + (None,), out_axes)


@every_op
def test_every_choice_of_batched_arguments(implementation, tested):
    for axes in itertools.product((0, None), repeat=tested.rows + 1):
        if any(axis is not None for axis in axes):
            check(tested, implementation, (2, 12), axes)


def test_operands_batched_along_different_axes(implementation):
    check(ADD_RMS_NORM, implementation, (4, 12), (2, 0, None), 1)
    check(ADD_RMS_NORM, implementation, (4, 12), (None, 1, 1), 2)


@every_op
def test_rows_of_rank_one(implementation, tested):
    check(tested, implementation, (12,), (0,) * tested.rows + (None,))
    check(tested, implementation, (12,), (1,) * tested.rows + (None,), 1)


@every_op
def test_nested_three_deep(implementation, tested):
    args = tested.arguments((3, 4, 2, 5, 12))
    for axis in (0, 1):
        def nested(f):
            for _ in range(3):
                f = jax.vmap(f, (axis,) * tested.rows + (None,), axis)
            return f
        got = jax.jit(nested(tested.bound(implementation)))(*args)
        assert_trees_close(got, tested.plain(*args))


@every_op
def test_nested_with_a_batched_scale_inside(implementation, tested):
    *rows, _ = tested.arguments((BATCH, 4, 5, 12))
    scales = draw(50, (4, 12))

    def nested(f):
        inner = jax.vmap(f, (0,) * tested.rows + (0,))
        return jax.vmap(inner, (0,) * tested.rows + (None,))

    got = jax.jit(nested(tested.bound(implementation)))(*rows, scales)
    want = nested(tested.plain)(*rows, scales)
    assert_trees_close(got, want)


@every_op
def test_batched_activations_keep_the_kernel_and_batched_scales_do_not(implementation, tested):
    rows_only = (0,) * tested.rows + (None,)
    args = batched_arguments(tested, (4, 12), rows_only)
    f = tested.bound(implementation)
    assert kernel_calls(jax.vmap(f, rows_only), *args) == kernels_expected(implementation)
    axes = (0,) * tested.rows + (0,)
    assert kernel_calls(jax.vmap(f, axes), *batched_arguments(tested, (4, 12), axes)) == 0


@every_op
def test_an_axis_size_alone(implementation, tested):
    args, f = tested.arguments((4, 12)), tested.bound(implementation)
    # under jit, nothing here is batched; the result may be, or not
    alone = jax.jit(jax.vmap(lambda: f(*args), axis_size=BATCH))()
    unmapped = jax.jit(jax.vmap(f, None, out_axes=None, axis_size=BATCH))(*args)
    want = tested.plain(*args)
    assert_trees_close(unmapped, want)
    assert_trees_close(alone, tuple(jnp.broadcast_to(w, (BATCH, *w.shape)) for w in want))


@every_op
def test_an_empty_batch(implementation, tested):
    *rows, scale = tested.arguments((0, 4, 12))
    for out in jax.vmap(tested.bound(implementation), (0,) * tested.rows + (None,))(*rows, scale):
        assert out.shape == (0, 4, 12)


@every_op
def test_a_named_axis(implementation, tested):
    *rows, scale = tested.arguments((BATCH, 4, 12))

    def mean_over_batch(f):
        return jax.vmap(lambda *a: jax.lax.pmean(f(*a), "batch"), (0,) * tested.rows + (None,), axis_name="batch")

    got = jax.jit(mean_over_batch(tested.bound(implementation)))(*rows, scale)
    assert_trees_close(got, mean_over_batch(tested.plain)(*rows, scale))


@every_op
def test_per_example_gradients(implementation, tested):
    args = tested.arguments((BATCH, 4, 12))
    axes, argnums = (0,) * tested.rows + (None,), tuple(range(len(args)))

    def per_example(f):
        return jax.vmap(jax.grad(loss(f), argnums), axes)

    got = jax.jit(per_example(tested.bound(implementation)))(*args)
    assert got[-1].shape == (BATCH, 12)
    assert_trees_close(got, jax.jit(per_example(tested.plain))(*args))


@every_op
def test_gradients_with_a_batched_scale(implementation, tested):
    axes = (None,) * tested.rows + (0,)
    args = batched_arguments(tested, (4, 12), axes)
    argnums = tuple(range(len(args)))
    got, want = (jax.jit(jax.vmap(jax.grad(loss(f), argnums), axes))(*args)
                 for f in (tested.bound(implementation), tested.plain))
    assert_trees_close(got, want)


@every_op
def test_vmap_of_jvp_and_jvp_of_vmap(implementation, tested):
    args, tangents = tested.arguments((BATCH, 4, 12)), tested.arguments((BATCH, 4, 12), seed=60)
    axes = (0,) * tested.rows + (None,)

    def both(f):
        inside = jax.vmap(lambda *a: jax.jvp(f, a[:len(args)], a[len(args):]), axes + axes)
        return lambda args, tangents: (inside(*args, *tangents), jax.jvp(jax.vmap(f, axes), args, tangents))

    got, want = (jax.jit(both(f))(args, tangents) for f in (tested.bound(implementation), tested.plain))
    assert_trees_close(got, want)


@every_op
def test_batches_of_tangents_and_cotangents_alone(implementation, tested):
    args = tested.arguments((2, 6))
    outs = jax.eval_shape(tested.plain, *args)
    tangents = tuple(draw(70 + i, (BATCH, *a.shape)) for i, a in enumerate(args))
    cotangents = tuple(draw(75 + i, (BATCH, *o.shape)) for i, o in enumerate(outs))

    def both(f):
        def run(args, tangents, cotangents):
            push = jax.vmap(lambda *t: jax.jvp(f, args, t)[1])
            pull = jax.vmap(lambda *c: jax.vjp(f, *args)[1](c))
            return push(*tangents), pull(*cotangents)
        return run

    got, want = (jax.jit(both(f))(args, tangents, cotangents) for f in (tested.bound(implementation), tested.plain))
    assert_trees_close(got, want)


@every_op
def test_vmap_of_scan_and_of_cond(implementation, tested):
    *rows, scale = tested.arguments((BATCH, 4, 12))
    axes = (0,) * tested.rows + (None,)

    def scanned(f, *a):
        return jax.lax.scan(lambda c, row: (c + f(*row, a[-1])[0], row[0]), jnp.zeros(12), a[:-1])[0]

    def chosen(f, *a):
        return jax.lax.cond(a[0].sum() > 0, lambda: f(*a)[0], lambda: 2 * f(*a)[0])

    for body in (scanned, chosen):
        got, want = (jax.jit(jax.vmap(functools.partial(body, f), axes))(*rows, scale)
                     for f in (tested.bound(implementation), tested.plain))
        assert_trees_close(got, want)


def test_keyword_options_survive_vmap(implementation):
    x = draw(80, (BATCH, 2, 12))
    got = jax.vmap(functools.partial(RMS_NORM.op, epsilon=0.5, implementation=implementation))(x)
    assert_trees_close(got, RMS_NORM.formula(x, epsilon=0.5))
