"""jit and control flow, checkpointing, donation, debugging modes, and what does and does not trace again."""

import functools
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jax_fusednorm
import oracle
from jax_fusednorm import add_rms_norm, explain, rms_norm
from ops import ALL, assert_trees_close, every_op, kernel_calls, kernels_expected, loss
from plain import draw


@every_op
def test_jit_and_eager_agree(implementation, tested):
    args, f = tested.arguments((3, 5, 24), "bfloat16"), tested.bound(implementation)
    for eager, jitted in zip(f(*args), jax.jit(f)(*args)):
        oracle.assert_same_bits(jitted, eager)


@every_op
def test_numpy_arguments(implementation, tested):
    args, f = tested.arguments((3, 24), "bfloat16"), tested.bound(implementation)
    for a, b in zip(f(*map(np.asarray, args)), f(*args)):
        assert isinstance(a, jax.Array)
        oracle.assert_same_bits(a, b)


@every_op
def test_one_custom_call_or_none(implementation, tested):
    args = tested.arguments((3, 5, 24))
    assert kernel_calls(tested.bound(implementation), *args) == kernels_expected(implementation)


def block_of(tested, f, activation=jnp.tanh):
    """One layer of a small network: a residual stream and what the last layer adds to it."""
    def block(carry, scale):
        stream, update = carry
        normed, *total = f(*((update, stream) if tested.rows == 2 else (stream,)), scale)
        stream = total[0] if total else stream
        return (stream + 0.1 * activation(normed), activation(normed)), normed.mean()
    return block


def both(tested, implementation):
    return tested.bound(implementation), tested.plain


LAYERS = 4


def stack_arguments():
    return (draw(1, (3, 24)), draw(2, (3, 24))), draw(3, (LAYERS, 24))


@every_op
def test_scan_over_layers_with_its_gradient(implementation, tested):
    carry, scales = stack_arguments()

    def run(f):
        def total(carry, scales):
            (stream, _), means = jax.lax.scan(block_of(tested, f), carry, scales)
            return jnp.sin(stream).sum() + means.sum()
        return jax.jit(jax.value_and_grad(total, (0, 1)))(carry, scales)

    got, want = map(run, both(tested, implementation))
    assert_trees_close(got, want)


@every_op
def test_while_fori_and_cond(implementation, tested):
    carry, scales = stack_arguments()

    def run(f):
        block = block_of(tested, f)

        def looped(carry, scales):
            whiled = jax.lax.while_loop(lambda s: s[0] < LAYERS, lambda s: (s[0] + 1, block(s[1], scales[s[0]])[0]), (0, carry))
            foried = jax.lax.fori_loop(0, LAYERS, lambda i, c: block(c, scales[i])[0], carry)
            chosen = [jax.lax.cond(scales.sum() > bound, lambda: block(carry, scales[0])[0], lambda: carry)
                      for bound in (-1e9, 1e9)]
            return whiled[1], foried, chosen

        return jax.jit(looped)(carry, scales)

    got, want = map(run, both(tested, implementation))
    assert_trees_close(got, want)


@every_op
@pytest.mark.parametrize("policy", ("nothing_saveable", "everything_saveable", "dots_with_no_batch_dims_saveable", "name"))
def test_remat_under_every_policy(implementation, tested, policy):
    carry, scales = stack_arguments()
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names("kept") if policy == "name" else getattr(policies, policy)

    def run(f):
        def named(stream):
            return checkpoint_name(jnp.tanh(stream), "kept")

        def total(carry, scales):
            block = jax.checkpoint(block_of(tested, f, named), policy=policy)
            (stream, _), means = jax.lax.scan(block, carry, scales)
            return jnp.sin(stream).sum() + means.sum()

        return jax.jit(jax.grad(total, (0, 1)))(carry, scales)

    got, want = map(run, both(tested, implementation))
    assert_trees_close(got, want)


@every_op
def test_donation(implementation, tested):
    args = tested.arguments((64, 256))
    want = tested.bound(implementation)(*args)
    step = jax.jit(tested.bound(implementation), donate_argnums=range(tested.rows))
    donated = [jnp.array(a, copy=True) for a in args[:-1]]
    for got, w in zip(step(*donated, args[-1]), want):
        oracle.assert_same_bits(got, w)
    assert donated[0].is_deleted()
    # a donated buffer is not some other array's memory
    x = jnp.array(args[0], copy=True)
    step = jax.jit(functools.partial(rms_norm, implementation=implementation), donate_argnums=0)
    for _ in range(3):
        x = step(x)
    np.testing.assert_allclose(np.mean(np.square(x), -1), 1.0, rtol=1e-4)


def test_without_donation_the_operands_are_untouched(implementation):
    x, residual = draw(4, (64, 256)), draw(5, (64, 256))
    before = np.array(x), np.array(residual)
    jax.block_until_ready(add_rms_norm(x, residual, implementation=implementation))
    oracle.assert_same_bits(x, before[0])
    oracle.assert_same_bits(residual, before[1])


@every_op
def test_disable_jit(implementation, tested):
    args = tested.arguments((3, 24))
    f = tested.bound(implementation)
    want = jax.jit(f)(*args), jax.jit(jax.grad(loss(f), range(len(args))))(*args)
    with jax.disable_jit():
        got = f(*args), jax.grad(loss(f), range(len(args)))(*args)
        vmapped = jax.vmap(f, (0,) * tested.rows + (None,))(*args)
    assert_trees_close(got, want)
    assert_trees_close(vmapped, want[0])


