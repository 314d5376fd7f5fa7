"""The cache of qk_rms_norm_rope_paged: donated it is written in place, with no copy in the compiled program, and otherwise it stays as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from ops import assert_trees_close
from paged_op_calls import copies_of, small, step


@pytest.mark.parametrize("form", ("in its rows", "keys and values", "packed"))
def test_a_donated_cache_is_written_in_place(implementation, form):
    """One op, and a scan over layers: no copy, and the buffer that was given. (In jnp not of bfloat16: jaxlib 0.10 scatters it in float32.)"""
    call = small(form, "float32" if implementation == "jnp" else "bfloat16")
    args, arrays, _ = call.arguments()

    def once(cache, layer):
        return step(call, implementation, (args[0], cache, *args[2:]), arrays, layer)

    def layers(cache, _):
        def body(cache, layer):
            q, cache = once(cache, layer)
            return cache, q
        cache, q = jax.lax.scan(body, cache, jnp.arange(3))
        return q, cache

    for f in (once, layers):
        donating = jax.jit(f, donate_argnums=0)
        cache = jax.tree.map(jnp.copy, call.cache)
        text = donating.lower(cache, 1).compile().as_text()
        assert not copies_of(cache.pages, text)
        at = cache.pages.unsafe_buffer_pointer()
        _, got = donating(cache, 1)
        assert got.pages.unsafe_buffer_pointer() == at and cache.pages.is_deleted()
        before = np.asarray(call.cache.pages)
        want = jax.jit(f)(call.cache, 1)[1]
        oracle.assert_same_bits(got.pages, want.pages)
        oracle.assert_same_bits(call.cache.pages, before)
        assert (np.asarray(got.pages) != before).any()


def test_a_cache_that_is_not_donated_stays(implementation):
    """Under jit, and where the op is called by itself; with any integer as the layer."""
    call = small()
    args, arrays, _ = call.arguments()
    before = np.array(call.cache.pages)
    _, cache = step(call, implementation, args, arrays, np.uint8(1))
    oracle.assert_same_bits(call.cache.pages, before)
    (_, again), rows = jax.jit(lambda cache: (step(call, implementation, (args[0], cache, *args[2:]), arrays, 1), cache.pages[:, 0, 1]))(call.cache)
    oracle.assert_same_bits(call.cache.pages, before)
    oracle.assert_same_bits(rows, before[:, 0, 1])
    assert_trees_close(again, cache, rtol=1e-6, atol=1e-6)
    assert (np.asarray(cache.pages) != before).any()
