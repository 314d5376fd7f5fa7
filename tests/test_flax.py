"""The Flax modules: drop-in for Flax's RMSNorm, the same parameters and dtypes, and sound inside models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

flax = pytest.importorskip("flax")
from flax import linen, nnx  # noqa: E402

import jax_fusednorm.flax.linen as our_linen  # noqa: E402
import jax_fusednorm.flax.nnx as our_nnx  # noqa: E402
import oracle  # noqa: E402
import plain  # noqa: E402
from ops import assert_trees_close, kernel_calls, kernels_expected  # noqa: E402
from plain import draw  # noqa: E402

WIDTH = 24
DTYPES = (None, "float32", "bfloat16", "float16")


def make_nnx(module, **options):
    """A module and a function of (its parameters, inputs)."""
    graph, params = nnx.split(module(WIDTH, rngs=nnx.Rngs(0), **options))
    params = jax.tree.map(lambda p: draw(1, p.shape, p.dtype), params)
    return params, lambda params, *inputs, **kw: nnx.merge(graph, params)(*inputs, **kw)


def make_linen(module, *inputs, **options):
    made = module(**options)
    params = jax.tree.map(lambda p: draw(1, p.shape, p.dtype), made.init(jax.random.key(0), *inputs))
    return params, made.apply


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", ("float32", "bfloat16"))
def test_rms_norm_promotes_and_computes_as_flax_does(implementation, dtype, param_dtype):
    options = dict(dtype=dtype, param_dtype=param_dtype, epsilon=1e-5)
    for x_dtype in ("float32", "bfloat16", "float16", "int32"):
        x = (4 * draw(2, (2, 5, WIDTH))).astype(x_dtype)
        ours = dict(options, implementation=implementation)
        pairs = ((make_nnx(nnx.RMSNorm, **options), make_nnx(our_nnx.RMSNorm, **ours)),
                 (make_linen(linen.RMSNorm, x, **options), make_linen(our_linen.RMSNorm, x, **ours)))
        for (their_params, theirs), (our_params, our_call) in pairs:
            assert_trees_close(our_params, their_params, rtol=0, atol=0)
            want, got = theirs(their_params, x), our_call(our_params, x)
            tolerance = dict(rtol=1e-5, atol=1e-5) if want.dtype == jnp.float32 else dict(rtol=2e-2, atol=1e-3)
            assert_trees_close(got, want, what=f"{x_dtype}: ", **tolerance)


def test_float32_from_bfloat16_under_no_dtype(implementation):
    x = draw(3, (2, WIDTH), "bfloat16")
    params, call = make_nnx(our_nnx.RMSNorm, implementation=implementation)
    assert call(params, x).dtype == jnp.float32
    params, call = make_nnx(our_nnx.RMSNorm, dtype=jnp.bfloat16, implementation=implementation)
    assert call(params, x).dtype == jnp.bfloat16


def test_nnx_checkpoints_go_both_ways(implementation):
    ours = our_nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0), implementation=implementation)
    theirs = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0))
    x = draw(4, (3, WIDTH))
    for source, target, seed in ((theirs, ours, 5), (ours, theirs, 6)):
        state = jax.tree.map(lambda p: draw(seed, p.shape, p.dtype), nnx.state(source))
        nnx.update(source, state)
        nnx.update(target, nnx.state(source))
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(target))]
        assert paths == [("scale",)]
        assert_trees_close(target(x), source(x), rtol=1e-5, atol=1e-5)


def test_linen_checkpoints_go_both_ways(implementation):
    x = draw(7, (3, WIDTH))
    ours, theirs = our_linen.RMSNorm(implementation=implementation), linen.RMSNorm()
    params = {"params": {"scale": draw(8, (WIDTH,))}}
    assert jax.tree.structure(ours.init(jax.random.key(0), x)) == jax.tree.structure(params)
    assert_trees_close(ours.apply(params, x), theirs.apply(params, x), rtol=1e-5, atol=1e-5)


def test_orbax_restores_flaxs_checkpoint(implementation, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    theirs = nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0))
    theirs.scale[...] = draw(9, (WIDTH,))
    ours = our_nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0), implementation=implementation)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(theirs)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(nnx.state(ours)))
    state = nnx.state(ours)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(ours, state)
    oracle.assert_same_bits(ours.scale[...], theirs.scale[...])


def test_the_modules_run_the_kernel(implementation):
    x = draw(10, (3, WIDTH))
    for module, inputs in ((our_nnx.RMSNorm, (x,)), (our_nnx.AddRMSNorm, (x, x))):
        params, call = make_nnx(module, implementation=implementation)
        assert kernel_calls(call, params, *inputs) == kernels_expected(implementation)
    for module, inputs in ((our_linen.RMSNorm, (x,)), (our_linen.AddRMSNorm, (x, x))):
        params, call = make_linen(module, *inputs, implementation=implementation)
        assert kernel_calls(call, params, *inputs) == kernels_expected(implementation)


@pytest.mark.parametrize("axis", (1, -1))
def test_the_last_axis_by_either_name_runs_the_kernel(implementation, axis):
    params, call = make_nnx(our_nnx.RMSNorm, reduction_axes=axis, feature_axes=(axis,), implementation=implementation)
    assert kernel_calls(call, params, draw(11, (3, WIDTH))) == kernels_expected(implementation)


@pytest.mark.parametrize("axes", (dict(reduction_axes=(1, 2)), dict(reduction_axes=(-2, -1)), dict(reduction_axes=0),
                                  dict(reduction_axes=1, feature_axes=1)), ids=str)
def test_other_axes_are_flaxs_own(axes):
    x = draw(12, (2, WIDTH, WIDTH))
    for params, ours, theirs in (
            (*make_nnx(our_nnx.RMSNorm, **axes), make_nnx(nnx.RMSNorm, **axes)[1]),
            (*make_linen(our_linen.RMSNorm, x, **axes), make_linen(linen.RMSNorm, x, **axes)[1])):
        oracle.assert_same_bits(ours(params, x), theirs(params, x))


def test_a_mask_is_flaxs_own():
    x, mask = draw(13, (4, WIDTH)), draw(14, (4, WIDTH)) > 0
    params, ours = make_nnx(our_nnx.RMSNorm)
    oracle.assert_same_bits(ours(params, x, mask=mask), make_nnx(nnx.RMSNorm)[1](params, x, mask=mask))
    params, ours = make_linen(our_linen.RMSNorm, x)
    oracle.assert_same_bits(ours(params, x, mask=mask), make_linen(linen.RMSNorm, x)[1](params, x, mask=mask))


def test_a_mean_over_a_named_axis_is_flaxs_own():
    x = draw(15, (4, 3, WIDTH))
    (params, ours), (_, theirs) = make_nnx(our_nnx.RMSNorm, axis_name="b"), make_nnx(nnx.RMSNorm, axis_name="b")
    got, want = (jax.vmap(functools.partial(f, params), axis_name="b")(x) for f in (ours, theirs))
    oracle.assert_same_bits(got, want)


def test_options_that_flaxs_path_cannot_honour_are_refused():
    x = draw(16, (2, WIDTH, WIDTH))
    for option in (dict(scale_offset=1.0), dict(multiply_before_cast=False)):
        params, call = make_nnx(our_nnx.RMSNorm, reduction_axes=(1, 2), **option)
        with pytest.raises(ValueError, match=next(iter(option))):
            call(params, x)


def test_options_reach_the_op(implementation):
    x, residual = draw(17, (9, WIDTH), "bfloat16"), draw(18, (9, WIDTH), "bfloat16")
    options = dict(epsilon=1e-2, scale_offset=1.0, multiply_before_cast=False)
    ours = dict(options, dtype=jnp.bfloat16, implementation=implementation)
    for params, call in (make_nnx(our_nnx.RMSNorm, **ours), make_linen(our_linen.RMSNorm, x, **ours)):
        scale, = jax.tree.leaves(params)
        oracle.assert_close(call(params, x), oracle.rms_norm(x, scale, **options), "bfloat16")
    options["sum_rounding"], ours["sum_rounding"] = "storage", "storage"
    for params, call in (make_nnx(our_nnx.AddRMSNorm, **ours), make_linen(our_linen.AddRMSNorm, x, residual, **ours)):
        scale, = jax.tree.leaves(params)
        for got, want in zip(call(params, x, residual), oracle.add_rms_norm(x, residual, scale, **options)):
            oracle.assert_close(got, want, "bfloat16")


def test_a_module_starts_as_the_identity_scale(implementation):
    x = draw(19, (3, WIDTH))
    want = oracle.rms_norm(x)
    for offset in (0.0, 1.0):
        options = dict(scale_offset=offset, implementation=implementation)
        oracle.assert_close(our_nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0), **options)(x), want, "float32")
        oracle.assert_close(our_nnx.AddRMSNorm(WIDTH, rngs=nnx.Rngs(0), **options)(x, 0 * x)[0], want, "float32")
        for made, inputs in ((our_linen.RMSNorm(**options), (x,)), (our_linen.AddRMSNorm(**options), (x, 0 * x))):
            got = made.apply(made.init(jax.random.key(0), *inputs), *inputs)
            oracle.assert_close(got[0] if isinstance(got, tuple) else got, want, "float32")


def test_without_a_scale_and_without_the_sum(implementation):
    x = draw(20, (3, WIDTH))
    options = dict(use_scale=False, implementation=implementation)
    params, call = make_nnx(our_nnx.RMSNorm, **options)
    assert not jax.tree.leaves(params)
    oracle.assert_close(call(params, x), oracle.rms_norm(x), "float32")
    params, call = make_nnx(our_nnx.AddRMSNorm, return_sum=False, **options)
    oracle.assert_close(call(params, x, x), oracle.add_rms_norm(x, x)[0], "float32")
    params, call = make_linen(our_linen.AddRMSNorm, x, x, return_sum=False, **options)
    oracle.assert_close(call(params, x, x), oracle.add_rms_norm(x, x)[0], "float32")


class Model(nnx.Module):
    """Two layers with a residual stream, and a readout."""

    def __init__(self, dtype, implementation):
        rngs, options = nnx.Rngs(1), dict(dtype=dtype, implementation=implementation)
        self.dense = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs, dtype=dtype) for _ in range(2)])
        self.norms = nnx.List([our_nnx.AddRMSNorm(WIDTH, rngs=rngs, sum_rounding=r, **options) for r in ("float32", "storage")])
        self.last = our_nnx.RMSNorm(WIDTH, rngs=rngs, **options)

    def __call__(self, x):
        stream, update = x, jnp.zeros_like(x)
        for dense, norm in zip(self.dense, self.norms):
            normed, stream = norm(update, stream)
            update = jnp.tanh(dense(normed))
        return self.last(stream + update)


def per_example_gradients(dtype, implementation):
    graph, params = nnx.split(Model(dtype, implementation))

    def loss(params, x, target):
        return jnp.mean((nnx.merge(graph, params)(x).astype(jnp.float32) - target) ** 2)

    x, target = draw(21, (5, 7, WIDTH), dtype), draw(22, (5, 7, WIDTH))
    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, x, target)
    return nnx.to_pure_dict(grads), jax.vmap(lambda x: nnx.merge(graph, params)(x))(x)


def test_per_example_gradients_of_a_model_agree_with_jnp(implementation):
    (grads, outs), (want_grads, want_outs) = (per_example_gradients(jnp.float32, i) for i in (implementation, "jnp"))
    oracle.assert_close(outs, want_outs, "float32")
    assert all(float(jnp.abs(g).max()) > 1e-6 for g in jax.tree.leaves(want_grads))
    assert_trees_close(grads, want_grads, rtol=1e-4, atol=1e-5)
    # in bfloat16 a flipped rounding travels through the layers
    (grads, outs), (want_grads, want_outs) = (per_example_gradients(jnp.bfloat16, i) for i in (implementation, "jnp"))
    assert_trees_close(outs, want_outs, rtol=1.6e-2, atol=1e-2)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads)):
        assert np.linalg.norm(g - w) <= 2e-2 * np.linalg.norm(w)


def test_linen_scan_and_remat_over_layers(implementation):
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, carry, _):
            normed, stream = our_linen.AddRMSNorm(implementation=implementation)(*carry)
            return (jnp.tanh(normed), stream), None

    layers = linen.scan(linen.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    carry = draw(23, (4, WIDTH)), draw(24, (4, WIDTH))
    params, call = make_linen(layers, carry, None)
    scales, = jax.tree.leaves(params)
    assert scales.shape == (3, WIDTH)

    def plainly(scales):
        x, stream = carry
        for scale in scales:
            normed, stream = plain.add_rms_norm(x, stream, scale)
            x = jnp.tanh(normed)
        return x, stream

    got = jax.jit(jax.value_and_grad(lambda p: sum(a.sum() for a in call(p, carry, None)[0])))(params)
    want = jax.jit(jax.value_and_grad(lambda s: sum(a.sum() for a in plainly(s))))(scales)
    assert_trees_close(jax.tree.leaves(got), jax.tree.leaves(want))