@every_op
def test_no_tracer_leaks(implementation, tested):
    args = tested.arguments((3, 25))
    f = tested.bound(implementation)
    with jax.checking_leaks():
        jax.jit(jax.grad(loss(f), range(len(args))))(*args)
        jax.jit(jax.vmap(f, (0,) * tested.rows + (None,)))(*args)
        jax.linearize(f, *args)[1](*args)


@every_op
def test_internal_checks_and_strict_promotion(implementation, tested):
    args = tested.arguments((3, 26), "bfloat16", "float32")
    f = tested.bound(implementation)
    with jax.enable_checks(True), jax.numpy_dtype_promotion("strict"):
        outs, pull = jax.vjp(f, *args)
        pull(outs)
        jax.jvp(f, args, args)


def test_reverse_mode_of_zero_rows(implementation):
    for tested in ALL:
        args = tested.arguments((0, 24))
        *rows, scale = jax.grad(loss(tested.bound(implementation)), range(len(args)))(*args)
        assert all(r.shape == (0, 24) for r in rows) and (np.asarray(scale) == 0).all()


def test_equal_options_share_one_compilation(implementation, caplog):
    x = draw(7, (2, 27))
    call = functools.partial(rms_norm, implementation=implementation)
    jax.block_until_ready(call(x, epsilon=1e-3))

    def compilations(**options):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            jax.block_until_ready(call(x, **options))
        return sum("Compiling" in record.getMessage() for record in caplog.records)

    assert compilations(epsilon=1e-3) == 0
    assert compilations(epsilon=np.float64(1e-3)) == 0
    assert compilations(epsilon=1e-3, scale_offset=0, multiply_before_cast=np.True_) == 0
    assert compilations(epsilon=2e-3) == 1


def test_options_can_be_static_arguments_of_jit(implementation):
    x, scale = draw(8, (2, 24)), draw(9, (24,))
    names = ("epsilon", "scale_offset", "multiply_before_cast", "implementation")
    step = jax.jit(rms_norm, static_argnames=names)
    for epsilon in (1e-6, 1.0):
        got = step(x, scale, epsilon=epsilon, scale_offset=1.0, multiply_before_cast=False, implementation=implementation)
        oracle.assert_close(got, oracle.rms_norm(x, scale, epsilon=epsilon, scale_offset=1.0), "float32")


def counted(traces):
    @jax.jit
    def f(x):
        traces.append(1)
        return rms_norm(x)
    return f


def test_the_implementation_context_traces_again_and_its_end_does_not():
    x, traces = draw(10, (2, 24)), []
    f = counted(traces)
    f(x), f(x)
    assert len(traces) == 1
    with jax_fusednorm.implementation("jnp"):
        f(x), f(x)
        assert len(traces) == 2
        with jax_fusednorm.implementation("auto"):
            f(x)
    f(x)
    assert len(traces) == 2


def test_the_implementation_context_decides_and_an_argument_overrides_it(host_kernel):
    x = draw(11, (2, 24))
    with jax_fusednorm.implementation("jnp"):
        assert kernel_calls(rms_norm, x) == 0
        assert kernel_calls(functools.partial(rms_norm, implementation="host"), x) == 1
        with jax_fusednorm.implementation("kernel"):
            assert kernel_calls(rms_norm, x) == 1
        assert kernel_calls(rms_norm, x) == 0
    assert kernel_calls(rms_norm, x) == 1
    with jax_fusednorm.implementation("host"):
        assert kernel_calls(functools.partial(rms_norm, implementation="jnp"), x) == 0


def test_the_implementation_context_belongs_to_its_thread(host_kernel):
    seen = []
    with jax_fusednorm.implementation("jnp"):
        thread = threading.Thread(target=lambda: seen.append(kernel_calls(rms_norm, draw(12, (2, 24)))))
        thread.start()
        thread.join()
    assert seen == [1]


def test_the_context_is_left_after_an_error():
    before = str(explain(rms_norm, draw(13, (2, 24)))["cpu"])
    with pytest.raises(RuntimeError), jax_fusednorm.implementation("jnp"):
        raise RuntimeError
    assert str(explain(rms_norm, draw(13, (2, 24)))["cpu"]) == before


def test_explain_says_what_runs_on_each_platform(implementation):
    x = jax.ShapeDtypeStruct((2, 24), jnp.bfloat16)
    for tested in ALL:
        args, options = tested.arguments((2, 24), "bfloat16"), dict(tested.options)
        found = explain(tested.op, *args, implementation=implementation if implementation != "jnp" else "auto", **options)
        assert {"cpu", "cuda", "tpu"} <= set(found)
        assert "jnp" in str(explain(tested.op, *args, implementation="jnp", **options)["cpu"])
        if implementation not in ("jnp", "cuda"):
            assert str(found["cpu"]).startswith(implementation)
    assert all(str(explain(rms_norm, x)[p]).startswith("jnp") for p in ("tpu", "rocm", "mps"))


def test_the_primitives_name_and_scope_are_the_ops():
    x = draw(14, (2, 24))
    assert " rms_norm[" in str(jax.make_jaxpr(rms_norm)(x))
    assert " add_rms_norm[" in str(jax.make_jaxpr(add_rms_norm)(x, x))
    assert "jax_fusednorm.add_rms_norm" in jax.jit(add_rms_norm).lower(x, x).as_text(debug_info=True)
