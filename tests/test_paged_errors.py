"""Every argument of qk_rms_norm_rope_paged that cannot be: which error, and that it says what came and what was wanted."""

import dataclasses

import jax.numpy as jnp
import pytest

from jax_fusednorm import PagedKVCache, qk_rms_norm_rope_paged
from test_errors import fails

CACHE = PagedKVCache(jnp.ones((4, 2, 3, 5, 2, 8)), jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
KEYS_ALONE = dataclasses.replace(CACHE, pages=CACHE.pages[:, :1])
Q, PACKED, K, SCALE, TABLE, OFFSETS = jnp.ones((7, 4, 8)), jnp.ones((7, 70)), jnp.ones((7, 2, 8)), jnp.ones(8), jnp.ones((9, 8)), jnp.arange(3)
RIGHT = dict(q=Q, cache=CACHE, q_scale=SCALE, k_scale=SCALE, freqs_cis=TABLE, input_row_offsets=OFFSETS)


def cache(**fields):
    return dict(cache=dataclasses.replace(CACHE, **fields))


WRONG = {
    "no cache": (dict(cache=CACHE.pages), {}, ("`cache`", "PagedKVCache")),
    "pages of rank five": (cache(pages=CACHE.pages[0]), {}, ("`cache.pages`", "[2, 3, 5, 2, 8]", "[num_pages, 2")),
    "pages of integers": (cache(pages=jnp.ones((4, 2, 3, 5, 2, 8), int)), {}, ("`cache.pages`", "int32", "float32")),
    "three kinds of pages": (cache(pages=jnp.ones((4, 3, 3, 5, 2, 8))), {}, ("`cache.pages`", "[4, 3, 3, 5, 2, 8]")),
    "no pages": (cache(pages=CACHE.pages[:0]), {}, ("`cache.pages`", "[0, 2, 3, 5, 2, 8]")),
    "a table of rank one": (cache(page_table=jnp.zeros(2, int)), {}, ("`cache.page_table`", "[2]")),
    "a table of floats": (cache(page_table=jnp.zeros((2, 3))), {}, ("`cache.page_table`", "float32", "integers")),
    "more lengths than sequences": (cache(lengths=jnp.zeros(3, int)), {}, ("`cache.lengths`", "[3]", "[2]")),
    "q of another dtype": (dict(q=Q.astype("bfloat16")), {}, ("`q`", "bfloat16", "float32")),
    "q of another width": (dict(q=Q[..., :6]), {}, ("`q`", "[7, 4, 6]", "[T, Hq, 8]", "num_heads")),
    "q of rank four": (dict(q=Q[None]), {}, ("`q`", "[1, 7, 4, 8]")),
    "heads that q names": ({}, dict(num_heads=4), ("`num_heads", "[7, 4, 8]")),
    "a start in q's heads": ({}, dict(q_start=8), ("q_start`", "[7, 4, 8]")),
    "a projection of nobody knows how many heads": (dict(q=PACKED), {}, ("`num_heads`", "None", "[7, 70]")),
    "more heads than columns": (dict(q=PACKED), dict(num_heads=9), ("`q_start`", "0", "9 heads", "[7, 70]")),
    "queries that end beyond": (dict(q=PACKED), dict(num_heads=4, q_start=39), ("`q_start`", "39", "[7, 70]")),
    "keys that end beyond": (dict(q=PACKED), dict(num_heads=4, k_start=55), ("`k_start`", "55", "[7, 70]")),
    "values that start before": (dict(q=PACKED), dict(num_heads=4, k_start=0, v_start=-1), ("`v_start`", "-1")),
    "columns of heads": ({}, dict(k_start=0), ("`k_start`", "0", "`k`")),
    "keys twice": (dict(q=PACKED), dict(num_heads=4, k_start=0, k=K), ("`k_start`", "`k`")),
    "values twice": (dict(q=PACKED), dict(num_heads=4, k_start=0, v_start=0, v=K), ("`v_start`", "`v`")),
    "values without keys": ({}, dict(v=K), ("`v`", "`k`")),
    "columns of values without keys": (dict(q=PACKED), dict(num_heads=4, v_start=0), ("`v`", "`k`")),
    "values that have no place": (dict(cache=KEYS_ALONE), dict(k=K, v=K), ("`cache.pages`", "[4, 1, 3, 5, 2, 8]", "values")),
    "keys of another shape": ({}, dict(k=K[:6]), ("`k`", "[6, 2, 8]", "[7, 2, 8]")),
    "values of another dtype": ({}, dict(k=K, v=K.astype("float16")), ("`v`", "float16", "float32")),
    "a scale of another length": (dict(k_scale=SCALE[:7]), {}, ("`k_scale`", "[7]", "[8]")),
    "an offset without scales": (dict(q_scale=None, k_scale=None), dict(scale_offset=1.0), ("`scale_offset`", "1.0")),
    "no table": (dict(freqs_cis=None), {}, ("`freqs_cis`", "None", "rope_table")),
    "a wide table": (dict(freqs_cis=jnp.ones((9, 10))), {}, ("`freqs_cis.shape[1]`", "10", "8")),
    "offsets of another length": (dict(input_row_offsets=jnp.arange(2)), {}, ("`input_row_offsets`", "[2]", "[3]")),
    "offsets of floats": (dict(input_row_offsets=jnp.ones(3)), {}, ("`input_row_offsets`", "float32", "integers")),
    "two layers": ({}, dict(layer=jnp.arange(2)), ("`layer`", "[2]", "[]")),
    "a layer of floats": ({}, dict(layer=1.0), ("`layer`", "float32")),
    "the proportional style": ({}, dict(style="proportional"), ("`style`", "'proportional'", "'interleaved'")),
    "no rounding in q's dtype": ({}, dict(multiply_before_cast=False, round_before_rope=False), ("`round_before_rope`", "False")),
}


@pytest.mark.parametrize("what", WRONG)
def test_qk_rms_norm_rope_paged(what):
    arguments, options, says = WRONG[what]
    options = dict(layer=0) | options
    fails(qk_rms_norm_rope_paged, *(RIGHT | arguments).values(), says=says, **options)
