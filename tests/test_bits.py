"""A row's bits depend on its values, the options and the width alone, and are the same every time.

The first half is what kernels promise: the reference is compiled by XLA, which may sum in another order for another shape.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import repeated
from ops import every_op
from plain import draw, draw_scale

# With an odd width each row starts at another alignment.
WIDTHS = (7, 257, 2816)
POINTS = pytest.mark.parametrize("dtype", ("float32", "bfloat16"))


def rows_of(outs, index):
    return tuple(np.asarray(o)[index] for o in outs)


def same(got, want, what=""):
    for i, (g, w) in enumerate(zip(got, want)):
        oracle.assert_same_bits(g, w, what=f"result {i} {what}")


@every_op
@POINTS
def test_bits_do_not_depend_on_the_number_of_rows(kernel, tested, dtype):
    f = jax.jit(tested.bound(kernel))
    for width in WIDTHS:
        *rows, scale = tested.arguments((65, width), dtype, dtype)
        whole = f(*rows, scale)
        for count in (1, 2, 3, 33):
            same(f(*(r[:count] for r in rows), scale), rows_of(whole, slice(0, count)), f"{count} rows of {width}")


@every_op
@POINTS
def test_bits_do_not_depend_on_the_place_in_the_batch(kernel, tested, dtype):
    f = jax.jit(tested.bound(kernel))
    order = np.random.default_rng(0).permutation(33)
    for width in WIDTHS:
        *rows, scale = tested.arguments((33, width), dtype, dtype)
        whole = f(*rows, scale)
        same(f(*(r[order] for r in rows), scale), rows_of(whole, order), f"width {width}")
        # neighbours of any size, and rows that are not finite, change nothing either
        other = [r.at[1::2].set(jnp.asarray(1e4, dtype)).at[3].set(jnp.nan) for r in rows]
        same(rows_of(f(*other, scale), slice(0, None, 2)), rows_of(whole, slice(0, None, 2)), f"width {width}")


@every_op
@POINTS
def test_bits_do_not_depend_on_the_leading_dimensions(kernel, tested, dtype):
    f = jax.jit(tested.bound(kernel))
    for width in WIDTHS:
        *rows, scale = tested.arguments((12, width), dtype, dtype)
        want = f(*rows, scale)
        for leading in ((2, 6), (3, 2, 2), (1, 12), (12, 1)):
            got = f(*(r.reshape(*leading, width) for r in rows), scale)
            same([g.reshape(12, width) for g in got], want, f"{leading} of {width}")
        same(f(*(r[5] for r in rows), scale), rows_of(want, 5), f"rank one of {width}")


@every_op
@POINTS
def test_bits_do_not_depend_on_jit_or_vmap(kernel, tested, dtype):
    eager = tested.bound(kernel)
    for width in WIDTHS:
        *rows, scale = tested.arguments((6, width), dtype, dtype)
        want = eager(*rows, scale)
        same(jax.jit(eager)(*rows, scale), want, f"jit, width {width}")
        vmapped = jax.vmap(eager, (0,) * tested.rows + (None,))
        same(jax.jit(vmapped)(*rows, scale), want, f"vmap, width {width}")
        same(jax.jit(lambda *a: jax.lax.map(lambda row: eager(*row, a[-1]), a[:-1]))(*rows, scale), want, f"map, width {width}")


@every_op
def test_bits_do_not_depend_on_what_else_is_in_the_program(kernel, tested):
    f = tested.bound(kernel)
    *rows, scale = tested.arguments((9, 557), "bfloat16", "bfloat16")
    doubled = jax.jit(lambda *a: f(*(2 * r / 2 for r in a[:-1]), a[-1]))
    same(doubled(*rows, scale), f(*rows, scale))


@every_op
def test_a_hundred_runs_give_the_same_bits(implementation, tested):
    # thousands of rows, so that every worker has some
    f = jax.jit(tested.bound(implementation))
    rows, runs = repeated(implementation, 3000, 100)
    args = tested.arguments((rows, 129), "bfloat16", "float32")
    want = rows_of(f(*args), slice(None))
    for i in range(runs):
        same(f(*args), want, f"run {i}")


@every_op
def test_a_hundred_runs_of_the_gradient_give_the_same_bits(implementation, tested):
    f = tested.bound(implementation)
    rows, runs = repeated(implementation, 1500, 100)
    args = tested.arguments((rows, 65), "bfloat16", "float32")
    pull = jax.jit(lambda *args: jax.vjp(f, *args)[1](f(*args)))
    want = rows_of(pull(*args), slice(None))
    for i in range(runs):
        same(pull(*args), want, f"run {i}")


@every_op
def test_concurrent_calls_from_eight_threads(implementation, tested):
    f = jax.jit(tested.bound(implementation))
    rows, runs = repeated(implementation, 500, 20)
    arguments = [tested.arguments((rows + 7 * i, 129), "bfloat16", "float32", seed=20 * i) for i in range(8)]
    wants = [rows_of(f(*args), slice(None)) for args in arguments]
    failures, start = [], threading.Barrier(8)

    def work(i):
        try:
            start.wait(60)
            for run in range(runs):
                same(f(*arguments[i]), wants[i], f"thread {i}, run {run}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if failures:
        raise failures[0]


def test_many_independent_calls_in_one_program(implementation):
    # enough thunks, and buffers large enough, for XLA:CPU to run them at the same time
    from jax_fusednorm import rms_norm

    op = functools.partial(rms_norm, implementation=implementation)
    xs, scale = [draw(i, (64, 300), "bfloat16") for i in range(16)], draw_scale(99, 300, "float32")
    program = jax.jit(lambda xs, scale: [op(x, scale) for x in xs])
    for _ in range(10):
        for x, got in zip(xs, program(xs, scale)):
            oracle.assert_close(got, oracle.rms_norm(x, scale), "bfloat16")


def test_every_output_is_written(kernel):
    # what a launch leaves unwritten is NaN here: see conftest
    from jax_fusednorm import add_rms_norm

    for width in (1, 31, 33, 513, 8193):
        x = jnp.ones((5, width), jnp.bfloat16)
        for out in add_rms_norm(x, x, implementation=kernel):
            assert np.isfinite(np.asarray(out, np.float32)).all()
