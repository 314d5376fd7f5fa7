"""GatedGroupRMSNorm, for nnx and linen: the op with a scale of its own, at its dtype, trained as any module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from jax_fusednorm import gated_group_rms_norm
from jax_fusednorm.flax import linen as fused_linen, nnx as fused_nnx
from plain import draw

WIDTH = 24
OPTIONS = dict(group_size=8, norm_before_gate=True, gate_start=5, activation="sigmoid", rounding="float32", epsilon=1e-3)


@pytest.mark.parametrize("options", ({}, OPTIONS), ids=("defaults", "options"))
@pytest.mark.parametrize("dtype", (None, jnp.bfloat16))
def test_both_modules_are_the_op(implementation, dtype, options):
    y, gate = draw(1, (3, 5, WIDTH), "bfloat16"), draw(2, (3, 5, WIDTH + 9 if options else WIDTH), "float16")
    module = fused_nnx.GatedGroupRMSNorm(WIDTH, dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0), **options)
    layer = fused_linen.GatedGroupRMSNorm(WIDTH, dtype=dtype, implementation=implementation, **options)
    variables = layer.init(jax.random.key(0), y, gate)
    for scale in (module.scale[...], variables["params"]["scale"]):
        np.testing.assert_array_equal(scale, np.ones(WIDTH))

    wanted = jnp.float32 if dtype is None else dtype  # a bfloat16 input and a float32 scale promote, as in Flax; the gate does not
    want = gated_group_rms_norm(y.astype(wanted), gate, jnp.ones(WIDTH), implementation=implementation, **options)
    for got in (module(y, gate), layer.apply(variables, y, gate)):
        oracle.assert_same_bits(got, want)


def test_the_scale_is_trained(implementation):
    module = fused_nnx.GatedGroupRMSNorm(WIDTH, group_size=8, implementation=implementation, rngs=nnx.Rngs(0))
    y, gate = draw(1, (8, WIDTH)), draw(2, (8, WIDTH))
    gradients = nnx.jit(nnx.grad(lambda module: (module(y, gate) ** 2).sum()))(module)
    *_, want = oracle.gated_group_rms_norm_vjp(y, gate, module.scale[...], 2 * np.asarray(module(y, gate)), group_size=8)
    oracle.assert_scale_cotangent_close(gradients["scale"][...], want, "float32", tolerance=1e-4)
