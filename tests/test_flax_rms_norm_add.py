"""RMSNormAdd, for nnx and linen: the op with a scale of its own, at its dtype, trained as any module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from jax_fusednorm import rms_norm_add
from jax_fusednorm.flax import linen as fused_linen, nnx as fused_nnx
from plain import draw

WIDTH = 24


@pytest.mark.parametrize("norm_rounding", ("float32", "storage"))
@pytest.mark.parametrize("dtype", (None, jnp.bfloat16))
def test_both_modules_are_the_op(implementation, dtype, norm_rounding):
    x, stream = draw(1, (3, 5, WIDTH), "bfloat16"), draw(2, (3, 5, WIDTH), "bfloat16")
    options = dict(dtype=dtype, scale_offset=1.0, norm_rounding=norm_rounding, implementation=implementation)
    module = fused_nnx.RMSNormAdd(WIDTH, rngs=nnx.Rngs(0), **options)
    layer = fused_linen.RMSNormAdd(**options)
    variables = layer.init(jax.random.key(0), x, stream)
    np.testing.assert_array_equal(module.scale[...], np.zeros(WIDTH))  # with the offset, a scale of one
    np.testing.assert_array_equal(variables["params"]["scale"], np.zeros(WIDTH))

    wanted = jnp.float32 if dtype is None else dtype  # a bfloat16 input and a float32 scale promote, as in Flax
    want = rms_norm_add(x.astype(wanted), stream.astype(wanted), jnp.zeros(WIDTH), scale_offset=1.0, norm_rounding=norm_rounding,
                        implementation=implementation)
    for got in (module(x, stream), layer.apply(variables, x, stream)):
        oracle.assert_same_bits(got, want)


def test_the_scale_is_trained(implementation):
    module = fused_nnx.RMSNormAdd(WIDTH, implementation=implementation, rngs=nnx.Rngs(0))
    x, stream = draw(1, (8, WIDTH)), draw(2, (8, WIDTH))
    gradients = nnx.jit(nnx.grad(lambda module: (module(x, stream) ** 2).sum()))(module)
    _, _, want = oracle.rms_norm_vjp(x, module.scale[...], 2 * np.asarray(module(x, stream)), epsilon=1e-6)
    oracle.assert_scale_cotangent_close(gradients["scale"][...], want, "float32", tolerance=1e-4)
