"""MatmulPartialRMSNorm, for nnx and linen: the op with a kernel and a scale of its own, which are Flax's own layer's and trained as any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import oracle
from jax_fusednorm import matmul_partial_rms_norm
from jax_fusednorm.flax import linen as fused_linen, nnx as fused_nnx
from plain import draw

WIDTH, OUTPUTS, NORMED = 24, 40, 17


@pytest.mark.parametrize("dtype", (None, jnp.bfloat16))
def test_both_modules_are_the_op(implementation, dtype):
    x = draw(1, (3, 5, WIDTH), "bfloat16")
    options = dict(dtype=dtype, scale_offset=1.0, implementation=implementation)
    module = fused_nnx.MatmulPartialRMSNorm(WIDTH, OUTPUTS, NORMED, rngs=nnx.Rngs(0), **options)
    layer = fused_linen.MatmulPartialRMSNorm(OUTPUTS, NORMED, **options)
    params = layer.init(jax.random.key(0), x)["params"]
    for kernel, scale in ((module.kernel[...], module.scale[...]), (params["kernel"], params["scale"])):
        assert kernel.shape == (WIDTH, OUTPUTS) and abs(kernel.std() * WIDTH**0.5 - 1) < 0.1
        np.testing.assert_array_equal(scale, np.zeros(NORMED))  # with the offset, a scale of one

    wanted = jnp.float32 if dtype is None else dtype  # a bfloat16 input and float32 parameters promote, as in Flax
    for got, kernel in ((module(x), module.kernel[...]), (layer.apply({"params": params}, x), params["kernel"])):
        want = matmul_partial_rms_norm(x.astype(wanted), kernel.astype(wanted), jnp.zeros(NORMED), scale_offset=1.0, transpose_b=False,
                                       implementation=implementation)
        for g, w in zip(got, want):
            oracle.assert_same_bits(g, w)


@jax.default_matmul_precision("highest")  # a GPU would multiply Flax's float32 in fewer bits
def test_the_kernel_is_flaxs(implementation):
    x, scale = draw(1, (5, WIDTH)), jnp.ones(NORMED)
    of_nnx, of_linen = nnx.Linear(WIDTH, OUTPUTS, use_bias=False, rngs=nnx.Rngs(1)), linen.Dense(OUTPUTS, use_bias=False)
    module = fused_nnx.MatmulPartialRMSNorm(WIDTH, OUTPUTS, NORMED, implementation=implementation, rngs=nnx.Rngs(0))
    nnx.update(module, {"kernel": nnx.state(of_nnx)["kernel"]})
    params = of_linen.init(jax.random.key(1), x)["params"]
    layer = fused_linen.MatmulPartialRMSNorm(OUTPUTS, NORMED, implementation=implementation)
    for got, product in ((module(x), of_nnx(x)), (layer.apply({"params": params | {"scale": scale}}, x), of_linen.apply({"params": params}, x))):
        oracle.assert_close(got[1], product[:, NORMED:], "float32")
        oracle.assert_close(got[0], oracle.rms_norm(product[:, :NORMED], scale), "float32")


def test_the_parameters_are_trained(implementation):
    module = fused_nnx.MatmulPartialRMSNorm(WIDTH, OUTPUTS, NORMED, implementation=implementation, rngs=nnx.Rngs(0))
    x = draw(1, (8, WIDTH))
    gradients = nnx.jit(nnx.grad(lambda module: sum((out**2).sum() for out in module(x))))(module)
    cotangents = [2 * np.asarray(out) for out in module(x)]
    _, (want, size), want_scale = oracle.matmul_partial_rms_norm_vjp(x, module.kernel[...], module.scale[...], *cotangents, transpose_b=False)
    oracle.assert_derivative_close(gradients["kernel"][...], want, size, "float32")
    oracle.assert_scale_cotangent_close(gradients["scale"][...], want_scale, "float32", tolerance=1e-4)
