"""Attention to a cache of keys and values, for the examples' language models. The cache is a pair of arrays [batch, S, groups, D]."""

import jax
import jax.numpy as jnp


def empty_cache(batch, tokens, groups, head_dim, dtype):
    empty = jnp.zeros((batch, tokens, groups, head_dim), dtype)
    return empty, empty


def store(cache, keys, values, start):
    """The cache with the keys and values [batch, T, groups, D] of the tokens from `start`."""
    return tuple(jax.lax.dynamic_update_slice(old, new, (0, start, 0, 0)) for old, new in zip(cache, (keys, values)))


def attend(queries, cache, positions, scaling, window=None):
    """What queries [batch, T, heads, D] at `positions` [T] attend to: at most the last `window` tokens. Returns [batch, T, heads * D]."""
    keys, values = cache
    queries = queries.reshape(*queries.shape[:2], keys.shape[2], -1, queries.shape[-1])
    scores = scaling * jnp.einsum("btgrd,bsgd->bgrts", queries, keys).astype(jnp.float32)
    age = positions[:, None] - jnp.arange(keys.shape[1])
    seen = (age >= 0) & (age < (window or keys.shape[1]))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(values.dtype)
    return jnp.einsum("bgrts,bsgd->btgrd", weights, values).reshape(*queries.shape[:2], -1)
