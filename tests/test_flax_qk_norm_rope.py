"""QKNormRope, for nnx and linen: the op with scales of its own, at its dtype, trained as any module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from jax_fusednorm import qk_rms_norm_rope, rope_table
from jax_fusednorm.flax import linen as fused_linen, nnx as fused_nnx
from plain import draw

WIDTH = 16
POSITIONS = jnp.asarray([3, 9])


def inputs(dtype="bfloat16"):
    return draw(1, (2, 4, WIDTH), dtype), draw(2, (2, 2, WIDTH), dtype)


@pytest.mark.parametrize("dtype", (None, jnp.bfloat16))
def test_both_modules_are_the_op(implementation, dtype):
    q, k = inputs()
    op_options = dict(theta=1e6, rope_dim=8, style="interleaved", scale_offset=1.0, multiply_before_cast=False, implementation=implementation)
    module = fused_nnx.QKNormRope(WIDTH, rngs=nnx.Rngs(0), dtype=dtype, **op_options)
    layer = fused_linen.QKNormRope(dtype=dtype, **op_options)
    variables = layer.init(jax.random.key(0), q, k, POSITIONS)
    paths = {(*path,) for path, _ in nnx.to_flat_state(nnx.state(module))}
    assert paths == {("q_norm", "scale"), ("k_norm", "scale")}
    assert jax.tree.map(jnp.shape, variables) == {"params": {"q_norm": {"scale": (WIDTH,)}, "k_norm": {"scale": (WIDTH,)}}}
    scales = draw(3, (2, WIDTH))
    module.q_norm.scale[...], module.k_norm.scale[...] = scales
    variables = {"params": {name: {"scale": scale} for name, scale in zip(("q_norm", "k_norm"), scales)}}

    wanted = jnp.float32 if dtype is None else dtype  # a bfloat16 input and a float32 scale promote, as in Flax
    want = qk_rms_norm_rope(q.astype(wanted), k.astype(wanted), *scales, POSITIONS, **op_options)
    for got in (nnx.jit(module)(q, k, POSITIONS), jax.jit(layer.apply)(variables, q, k, POSITIONS)):
        for g, w in zip(got, want):
            oracle.assert_same_bits(g, w)


def test_an_option_that_is_none_is_refused_when_the_module_is_made():
    for make in (lambda: fused_nnx.QKNormRope(WIDTH, thetta=1e6, rngs=nnx.Rngs(0)), lambda: fused_linen.QKNormRope(thetta=1e6)):
        with pytest.raises(TypeError, match="thetta"):
            make()


def test_both_modules_take_a_table_and_factors(implementation):
    q, k = inputs("float32")
    module = fused_nnx.QKNormRope(WIDTH, rngs=nnx.Rngs(0), implementation=implementation)
    layer = fused_linen.QKNormRope(implementation=implementation)
    variables = layer.init(jax.random.key(0), q, k, POSITIONS)
    for tables in (dict(freqs_cis=rope_table(10, WIDTH)), dict(freq_factors=np.linspace(1, 4, WIDTH // 2))):
        want = qk_rms_norm_rope(q, k, jnp.ones(WIDTH), jnp.ones(WIDTH), POSITIONS, implementation=implementation, **tables)
        for got in (module(q, k, POSITIONS, **tables), layer.apply(variables, q, k, POSITIONS, **tables)):
            for g, w in zip(got, want):
                oracle.assert_same_bits(g, w)


def test_the_scales_are_trained(implementation):
    module = fused_nnx.QKNormRope(WIDTH, implementation=implementation, rngs=nnx.Rngs(0))
    q, k = inputs("float32")
    gradients = nnx.jit(nnx.grad(lambda module: sum((o ** 2 * jnp.arange(WIDTH)).sum() for o in module(q, k, POSITIONS))))(module)
    steps = nnx.jit(lambda module: sum((o ** 2 * jnp.arange(WIDTH)).sum() for o in module(q, k, POSITIONS)))
    for name in ("q_norm", "k_norm"):
        gradient = np.asarray(gradients[name]["scale"][...], np.float64)
        moved = nnx.clone(module)
        direction = gradient / np.linalg.norm(gradient)
        getattr(moved, name).scale[...] += 1e-2 * direction.astype(np.float32)
        back = nnx.clone(module)
        getattr(back, name).scale[...] -= 1e-2 * direction.astype(np.float32)
        slope = (float(steps(moved)) - float(steps(back))) / 2e-2
        np.testing.assert_allclose(slope, np.linalg.norm(gradient), rtol=1e-3)
