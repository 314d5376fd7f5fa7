"""qk_rms_norm_rope_paged against the float64 oracle: every form, page size, layer and option, and data that means harm."""

import dataclasses
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import DTYPES, STAND_IN, some
from jax_fusednorm import EXPORT_CHECKS, PagedKVCache, explain, qk_rms_norm_rope, qk_rms_norm_rope_paged, rope_table
from ops import assert_trees_close, kernel_calls, kernels_expected
from plain import draw, draw_scale

PROMPTS, LENGTHS = (16, 24, 8, 32), (0, 7, 13, 5)
MOST = 64  # rows of the tables: no prompt above ends beyond
FORMS = ("in its rows", "keys", "keys and values", "packed", "packed keys alone", "packed queries alone", "packed, values apart")


@dataclasses.dataclass(frozen=True)
class Call:
    """Arrays of one call, in whatever form they then take."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cache: PagedKVCache
    scales: tuple
    table: jax.Array
    offsets: jax.Array
    form: str = "keys and values"

    def arguments(self):
        """(positional arguments, arrays given by keyword, static options) of the op."""
        tokens, heads, width = self.q.shape
        # by numpy: jnp would compile each of these for every shape
        packs = [np.asarray(a).reshape(tokens, a.shape[1] * width) for a in (self.q, self.k, self.v)]
        # 3 columns before the queries, 5 between them and the keys, and one at the end, that nobody reads
        filler = np.full((tokens, 5), np.nan, self.q.dtype)
        packed = jnp.asarray(np.concatenate([filler[:, :3], packs[0], filler, packs[1], packs[2], filler[:, :1]], axis=1))
        k_start = 3 + heads * width + 5
        v_start = k_start + packs[1].shape[1]
        q = packed if "packed" in self.form else self.q
        options = dict(num_heads=heads, q_start=3) if "packed" in self.form else {}
        arrays = {}
        if self.form in ("keys", "keys and values"):
            arrays["k"] = self.k
        if self.form in ("keys and values", "packed, values apart"):
            arrays["v"] = self.v
        if self.form in ("packed", "packed keys alone", "packed, values apart"):
            options["k_start"] = k_start
        if self.form == "packed":
            options["v_start"] = v_start
        return (q, self.cache, *self.scales, self.table, self.offsets), arrays, options

    def oracle(self, layer, **options):
        stores_k = self.form not in ("in its rows", "packed queries alone")
        stores_v = self.form in ("keys and values", "packed", "packed, values apart")
        return oracle.qk_rms_norm_rope_paged(self.q, *jax.tree.leaves(self.cache), *self.scales, self.table, self.offsets, layer,
                                             self.k if stores_k else None, self.v if stores_v else None, **options)


def make(dtype, *, page_size=16, width=16, heads=(4, 2), layers=3, kinds=2, prompts=PROMPTS, lengths=LENGTHS, rope_dim=None, scale_dtype="float32",
         form="keys and values", padding=0, seed=0):
    """A call with the pages of its sequences in random order, two pages to spare, and ids of no page where nothing will be stored."""
    rng = np.random.default_rng(seed)
    entries = -(-max(p + n for p, n in zip(prompts, lengths)) // page_size) + 1
    used = [-(-(p + n) // page_size) for p, n in zip(prompts, lengths)]
    num_pages = sum(used) + 2
    table, ids = np.full((len(prompts), entries), num_pages, np.int32), iter(rng.permutation(num_pages))
    for row, count in zip(table, used):
        row[:count] = [next(ids) for _ in range(count)]
        row[count + 1:] = -1
    tokens = sum(prompts) + padding
    return Call(*(draw(seed + i, (tokens, h, width), dtype, spread=1.0) for i, h in enumerate((heads[0], heads[1], heads[1]))),
                PagedKVCache(draw(seed + 3, (num_pages, kinds, layers, page_size, heads[1], width), dtype, spread=1.0), jnp.asarray(table),
                             jnp.asarray(lengths, jnp.int32)),
                (draw_scale(seed + 4, width, scale_dtype), draw_scale(seed + 5, width, scale_dtype)),
                draw(seed + 6, (MOST, width if rope_dim is None else rope_dim)), jnp.asarray(np.cumsum([0, *prompts]), jnp.int32), form)


def run(implementation, calls):
    """One compilation for many (Call, options)."""
    given = [call.arguments() for call, _ in calls]
    layers = [jnp.int32(options["layer"]) if i % 2 else options["layer"] for i, (_, options) in enumerate(calls)]  # traced, and static
    traced = [(args, arrays, layer if i % 2 else 0) for i, ((args, arrays, _), layer) in enumerate(zip(given, layers))]

    def all_of(traced):
        return [qk_rms_norm_rope_paged(*args, **arrays, **static, **{**options, "layer": traced_layer if i % 2 else layer},
                                       implementation=implementation)
                for i, ((args, arrays, traced_layer), (_, _, static), layer, (_, options)) in enumerate(zip(traced, given, layers, calls))]

    return jax.jit(all_of)(traced)


def check_call(call, options, got, what):
    """The queries, the rows where keys and values should be stored (but not those of two tokens), and every other bit of the cache as it was."""
    q_out, cache = got
    (want, size), slots, (keys, key_size, values) = call.oracle(**options)
    dtype, before = call.q.dtype, options.get("round_before_rope", True)
    oracle.assert_rotated_close(q_out, want, size, dtype, rounded_before=before, what=f"{what} q")
    pages = np.array(cache.pages)
    tokens = [tokens for tokens in slots.values() if len(tokens) == 1]
    if tokens:
        at = tuple(np.array([slot for slot, tokens in slots.items() if len(tokens) == 1]).T)
        tokens = np.concatenate(tokens)
        oracle.assert_rotated_close(pages[at[0], 0, at[1], at[2]], keys[tokens], key_size[tokens], dtype, rounded_before=before, what=f"{what} k")
        if values is not None:
            oracle.assert_same_bits(pages[at[0], 1, at[1], at[2]], np.asarray(values)[tokens], what=f"{what} v")
    for page, layer, row in slots:
        pages[page, 0, layer, row] = np.asarray(call.cache.pages)[page, 0, layer, row]
        if values is not None:
            pages[page, 1, layer, row] = np.asarray(call.cache.pages)[page, 1, layer, row]
    oracle.assert_same_bits(pages, call.cache.pages, what=f"{what}, what should not change in the cache")
    for name in ("page_table", "lengths"):
        oracle.assert_same_bits(getattr(cache, name), getattr(call.cache, name))


def check(implementation, calls):
    for i, ((call, options), got) in enumerate(zip(calls, run(implementation, calls))):
        check_call(call, options, got, what=f"call {i}, {call.form} {call.cache.pages.shape} {options}")


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
    layers = (1, 1, np.int64(2**32), 2**32)
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


# ---- transforms ----

def small(form="keys and values", dtype="float32", **options):
    return make(dtype, prompts=(3, 4), lengths=(1, 0), page_size=4, form=form, **options)


def step(call, implementation, args, arrays, layer):
    return qk_rms_norm_rope_paged(*args, **arrays, **call.arguments()[2], layer=layer, implementation=implementation)


def copies_of(pages, text):
    """The instructions of a compiled program that copy a whole cache."""
    shape = f"{'f32' if pages.dtype == jnp.float32 else 'bf16'}[{','.join(map(str, pages.shape))}]"
    return [line for line in text.splitlines() if shape in line.split(" copy")[0] and (" copy(" in line or " copy-start(" in line)]


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


def test_layers_in_a_scan_are_layers_in_a_loop(implementation):
    call = small("packed", "bfloat16")
    args, arrays, _ = call.arguments()

    def body(cache, layer):
        q, cache = step(call, implementation, (args[0], cache, *args[2:]), arrays, layer)
        return cache, q

    cache, queries = jax.jit(lambda cache: jax.lax.scan(body, cache, jnp.arange(3)))(call.cache)
    for layer in range(3):
        others = jnp.arange(3) != layer
        pages = jnp.where(others[:, None, None, None], call.cache.pages, cache.pages)
        check_call(call, dict(layer=layer), (queries[layer], dataclasses.replace(cache, pages=pages)), "scan")


@pytest.mark.parametrize("axes", ((0, PagedKVCache(0, None, 0), None), (None, None, 1)), ids=("caches", "keys"))
def test_vmap(implementation, axes):
    """The reference, for a batch of caches, and for one cache that every example starts from."""
    call = small()
    args, _, _ = call.arguments()

    def f(q, cache, k):
        return step(call, implementation, (q, cache, *args[2:]), {"k": k, "v": call.v}, 1)

    def each(pick, operands):
        flat = jax.tree.leaves(axes, is_leaf=lambda axis: axis is None)
        spread = flat if len(flat) == 5 else [axes[0], *[None] * 3, axes[2]]
        leaves, tree = jax.tree.flatten(operands)
        return jax.tree.unflatten(tree, [a if axis is None else pick(a, axis) for a, axis in zip(leaves, spread, strict=True)])

    batched = each(lambda a, axis: jnp.stack([a, a + 1], axis), (call.q, call.cache, call.k))
    got = jax.jit(jax.vmap(f, axes))(*batched)
    for i in range(2):
        want = f(*each(lambda a, axis: jnp.take(a, i, axis), batched))
        assert_trees_close(jax.tree.map(lambda a: a[i], (got[0], got[1].pages)), (want[0], want[1].pages), rtol=1e-5, atol=1e-5)


def test_there_is_no_derivative(implementation):
    call = small()
    args, arrays, _ = call.arguments()

    def total(q, pages, stop=lambda a: a):
        q, cache = step(call, implementation, (stop(q), dataclasses.replace(call.cache, pages=stop(pages)), *args[2:]), arrays, 1)
        return q.sum() + cache.pages.sum()

    for derivative in (jax.grad(total), jax.grad(total, 1), lambda *a: jax.jvp(total, a, a)):
        for f in (derivative, jax.jit(derivative)):
            with pytest.raises(NotImplementedError, match="qk_rms_norm_rope_paged.*qk_rms_norm_rope,"):
                f(args[0], call.cache.pages)
    stopped = functools.partial(total, stop=jax.lax.stop_gradient)
    got = jax.jit(jax.grad(lambda q: stopped(q, call.cache.pages) * (q ** 2).sum()))(args[0])
    assert_trees_close(got, 2 * args[0] * total(args[0], call.cache.pages), rtol=1e-4, atol=1e-4)


def test_one_kernel_for_everything(implementation):
    for form in FORMS:
        call = small(form)
        args, arrays, static = call.arguments()
        op = functools.partial(qk_rms_norm_rope_paged, layer=1, implementation=implementation, **static)
        assert kernel_calls(lambda args, arrays: op(*args, **arrays), args, arrays) == kernels_expected(implementation)
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    assert explain(op, *structs)["cuda" if implementation == "cuda" else "cpu"].runs == implementation
    assert explain(op, *structs)["tpu"].runs == ("jnp" if implementation == "jnp" else None)


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        call = small(dtype="float64")
        wider = functools.partial(jax.tree.map, lambda a: a.astype(jnp.int64) if jnp.issubdtype(a.dtype, jnp.integer) else a)
        call = dataclasses.replace(call, offsets=wider(call.offsets), cache=wider(call.cache), table=draw(8, (9, 16)))
        check(None, [(call, dict(layer=1)), (dataclasses.replace(call, offsets=jnp.asarray([0, 2**40, -2**40])), dict(layer=1))])


def test_exports_with_any_number_of_tokens(implementation):
    tokens, = jax.export.symbolic_shape("t")
    call = small("packed", "bfloat16")
    args, arrays, static = call.arguments()
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    structs = (jax.ShapeDtypeStruct((tokens, args[0].shape[1]), jnp.bfloat16), *structs[1:])
    layer = jax.ShapeDtypeStruct((), jnp.int32)

    def program(value, **options):
        f = jax.jit(lambda args, layer: qk_rms_norm_rope_paged(*args, **static, layer=layer, implementation=value))
        return jax.export.deserialize(jax.export.export(f, **options)(structs, layer).serialize())

    want = step(call, "jnp", args, arrays, 1)
    everywhere = program("auto", platforms=("cpu", "cuda", "tpu"))
    here = program(implementation, disabled_checks=EXPORT_CHECKS)
    for exported in (everywhere, here):
        got = exported.call(args, jnp.int32(1))
        assert isinstance(got[1], PagedKVCache)
        assert_trees_close(got, want, rtol=2e-2, atol=2e-2)
    assert ("custom_call @jax_fusednorm" in here.mlir_module()) == (implementation != "jnp")
