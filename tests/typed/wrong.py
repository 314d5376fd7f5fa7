"""Calls that a checker must refuse: a line each, and no other. It is read by checkers and never run."""

import jax
import jax.numpy as jnp

import jax_fusednorm as fn


def array(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


x, scale, heads = array(4, 8), array(8), array(4, 2, 8)
cache = fn.PagedKVCache(heads, heads, heads)

fn.rms_norm("hello")
fn.rms_norm([1.0, 2.0])
fn.rms_norm()
fn.rms_norm(x, scale, 1e-6)
fn.rms_norm(x, scale, epsilon="1e-6")
fn.rms_norm(x, scale, eps=1e-6)
fn.rms_norm(x, scale, implementation="gpu")
fn.rms_norm(x).shapes
first: int = fn.rms_norm(x)
fn.add_rms_norm(x)
fn.add_rms_norm(x, x, sum_rounding="bf16")
fn.add_rms_norm(x, x, sum_roundin="storage")
fn.add_rms_norm(x, x, return_sum=False).unpack
fn.add_rms_norm(x, x).astype(jnp.float32)
fn.rms_norm_add(x, x, norm_rounding=True)
fn.rms_norm_add(x, x, sum_rounding="storage")
fn.gated_group_rms_norm(x, x, None)
fn.gated_group_rms_norm(x, x, scale, group_size="8")
fn.gated_group_rms_norm(x, x, scale, activation="gelu")
fn.gated_group_rms_norm(x, x, scale, rounding="bfloat16")
fn.matmul_partial_rms_norm(x, scale)
fn.matmul_partial_rms_norm(x, x, scale).astype(jnp.float32)
fn.head_rms_norm_rope(heads, scale)
fn.head_rms_norm_rope(heads, scale, 0, style="llama")
fn.head_rms_norm_rope(heads, scale, 0, placement="first")
fn.head_rms_norm_rope(heads, scale, 0, theta=None)
fn.head_rms_norm_rope(heads, scale, 0, copies=((jnp.bfloat16, "heads"),))
fn.head_rms_norm_rope(heads, scale, 0, copies=((jnp.bfloat16, "head_major"),)).astype(jnp.float32)
fn.qk_rms_norm_rope(heads, heads, scale, 0)
fn.qk_rms_norm_rope(heads, heads, scale, scale, 0, copies=())
fn.qk_rms_norm_rope_paged(heads, cache, scale, scale, x, scale)
fn.qk_rms_norm_rope_paged(heads, heads, scale, scale, x, scale, layer=0)
fn.qk_rms_norm_rope_paged(heads, cache, scale, scale, x, scale, layer=0, style="proportional")
fn.PagedKVCache(heads, heads)
cache.pages = heads
fn.qk_rms_norm_rope(heads, heads, scale, scale, 0, num_heads=2, num_kv_heads=1, k_start=16)
fn.qk_rms_norm_rope(x, None, scale, scale, 0)
fn.qk_rms_norm_rope(x, None, scale, scale, 0, num_heads=2, num_kv_heads=1, v_start=0)
fn.rope_table(16.0, 8)
fn.rope_table(16, 8, scaling="linear")
fn.implementation("gpu")
fn.implementation()
fn.set_implementation("gpu")
fn.explain(fn.rms_norm, x, platforms=1)
fn.explain("rms_norm", x)
fn.explain(fn.rms_norm, x)["cpu"].run
fn.layer_norm(x)
