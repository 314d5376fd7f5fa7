"""Modules of Flax that a checker must refuse: a line each, and no other. It is read by checkers and never run."""

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from jax_fusednorm.flax import linen, nnx


def array(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


x, heads, rngs = array(4, 8), array(4, 2, 8), flax_nnx.Rngs(0)

nnx.RMSNorm(8)
nnx.RMSNorm(8, implementation="gpu", rngs=rngs)
nnx.RMSNorm(8, eps=1e-6, rngs=rngs)
nnx.RMSNorm(8, rngs=rngs)("hello")
nnx.AddRMSNorm(8, sum_rounding="bf16", rngs=rngs)
nnx.AddRMSNorm(8, norm_rounding="storage", rngs=rngs)
nnx.AddRMSNorm(8, rngs=rngs)(x)
nnx.RMSNormAdd(8, norm_rounding="bf16", rngs=rngs)
nnx.RMSNormAdd(8, scale_ofset=1.0, rngs=rngs)
nnx.MatmulPartialRMSNorm(8, 16, rngs=rngs)
nnx.MatmulPartialRMSNorm(8, 16, 4, rngs=rngs)(x).astype(jnp.float32)
nnx.GatedGroupRMSNorm(8, activation="gelu", rngs=rngs)
nnx.QKNormRope(8, style="llama", rngs=rngs)
nnx.QKNormRope(8, rngs=rngs)(heads, heads)
linen.RMSNorm(implementation="gpu")
linen.RMSNorm(scale_offset="1")
linen.AddRMSNorm(sum_rounding="bf16")
linen.RMSNormAdd(eps=1e-6)
linen.MatmulPartialRMSNorm(16)
linen.GatedGroupRMSNorm(8, rounding="bfloat16")
linen.GatedGroupRMSNorm(8)(x)
linen.QKNormRope(placement="first")
linen.QKNormRope(head_dim=8)(x, None, 0, num_head=2)
