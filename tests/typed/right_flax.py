"""Every module of Flax, with the types that a checker must find. It is read by checkers and never run."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

from jax_fusednorm.flax import linen, nnx


def array(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


x, heads, rngs = array(4, 8), array(4, 2, 8), flax_nnx.Rngs(0)
ones = jax.nn.initializers.ones

assert_type(nnx.RMSNorm(8, epsilon=1e-6, dtype=jnp.bfloat16, param_dtype="float32", use_scale=True, scale_init=ones, scale_offset=1.0,
                        multiply_before_cast=False, implementation="jnp", reduction_axes=-1, feature_axes=(-1,), axis_name=None,
                        axis_index_groups=None, use_fast_variance=True, rngs=rngs, scale_metadata={"sharding": ("x",)})(x), jax.Array)
normed, total = nnx.AddRMSNorm(8, epsilon=1e-6, sum_rounding="storage", return_sum=True, dtype=None, param_dtype=jnp.float32, use_scale=True,
                               scale_init=None, scale_offset=0.0, multiply_before_cast=True, implementation=None, rngs=rngs)(x, x)
assert_type(nnx.RMSNormAdd(8, norm_rounding="float32", use_scale=False, scale_metadata=None, rngs=rngs)(x, x), jax.Array)
assert_type(nnx.MatmulPartialRMSNorm(8, 16, 4, kernel_init=ones, kernel_metadata={}, rngs=rngs)(x), tuple[jax.Array, jax.Array])
assert_type(nnx.GatedGroupRMSNorm(8, group_size=4, norm_before_gate=True, gate_start=0, activation="silu", rounding="float32",
                                  rngs=rngs)(x, x), jax.Array)
assert_type(nnx.QKNormRope(8, theta=1e6, rope_dim=4, style="neox", placement="suffix", round_before_rope=False, rngs=rngs)(
    heads, heads, 0, freq_factors=np.ones(2)), tuple[jax.Array, jax.Array])

assert_type(nnx.QKNormRope(8, rngs=rngs)(x, None, 0, num_heads=2, num_kv_heads=1, k_start=16, v_start=24),
            tuple[jax.Array, jax.Array, jax.Array])

assert_type(linen.RMSNorm(scale_offset=1.0, dtype=jnp.bfloat16, name="norm"), linen.RMSNorm)
assert_type(linen.RMSNorm(epsilon=1e-5, implementation="host", feature_axes=-1)(x), jax.Array)
normed, total = linen.AddRMSNorm(sum_rounding="storage", return_sum=True, scale_init=ones)(x, x)
assert_type(linen.RMSNormAdd(norm_rounding="storage", multiply_before_cast=False)(x, x), jax.Array)
assert_type(linen.MatmulPartialRMSNorm(16, 4, kernel_init=ones)(x), tuple[jax.Array, jax.Array])
assert_type(linen.GatedGroupRMSNorm(8, activation="sigmoid", rounding="storage")(x, x), jax.Array)
assert_type(linen.QKNormRope(style="proportional", rope_dim=4)(heads, heads, None, freqs_cis=x), tuple[jax.Array, jax.Array])
assert_type(linen.QKNormRope(head_dim=8)(x, None, 0, num_heads=2, num_kv_heads=1, k_start=16), tuple[jax.Array, jax.Array])
