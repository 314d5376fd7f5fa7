"""Heads, normed and rotated, and the places of a paged cache (SPEC 4, 6, 7 and 10)."""

import numpy as np

from .rounding import rounded, wide
from .rows import rms_norm_vjp, unrounded


def inverse_frequencies(rope_dim, theta, denominator=None):
    return [1.0 / theta ** (2.0 * p / (denominator or rope_dim)) for p in range(rope_dim // 2)]


def pairs_of(width, rope_dim, style, placement):
    """The two channels of every pair that rotates."""
    pairs, first = range(rope_dim // 2), width - rope_dim if placement == "suffix" else 0
    if style == "interleaved":
        return [(first + 2 * p, first + 2 * p + 1) for p in pairs]
    distance = width // 2 if style == "proportional" else rope_dim // 2
    return [(first + p, first + p + distance) for p in pairs]


def head_rms_norm_rope(x, scale, positions, *, theta=10000.0, rope_dim=None, style="neox", placement="prefix", freq_factors=None,
                       freqs_cis=None, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True, round_before_rope=None):
    """(the values before their rounding to the dtype of a result, the size of the summands of each)."""
    width = x.shape[-1]
    with np.errstate(all="ignore"):
        y = unrounded(wide(x), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)
    if round_before_rope or not multiply_before_cast:
        y = rounded(y, x.dtype)
    rope_dim, cos, sin, known = _turns(x, positions, theta, rope_dim, style, freq_factors, freqs_cis)
    out, size = y.copy(), np.abs(y)
    for p, (a, b) in enumerate(pairs_of(width, rope_dim, style, placement)):
        c, s = cos[..., p, None], sin[..., p, None]
        out[..., a], out[..., b] = y[..., a] * c - y[..., b] * s, y[..., a] * s + y[..., b] * c
        size[..., a] = size[..., b] = np.abs(y[..., a]) + np.abs(y[..., b])
    known = known[..., None, None]
    return np.where(known, out, 0.0), np.where(known, size, 0.0)


def _turns(x, positions, theta, rope_dim, style, freq_factors, freqs_cis):
    """(rope_dim, cos and sin of every token's pairs, which tokens have a position)."""
    width = x.shape[-1]
    steps = np.broadcast_to(np.asarray(0 if positions is None else positions), x.shape[:-2]).astype(np.float64)
    if freqs_cis is None:
        rope_dim = width if rope_dim is None else rope_dim
        inverse = np.asarray(inverse_frequencies(rope_dim, theta, width if style == "proportional" else None))
        angles = steps[..., None] * (inverse if freq_factors is None else inverse / wide(freq_factors))
        return rope_dim, np.cos(angles), np.sin(angles), np.ones(steps.shape, bool)
    table = wide(freqs_cis)
    known = (steps >= 0) & (steps < len(table))
    rows = table[np.where(known, steps, 0).astype(int)]
    return table.shape[1], rows[..., ::2], rows[..., 1::2], known


def head_rms_norm_rope_vjp(x, scale, positions, dout, *, theta=10000.0, rope_dim=None, style="neox", placement="prefix", freq_factors=None,
                           freqs_cis=None, round_before_rope=None, **options):
    """(cotangent of x, the size of its head's largest summand, cotangent of scale)."""
    del round_before_rope  # it moves a rounding, nothing else
    rope_dim, cos, sin, known = _turns(x, positions, theta, rope_dim, style, freq_factors, freqs_cis)
    turned, normed = wide(dout), wide(dout).copy()
    for p, (a, b) in enumerate(pairs_of(x.shape[-1], rope_dim, style, placement)):
        c, s = cos[..., p, None], sin[..., p, None]
        normed[..., a], normed[..., b] = turned[..., a] * c + turned[..., b] * s, turned[..., b] * c - turned[..., a] * s
    return rms_norm_vjp(x, scale, np.where(known[..., None, None], normed, 0.0), **options)


def paged_places(q_rows, page_table, lengths, offsets, layer, pages_shape, max_positions):
    """[(position, (page, layer, row))] of every token, None for what it has not (SPEC 7 and 10). Python's integers do not overflow."""
    num_pages, _, layers, page_size = pages_shape[:4]
    table, starts, top = np.asarray(page_table), [], 0
    for offset in np.asarray(offsets).tolist():
        top = max(top, offset) if starts else offset
        starts.append(min(max(top, 0), q_rows))
    found = []
    for token in range(q_rows):
        position = slot = None
        for b, length in enumerate(np.asarray(lengths).tolist()):
            if starts[b] <= token < starts[b + 1] and 0 <= length + token - starts[b] < max_positions:
                position = length + token - starts[b]
                entry, row = divmod(position, page_size)
                page = int(table[b, entry]) if entry < table.shape[1] else -1
                slot = (page, int(layer), row) if 0 <= page < num_pages and 0 <= layer < layers else None
        found.append((position, slot))
    return found


def qk_rms_norm_rope_paged(q, pages, page_table, lengths, q_scale, k_scale, freqs_cis, offsets, layer, k=None, v=None, *, round_before_rope=True,
                           **options):
    """(queries, their summands' sizes; {slot: the tokens that lie there}; keys, sizes, and values of every token, None where none are stored)."""
    found = paged_places(len(q), page_table, lengths, offsets, layer, np.shape(pages), len(freqs_cis))
    slots = {}
    for token, (_, slot) in enumerate(found):
        if slot is not None:
            slots.setdefault(slot, []).append(token)
    if k is None:
        k = np.zeros((len(q), *np.shape(pages)[-2:]), q.dtype)
        for (page, at, row), tokens in slots.items():
            k[tokens] = np.asarray(pages)[page, 0, at, row]
    positions = np.array([-1 if position is None else position for position, _ in found], int)
    queries, keys = (head_rms_norm_rope(x, scale, positions, freqs_cis=freqs_cis, round_before_rope=round_before_rope, **options)
                     for x, scale in ((q, q_scale), (k, k_scale)))
    return queries, slots, (*keys, v)
