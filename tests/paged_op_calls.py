"""Calls of qk_rms_norm_rope_paged in every form, on pages in random order, and what must come of each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import oracle
from jax_fusednorm import PagedKVCache, qk_rms_norm_rope_paged
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


def small(form="keys and values", dtype="float32", **options):
    return make(dtype, prompts=(3, 4), lengths=(1, 0), page_size=4, form=form, **options)


def step(call, implementation, args, arrays, layer):
    return qk_rms_norm_rope_paged(*args, **arrays, **call.arguments()[2], layer=layer, implementation=implementation)


def copies_of(pages, text):
    """The instructions of a compiled program that copy a whole cache."""
    shape = f"{'f32' if pages.dtype == jnp.float32 else 'bf16'}[{','.join(map(str, pages.shape))}]"
    return [line for line in text.splitlines() if shape in line.split(" copy")[0] and (" copy(" in line or " copy-start(" in line)]
