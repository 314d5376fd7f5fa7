"""qk_rms_norm_rope_paged against the float64 oracle and the dense op: every form, page size, layer and option, and data that means harm."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import DTYPES, STAND_IN, some
from jax_fusednorm import PagedKVCache, qk_rms_norm_rope, qk_rms_norm_rope_paged, rope_table
from paged_op_calls import FORMS, check, check_call, make, run, small
from plain import draw


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_and_page_size(implementation, dtype):
    """Prompts that cross pages; pages in any order; the first layer and the last, and the others as they were."""
    calls = [(make(dtype, page_size=page_size, form=form), dict(layer=2 * ((i + j) % 2)))
             for i, page_size in enumerate((1, 16, 100, 128)) for j, form in enumerate(FORMS)]
    check(implementation, some(implementation, calls, DTYPES.index(dtype), 9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option(implementation, dtype):
    casts = (dict(), dict(multiply_before_cast=False), dict(round_before_rope=False), dict(scale_offset=1.0),
             dict(scale_offset=1.0, multiply_before_cast=False, epsilon=1e-5))
    places = (("neox", "prefix"), ("neox", "suffix"), ("interleaved", "prefix"), ("interleaved", "suffix"))
    few = dict(prompts=(3, 0, 5), lengths=(1, 4, 0), page_size=4)
    options = [(*sizes, dict(layer=1, style=style, placement=placement, **order))
               for order, (style, placement), sizes in itertools.product(casts, places, ((64, 64), (80, 24), (30, 0)))]
    options = options[DTYPES.index(dtype) * 7 % 3::3]
    check(implementation, [(make(dtype, width=width, rope_dim=rope_dim, scale_dtype=dtype if i % 2 else "float32", form=FORMS[i % 4], **few), option)
                           for i, (width, rope_dim, option) in enumerate(some(implementation, options, DTYPES.index(dtype), 7))])


def test_shapes(implementation):
    """Heads of every size and number; keys alone in the cache; no scale; no tokens, no sequences, no pages for them."""
    one = dict(prompts=(1,) * 8, lengths=tuple(range(8)), page_size=4)
    calls = [(make("bfloat16", width=width, heads=heads, kinds=kinds, form=form, scale_dtype=scale_dtype, **one), dict(layer=0))
             for width, heads, kinds, form, scale_dtype in ((128, (8, 1), 1, "keys", "bfloat16"), (2, (1, 1), 2, "packed", None),
                                                             (256, (3, 3), 1, "in its rows", "float32"), (576, (2, 1), 1, "packed keys alone", None))]
    calls = some(implementation, calls, 0, 2)
    full = make("float32", **one)
    no_sequences = dataclasses.replace(full.cache, page_table=full.cache.page_table[:0], lengths=full.cache.lengths[:0])
    no_entries = dataclasses.replace(full.cache, page_table=full.cache.page_table[:, :0])
    calls += [(dataclasses.replace(full, cache=no_sequences, offsets=full.offsets[:1]), dict(layer=0)),
              (dataclasses.replace(full, cache=no_entries), dict(layer=0)),
              (dataclasses.replace(full, q=full.q[:0], k=full.k[:0], v=full.v[:0]), dict(layer=0))]
    check(implementation, calls)


LEAST, TOP = -2**31, 2**31 - 1
HOSTILE = {  # (offsets, lengths, layer), of three sequences and fourteen tokens
    "padding after the last": ((0, 5, 9, 12), (0, 3, 1), 0),
    "padding before the first": ((2, 5, 9, 14), (0, 3, 1), 1),
    "falling offsets": ((5, 0, 9, 3), (1, 2, 3), 0),
    "negative offsets": ((-3, 4, -7, 20), (1, 2, 3), 0),
    "offsets that end early, then fall": ((0, 14, 2, -1), (1, 2, 3), 0),
    "one offset of all": ((6, 6, 6, 6), (1, 2, 3), 0),
    "no tokens but in the middle": ((0, 0, 14, 14), (1, 2, 3), 0),
    "the ends of int32": ((LEAST, 4, TOP, LEAST), (1, 2, 3), 0),
    "all beyond": ((TOP, TOP, TOP, TOP), (1, 2, 3), 0),
    "positions that overflow": ((0, 5, 9, 14), (TOP, TOP - 2, LEAST), 0),
    "positions that start below 0": ((0, 5, 9, 14), (-2, -5, -1), 0),
    "positions beyond the tables": ((0, 5, 9, 14), (18, 22, 7), 0),
    "a negative layer": ((0, 5, 9, 14), (0, 3, 1), -1),
    "the first layer that is not": ((0, 5, 9, 14), (0, 3, 1), 2),
    "the ends of int32 as layers": ((0, 5, 9, 14), (0, 3, 1), TOP),
    "the other end": ((0, 5, 9, 14), (0, 3, 1), LEAST),
    "unsigned offsets": ((0, 5, 2**32 - 1, 7), (0, 3, 1), 0),
    "unsigned lengths": ((0, 5, 9, 14), (2**32 - 1, 2**31, 2), 0),
    "an unsigned layer": ((0, 5, 9, 14), (0, 3, 1), 2**32 - 1),
}
NO_PAGES = (-1, 21, 22, TOP, LEAST, -21)  # of 21


def hostile(name, form):
    rng = np.random.default_rng(sorted(HOSTILE).index(name))
    offsets, lengths, layer = HOSTILE[name]
    kind = np.uint32 if max(*offsets, *lengths, layer) > TOP else np.int32
    call = make("bfloat16", page_size=3, layers=2, prompts=(5, 4, 5), lengths=(0, 3, 1), form=form)
    table = np.where(rng.random((3, 7)) < 0.3, rng.choice(NO_PAGES, (3, 7)), rng.permutation(21).reshape(3, 7))
    pages = draw(3, (21, *call.cache.pages.shape[1:]), "bfloat16")
    call = dataclasses.replace(call, offsets=jnp.asarray(np.array(offsets, kind)), table=rope_table(24, 16),
                               cache=PagedKVCache(pages, jnp.asarray(table.astype(np.int32).astype(kind)), jnp.asarray(np.array(lengths, kind))))
    found = oracle.paged_places(14, call.cache.page_table, lengths, offsets, layer, pages.shape, 24)
    at = np.array([token for token, (position, _) in enumerate(found) if position is None], int)
    for array in (poisoned := {name: np.array(getattr(call, name)) for name in ("q", "k", "v")}).values():
        array[at] = np.nan
    return dataclasses.replace(call, **jax.tree.map(jnp.asarray, poisoned)), dict(layer=np.array(layer, kind))


@pytest.mark.parametrize("form", ("packed", "in its rows"))
def test_data_that_means_harm(implementation, form):
    """Nothing is stored out of place, whatever lies in tokens that are none."""
    def call_of(args, arrays, layer):
        return qk_rms_norm_rope_paged(*args, **arrays, **static, layer=layer, implementation=implementation)

    compiled = jax.jit(call_of)
    stored = none = 0
    for name in HOSTILE:
        call, options = hostile(name, form)
        args, arrays, static = call.arguments()
        (want, _), slots, _ = call.oracle(**options)
        stored, none = stored + len(slots), none + (want == 0).all((1, 2)).sum()
        check_call(call, options, compiled(args, arrays, options["layer"]), what=name)
    assert stored > 50 and none > 50, "these are harmless data"


def test_numbers_of_64_bits_are_not_cut_to_those_of_a_page(implementation):
    """To jnp the NumPy integer 2**32 is 0."""
    call = make("float32", prompts=(2,), lengths=(0,))
    args, arrays, static = call.arguments()
    q, cache, *others = args
    far = [dataclasses.replace(cache, page_table=np.asarray(cache.page_table).astype(np.int64) + 2**32),
           dataclasses.replace(cache, lengths=np.asarray(cache.lengths).astype(np.int64) + 2**32)]
    layers = (1, 1, np.array(2**32), np.array(2**62))
    for cache, layer in zip((*far, cache, cache), layers):
        _, got = qk_rms_norm_rope_paged(q, cache, *others, **arrays, **static, layer=layer, implementation=implementation)
        oracle.assert_same_bits(got.pages, cache.pages)


def test_two_tokens_with_one_row(implementation):
    """Either is stored."""
    if implementation == "metal" and STAND_IN:
        pytest.skip("the stand-in takes it for the race that it is")
    call = make("float32", prompts=(2, 2, 2), lengths=(4, 4, 4))
    call = dataclasses.replace(call, cache=dataclasses.replace(call.cache, page_table=jnp.full_like(call.cache.page_table, 1)))
    got = run(implementation, [(call, dict(layer=1))])[0]
    check_call(call, dict(layer=1), got, what="shared rows")
    _, slots, (keys, _, values) = call.oracle(layer=1)
    assert sorted(map(len, slots.values())) == [3, 3]
    for (page, layer, row), tokens in slots.items():
        for head in range(2):
            key, value = np.asarray(got[1].pages)[page, :, layer, row, head]
            assert any((value == np.asarray(values)[token, head]).all() for token in tokens)
            assert any(np.allclose(key, keys[token, head], rtol=1e-5, atol=1e-5) for token in tokens)


def test_what_the_dense_op_gives(implementation):
    """Bit for bit, packed or not."""
    for dtype, options in (("float32", dict()), ("bfloat16", dict(style="interleaved", multiply_before_cast=False))):
        call = make(dtype, prompts=(5, 7), lengths=(2, 0))
        positions = jnp.asarray([2, 3, 4, 5, 6, *range(7)])
        q, k = jax.jit(functools.partial(qk_rms_norm_rope, freqs_cis=call.table, implementation=implementation, round_before_rope=True, **options))(
            call.q, call.k, *call.scales, positions)
        packed = dataclasses.replace(call, form="packed")
        (q_out, cache), (packed_q, packed_cache) = run(implementation, [(c, dict(layer=1, **options)) for c in (call, packed)])
        oracle.assert_same_bits(q_out, q)
        oracle.assert_same_bits(packed_q, q)
        oracle.assert_same_bits(packed_cache.pages, cache.pages)
        page = np.asarray(call.cache.page_table)[np.repeat([0, 1], [5, 7]), 0]
        oracle.assert_same_bits(np.asarray(cache.pages)[page, 0, 1, np.asarray(positions)], k)


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        call = small(dtype="float64")
        wider = functools.partial(jax.tree.map, lambda a: a.astype(jnp.int64) if jnp.issubdtype(a.dtype, jnp.integer) else a)
        call = dataclasses.replace(call, offsets=wider(call.offsets), cache=wider(call.cache), table=draw(8, (9, 16)))
        check(None, [(call, dict(layer=1)), (dataclasses.replace(call, offsets=jnp.asarray([0, 2**40, -2**40])), dict(layer=1))])
