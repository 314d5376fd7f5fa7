"""RMSNorm and rotary position embedding of the queries and keys of a ragged batch, with the keys and values kept in a paged cache."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks, lowering, paged, rope, selfcheck, sharding
from ..core.numerics import compute_dtype, constant, last_mean
from ..core.primitive import Op
from . import head_rms_norm_rope as _heads
from . import rms_norm as _rms_norm

STYLES = ("neox", "interleaved")


def qk_rms_norm_rope_paged(q, cache, q_scale, k_scale, freqs_cis, input_row_offsets, *, layer, k=None, v=None, num_heads=None, q_start=0,
                           k_start=None, v_start=None, style="neox", placement="prefix", epsilon=1e-6, scale_offset=0.0,
                           multiply_before_cast=True, round_before_rope=True, implementation=None):
    """`qk_rms_norm_rope` of the T new tokens of B sequences laid end to end, whose keys are kept in a paged cache.

    Equivalent to, for token t of sequence b, input_row_offsets[b] <= t < input_row_offsets[b + 1]::

        position = cache.lengths[b] + t - input_row_offsets[b]
        page, row = cache.page_table[b, position // page_size], position % page_size
        k[t] = cache.pages[page, 0, layer, row]                                     # where no k is given
        q_out[t], k_out[t] = qk_rms_norm_rope(q[t], k[t], q_scale, k_scale, position, freqs_cis=freqs_cis, ...)
        pages = pages.at[page, 0, layer, row].set(k_out[t])
        pages = pages.at[page, 1, layer, row].set(v[t])                             # where v is given

    Args:
      q: [T, Hq, D] in float32, bfloat16 or float16; or [T, W], a fused projection, of which the Hq * D columns from q_start are
        read in place.
      cache: a `PagedKVCache` with pages of q's dtype. Without k or k_start the new keys already lie in their rows, and are normed and
        rotated there: once, for a second call would do it again.
      q_scale, k_scale: [D] each in any of these dtypes, or None to multiply by nothing.
      freqs_cis: [max_positions, rope_dim], rope_dim even and at most D: cos and sin of each pair side by side, as `rope_table` makes them.
      input_row_offsets: integers [B + 1]: where each sequence starts among the T tokens, and where the last ends.
      layer: the layer of the cache: a Python integer, or an integer array, traced or not.
      k, v: [T, Hkv, D] in q's dtype, keys to be normed, rotated and stored, and values to be stored as they are; v comes with keys only.
      num_heads: static; Hq, with a q of [T, W] only.
      q_start, k_start, v_start: static, with a q of [T, W] only; the columns where the queries start, and, in place of k and v, the
        Hkv * D columns of keys and of values. Slices are not copied by a kernel.
      style, placement: static; as in `head_rms_norm_rope`, but for "proportional", whose `rope_table` is "neox" over all of D.
      epsilon, scale_offset, multiply_before_cast: static; as in `rms_norm`.
      round_before_rope: static; whether the norm is rounded to q's dtype before the rotation.
      implementation: as in `rms_norm`.

    Returns:
      (q_out [T, Hq, D] in q's dtype, the cache with new pages). Donate the cache to have them written in place, without a copy (but for
      the jnp form in bfloat16 on jaxlib 0.10's CPU, which converts the pages to float32 and back). Lengths are as they were: the caller
      advances them once a step.

    No data can do harm. Offsets count as their running maximum, clipped to [0, T]. A token outside every sequence, or with a position
    that is negative or not below max_positions, has zeros in q_out, and stores nothing. One whose position is beyond the page table, or
    whose page id or layer does not exist, stores nothing. Of two tokens with one row either is stored.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run; a derivative, which `qk_rms_norm_rope` has.

    Formulas: as in `qk_rms_norm_rope`; Kwon et al., PagedAttention, 2023.
    """
    op = "qk_rms_norm_rope_paged"
    pages, page_table, lengths = _cache(op, cache)
    heads, width = pages.shape[-2:]
    checks.option(op, "style", style, STYLES)
    q = _queries(op, q, pages, num_heads, q_start)
    packed = q.ndim == 2
    starts = dict(k_start=k_start, v_start=v_start)
    if packed:
        q_start = _columns_start(op, "q_start", q_start, q, num_heads, width)
        starts = {name: None if start is None else _columns_start(op, name, start, q, heads, width) for name, start in starts.items()}
    checks.query_heads(op, num_heads if packed else q.shape[1], heads, q, pages)
    for (argument, array), (column, start) in zip((("k", k), ("v", v)), starts.items()):
        if start is not None and (array is not None or not packed):
            checks.fail(op, column, f"{start}", f"it stands for `{argument}` where `q` is a fused projection, [T, W]: give one of the two")
    k, v = (None if array is None else _rows(op, argument, array, q, pages) for argument, array in (("k", k), ("v", v)))
    if v is not None or starts["v_start"] is not None:
        if k is None and starts["k_start"] is None:
            checks.fail(op, "v", "given without keys", "values are stored together with keys: give `k` too")
        if pages.shape[1] == 1:
            checks.fail(op, "cache.pages", f"of shape {list(pages.shape)}, without room for values", "an axis of 2 was wanted where it has 1")
    given = [s for s in (q_scale, k_scale) if s is not None]
    q_scale, k_scale = (jnp.ones(width, q.dtype) if s is None else checks.scale(op, name, s, width)
                        for name, s in (("q_scale", q_scale), ("k_scale", k_scale)))
    if freqs_cis is None:
        checks.fail(op, "freqs_cis", "None", "a table was wanted: rope_table makes one")
    options, frequencies = _heads.make_options(op, width, 10000.0, None, style, placement, None, freqs_cis, multiply_before_cast,
                                               round_before_rope)
    spec = _rms_norm.make_spec(Spec, op, given[0] if given else None, epsilon, scale_offset, multiply_before_cast, implementation,
                               num_heads=num_heads, q_start=q_start, **starts, **options)
    offsets = checks.int32(op, "input_row_offsets", input_row_offsets, (page_table.shape[0] + 1,), "where each sequence starts, and the last ends")
    layer = _layer(op, layer, pages.shape[2])
    operands = (q, pages, page_table, lengths, q_scale, k_scale, frequencies, offsets, layer, k, v)
    q, pages, *others, k, v = map(_cut_by_heads_alone, operands, _AXES[packed])
    own = jax.typeof(pages).sharding
    k, v = (None if a is None else sharding.cut_as(a, (None, own.spec[4], None), own.mesh) for a in (k, v))
    q_out, pages = _OPS[packed].bind(q, pages, *others, k, v, spec=spec)
    return q_out, dataclasses.replace(cache, pages=pages)


@dataclasses.dataclass(frozen=True)
class Spec(_heads.Rotation):
    num_heads: int | None  # None: q is [T, Hq, D]
    q_start: int
    k_start: int | None
    v_start: int | None


def _cache(op, cache):
    if not isinstance(cache, paged.PagedKVCache):
        checks.fail(op, "cache", f"a {type(cache).__name__}", "a PagedKVCache was wanted")
    pages = checks.floats(op, "cache.pages", cache.pages)
    if pages.ndim != 6 or pages.shape[1] not in (1, 2) or 0 in pages.shape:
        checks.fail(op, "cache.pages", f"of shape {list(pages.shape)}", "[num_pages, 2 (or 1: keys alone), num_layers, page_size, Hkv, D] was "
                    "wanted, each at least 1")
    page_table = checks.int32(op, "cache.page_table", cache.page_table, (None, None), "the pages of each sequence")
    lengths = checks.int32(op, "cache.lengths", cache.lengths, page_table.shape[:1], "the length of each sequence")
    return pages, page_table, lengths


def _queries(op, q, pages, num_heads, q_start):
    q, width = checks.floats(op, "q", q), pages.shape[-1]
    if q.dtype != pages.dtype:
        checks.fail(op, "q", f"{q.dtype}", f"the dtype of `cache.pages`, {pages.dtype}, was wanted: cast one of the two")
    if q.ndim == 2:
        if num_heads is None:
            checks.fail(op, "num_heads", "None", f"how many heads of {width} channels lie in `q` of {list(q.shape)} was wanted")
        checks.integer(op, "num_heads", num_heads)
    elif q.ndim != 3 or q.shape[2] != width:
        checks.fail(op, "q", f"of shape {list(q.shape)}", f"[T, Hq, {width}] was wanted, or [T, W] with num_heads")
    elif num_heads is not None or q_start:
        checks.fail(op, "num_heads or q_start", "given", f"`q` of {list(q.shape)} says it all: leave them out")
    return q


def _layer(op, layer, layers):
    """An array's value is data. A Python integer is known now."""
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        if not 0 <= layer < layers:
            checks.fail(op, "layer", f"{layer}", f"a layer of the cache was wanted, 0 to {layers - 1}")
        layer = constant(np.int32(layer))
    return checks.int32(op, "layer", layer, (), "one layer of the cache")


def _columns_start(op, argument, start, q, heads, width):
    start = checks.integer(op, argument, start)
    if start + heads * width > q.shape[1]:
        checks.fail(op, argument, f"{start}", f"{heads} heads of {width} channels from there on were wanted in `q` of {list(q.shape)}")
    return start


def _rows(op, argument, rows, q, pages):
    rows, wanted = checks.array(op, argument, rows), (q.shape[0], *pages.shape[-2:])
    if rows.dtype != q.dtype or rows.shape != wanted:
        checks.fail(op, argument, f"{rows.dtype}{list(rows.shape)}", f"{q.dtype}{list(wanted)} was wanted, a row of each token for `cache.pages` of "
                    f"{list(pages.shape)}")
    return rows


def _cut_by_heads_alone(a, axes):
    return None if a is None else sharding.whole(a, [i for i, dim in enumerate(axes) if dim not in "hg"])


def sources(q, arrays, spec, heads, width):
    """(queries, keys, values) [T, heads, D], None where there are none. arrays: the operands that are keys or values."""
    arrays = iter(arrays)

    def of(start, heads):
        if start is None:
            return next(arrays, None)
        return jax.lax.slice_in_dim(q, start, start + heads * width, axis=1).reshape(q.shape[0], heads, width)

    return (q if spec.num_heads is None else of(spec.q_start, spec.num_heads)), of(spec.k_start, heads), of(spec.v_start, heads)


def reference(q, pages, page_table, lengths, q_scale, k_scale, freqs_cis, offsets, layer, *arrays, spec, mean=last_mean):
    q, k, v = sources(q, arrays, spec, *pages.shape[-2:])
    places = paged.places(q.shape[0], offsets, lengths, page_table, layer, pages, freqs_cis.shape[0])
    angles = rope.cos_sin(places.positions, freqs_cis, compute_dtype(q.dtype))
    k = places.take(pages, 0) if k is None else k
    q_out, k_out = (_heads.normed_and_rotated(x, scale, *angles, spec, mean).astype(x.dtype) for x, scale in ((q, q_scale), (k, k_scale)))
    pages = places.put(pages, 0, k_out)
    return [q_out, pages if v is None else places.put(pages, 1, v)]


def packed_reference(q, pages, page_table, lengths, q_scale, k_scale, freqs_cis, offsets, layer, *arrays, spec, mean=last_mean):
    """The op on slices. Where devices have a part of the heads each, the columns of those are no part of a packed array."""
    q, k, v = sources(q, arrays, spec, *pages.shape[-2:])
    unpacked = dataclasses.replace(spec, num_heads=None, q_start=0, k_start=None, v_start=None)
    return _OPS[False].bind(q, pages, page_table, lengths, q_scale, k_scale, freqs_cis, offsets, layer, k, v, spec=unpacked)


def kernel(call, q, pages, page_table, lengths, q_scale, k_scale, freqs_cis, offsets, layer, *arrays, spec):
    heads, width = pages.shape[-2:]
    starts = dict(q_start=spec.q_start, k_start=spec.k_start, v_start=spec.v_start)
    aligned = math.gcd(width, 8)  # whatever the width, a GPU loads no more channels at once
    if spec.num_heads is not None and any(n % aligned for n in (q.shape[1], *starts.values()) if n is not None):
        q, *arrays = (x for x in sources(q, arrays, spec, heads, width) if x is not None)
        starts = dict(q_start=0, k_start=None, v_start=None)
    num_heads = q.shape[1] if q.ndim == 3 else spec.num_heads
    return call("qk_rms_norm_rope_paged", [jax.ShapeDtypeStruct((q.shape[0], num_heads, width), q.dtype), jax.ShapeDtypeStruct(pages.shape, q.dtype)],
                q, pages, page_table, lengths, offsets, layer, freqs_cis, *arrays, *_heads.kernel_scales(q, q_scale, k_scale), aliases={1: 1},
                num_heads=num_heads, **_keys_and_values(starts, len(arrays)), **_heads.rotation_attributes(spec))


def _keys_and_values(starts, arrays):
    """Where the kernel finds them: -1 where they are no columns of q."""
    own = [name for name in ("k", "v") if starts[f"{name}_start"] is None][:arrays]
    return dict({name: -1 if start is None else start for name, start in starts.items()}, has_k="k" in own, has_v="v" in own)


def _jvp(primals, tangents, spec):
    raise NotImplementedError("qk_rms_norm_rope_paged: it writes into a cache and has no derivative. Use qk_rms_norm_rope, the dense form, "
                              "which has derivatives of every order and mode.")


def sample(rng, shapes):
    """A few tokens of two sequences, with pages of their own: of two tokens with one row either may be stored."""
    (q, pages, _, _, *scales, table, _, _), arrays = shapes[:9], shapes[9:]
    (count, *channels), (_, kinds, layers, page_size, *row) = q[0], pages[0]
    tokens, layers = min(count, 7), min(layers, 2)

    def draw(shape, like):
        return selfcheck.draw(rng, shape, like[1])

    return [draw((tokens, *channels), q), draw((4, kinds, layers, page_size, *row), pages), rng.permutation(4).astype(np.int32).reshape(2, 2),
            rng.integers(0, page_size, 2, np.int32), *(draw(s[0], s) for s in (*scales, table)),
            np.array([0, tokens // 2, tokens], np.int32), np.int32(layers - 1), *(draw((tokens, *a[0][1:]), a) for a in arrays)]


def moved(operands, results):
    """Of the cache no more than the rows of the tokens, which are as many as k's."""
    return lowering.bytes_of([operands[0], *operands[2:], results[0]])


# Of the operands, by whether q is packed; h are its heads, and g those of the cache.
_AXES = {packed: (q, "ncisgd", "bm", "b", "d", "d", "pe", "o", "", "tgd", "tgd") for packed, q in ((False, "thd"), (True, "tw"))}
_UNCUT = "tdncisbmpeo"


def _op(reference, packed, uncut):
    return Op("qk_rms_norm_rope_paged", reference, operands=_AXES[packed], results=("thd", "ncisgd"), whole="", uncut=uncut, kernel=kernel, jvp=_jvp,
              sample=sample, moved=moved)


_OPS = {False: _op(reference, False, uncut=_UNCUT), True: _op(packed_reference, True, uncut=_UNCUT + "whg")}
