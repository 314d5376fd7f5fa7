"""Every public call, with the types that a checker must find. It is read by checkers and never run."""

from typing import assert_type

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import jax_fusednorm as fn


def array(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


x, scale = array(4, 8), np.ones(8, np.float32)
heads, positions = array(4, 2, 8), np.arange(4)

assert_type(fn.rms_norm(x), jax.Array)
assert_type(fn.rms_norm(x, scale, epsilon=1, scale_offset=1.0, multiply_before_cast=False, implementation="kernel"), jax.Array)

assert_type(fn.add_rms_norm(x, x, scale), tuple[jax.Array, jax.Array])
assert_type(fn.add_rms_norm(x, x, return_sum=True, sum_rounding="storage"), tuple[jax.Array, jax.Array])
assert_type(fn.add_rms_norm(x, x, scale, return_sum=False), jax.Array)


def told_later(wanted: bool) -> None:
    assert_type(fn.add_rms_norm(x, x, return_sum=wanted), jax.Array | tuple[jax.Array, jax.Array])


assert_type(fn.rms_norm_add(x, x, scale, norm_rounding="storage", implementation="jnp"), jax.Array)

assert_type(fn.gated_group_rms_norm(x, x, scale, group_size=4, epsilon=1e-5, norm_before_gate=True, gate_start=0, activation="sigmoid",
                                    rounding="float32", out_dtype=jnp.float16, implementation="host"), jax.Array)
assert_type(fn.gated_group_rms_norm(x, x, scale, out_dtype="bfloat16"), jax.Array)

assert_type(fn.matmul_partial_rms_norm(x, array(8, 8), scale, transpose_b=False, implementation="metal"), tuple[jax.Array, jax.Array])

assert_type(fn.head_rms_norm_rope(heads, scale, positions), jax.Array)
assert_type(fn.head_rms_norm_rope(heads, None, 3, theta=1e6, rope_dim=4, style="interleaved", placement="suffix", freq_factors=np.ones(2),
                                  epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True, round_before_rope=True, copies=()), jax.Array)
assert_type(fn.head_rms_norm_rope(heads, scale, None, rope_dim=0), jax.Array)
assert_type(fn.head_rms_norm_rope(heads, scale, positions, copies=((jnp.bfloat16, "head_major"),)), tuple[jax.Array, ...])
assert_type(fn.head_rms_norm_rope(heads, scale, positions, copies=[("float32", "token_major")]), tuple[jax.Array, ...])

table = fn.rope_table(16, 8)
assert_type(table, jax.Array)
assert_type(fn.rope_table(16, 4, theta=1e6, scaling={"rope_type": "linear", "factor": 2.0}, head_dim=8), jax.Array)

assert_type(fn.qk_rms_norm_rope(heads, heads, scale, None, positions, freqs_cis=table, style="neox"), tuple[jax.Array, jax.Array])
assert_type(fn.qk_rms_norm_rope(x, None, scale, scale, positions, num_heads=2, num_kv_heads=1, k_start=16), tuple[jax.Array, jax.Array])
assert_type(fn.qk_rms_norm_rope(x, None, scale, None, positions, num_heads=2, num_kv_heads=1, q_start=0, k_start=16, v_start=24),
            tuple[jax.Array, jax.Array, jax.Array])

cache = fn.PagedKVCache(array(2, 2, 1, 4, 2, 8), array(1, 2), lengths=array(1))
assert_type(cache.pages, jax.Array)
assert_type(fn.qk_rms_norm_rope_paged(heads, cache, scale, scale, table, array(2), layer=0), tuple[jax.Array, fn.PagedKVCache])
assert_type(fn.qk_rms_norm_rope_paged(x, cache, None, None, table, np.array([0, 4]), layer=jnp.int32(0), num_heads=1, q_start=0, k_start=8,
                                      v_start=16, style="interleaved", placement="prefix"), tuple[jax.Array, fn.PagedKVCache])


def says(decision: fn.Decision) -> str:
    return f"{decision.runs}: {decision.why}"


fn.set_implementation("auto")
assert_type(fn.explain(fn.rms_norm, x, platforms="cpu")["cpu"], fn.Decision)
with fn.implementation("jnp"):
    for platform, decision in fn.explain(fn.rms_norm, x, scale, epsilon=1e-5, platforms=("cpu",)).items():
        assert_type(platform, str)
        assert_type(decision.runs, str | None)
        assert_type(decision.why, str)

assert_type(fn.EXPORT_CHECKS, tuple[jax.export.DisabledSafetyCheck, ...])
assert_type(fn.__version__, str)
