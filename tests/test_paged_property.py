"""qk_rms_norm_rope_paged on page tables, lengths, offsets and layers that hypothesis thinks of, valid and not: every implementation does what
the specification's loop over tokens says, and changes nothing else."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
from jax_fusednorm import PagedKVCache, qk_rms_norm_rope_paged
from paged_op_calls import check_call, make
from plain import draw

TOKENS, SEQUENCES, ENTRIES, PAGES, LAYERS, POSITIONS = 10, 3, 4, 12, 2, 11  # of pages of three tokens
FORMS = ("in its rows", "keys", "packed")
ANYTHING = st.one_of(st.integers(-2**31, 2**31 - 1), st.integers(-3, PAGES + 3))


def several(most, count):
    return st.lists(st.integers(0, most), min_size=count, max_size=count)


@st.composite
def mostly(pick, valid):
    """Valid values, of which some may be replaced by anything."""
    values = np.array(pick(valid), np.int32)
    for place, value in pick(st.dictionaries(st.integers(0, values.size - 1), ANYTHING, max_size=3)).items():
        values.reshape(-1)[place] = value
    return values


BATCHES = st.fixed_dictionaries(dict(
    table=mostly(st.permutations(range(PAGES)) | several(PAGES - 1, PAGES)), lengths=mostly(several(6, SEQUENCES)),
    offsets=mostly(several(TOKENS, SEQUENCES - 1).map(lambda inner: [0, *sorted(inner), TOKENS])),
    layer=mostly(st.integers(0, LAYERS - 1).map(lambda layer: [layer]))))


def test_any_batch(request, implementation):
    calls = [make("float32", width=8, heads=(2, 1), layers=LAYERS, page_size=3, prompts=(TOKENS,), lengths=(0,), form=form) for form in FORMS]
    pages = draw(9, (PAGES, *calls[0].cache.pages.shape[1:]))
    calls = [dataclasses.replace(call, table=draw(8, (POSITIONS, 8))) for call in calls]
    given_arrays = [call.arguments() for call in calls]

    @jax.jit
    def all_forms(cache, offsets, layer):
        return [qk_rms_norm_rope_paged(args[0], cache, *args[2:5], offsets, layer=layer, implementation=implementation, **arrays, **options)
                for args, arrays, options in given_arrays]

    standin = request.getfixturevalue("standin") if implementation == "metal" and cases.STAND_IN else None
    seen = collections.Counter()

    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(BATCHES)
    def check(batch):
        cache = PagedKVCache(pages, jnp.asarray(batch["table"].reshape(SEQUENCES, ENTRIES)), jnp.asarray(batch["lengths"]))
        offsets, [layer] = jnp.asarray(batch["offsets"]), batch["layer"]
        tried = [dataclasses.replace(call, cache=cache, offsets=offsets) for call in calls]
        (want, _), slots, _ = tried[0].oracle(layer=layer)
        shared = any(len(tokens) > 1 for tokens in slots.values())
        if standin:
            standin.reset(off={"race"} if shared else ())  # which two tokens in one slot are
        for call, got in zip(tried, jax.block_until_ready(all_forms(cache, offsets, layer))):
            check_call(call, dict(layer=layer), got, what=call.form)
        assert not standin or standin.complaints() == []
        seen.update(slots=len(slots), zeros=int((want == 0).all((1, 2)).sum()), shared=shared, batches=1)

    check()
    assert seen["slots"] > 2 * seen["batches"] and seen["zeros"] > 2 * seen["batches"] and seen["shared"] > 3, seen
