"""What the ops must return: float64 numpy, with the roundings of the specification written out one by one.

The formulas share no code with the package. `rounded` is the only place that rounds.
"""

import ml_dtypes
import numpy as np

# SPEC's tolerances. bfloat16 is counted in units in the last place instead.
RTOL = {"float32": 1e-4, "float16": 2e-3, "float64": 1e-12}
ATOL = {"float32": 1e-5, "float16": 1e-3, "float64": 1e-12}
DERIVATIVE_ULPS = {"bfloat16": 2 * 2.0**-8, "float16": 2 * 2.0**-11, "float32": 1e-4, "float64": 1e-11}
# Summands that cancel leave an error of their own size, not of the result's: a sixteenth of an ulp of the largest.
CANCELLATION = {"bfloat16": 2.0**-12, "float16": 2.0**-15, "float32": 1e-5, "float64": 1e-12}


def name_of(dtype) -> str:
    return np.dtype(dtype).name


def wide(a):
    return np.asarray(a).astype(np.float64)


def rounded(a, dtype):
    """float64 values rounded once, to nearest even, to `dtype`; given back as float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if name_of(dtype) == "bfloat16":
            a = _to_odd_float32(a)  # ml_dtypes goes through float32: rounding to odd there keeps the second rounding the only one
        return np.asarray(a).astype(dtype).astype(np.float64)


def _to_odd_float32(a):
    a = np.asarray(a, np.float64)
    near = a.astype(np.float32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != a)
    even = (near.view(np.uint32) & 1) == 0
    return np.where(inexact & even, np.nextafter(near, np.where(a > near, np.inf, -np.inf).astype(np.float32)), near)


def _factor(scale, offset, dtype, multiply_before_cast):
    if scale is None:
        return None
    wider = np.float64 if name_of(dtype) == "float64" else np.float32
    factor = rounded(wide(scale) + wide(np.float32(offset)), wider)
    return factor if multiply_before_cast else rounded(factor, dtype)


def _inverse_root(s, epsilon):
    return 1.0 / np.sqrt(np.mean(s * s, axis=-1, keepdims=True) + wide(np.float32(epsilon)))


def _unrounded(s, scale, dtype, epsilon, scale_offset, multiply_before_cast):
    """The norm before its last rounding."""
    factor = _factor(scale, scale_offset, dtype, multiply_before_cast)
    value = s * _inverse_root(s, epsilon)
    if factor is None:
        return value
    return (value if multiply_before_cast else rounded(value, dtype)) * factor


def _normed(s, scale, dtype, epsilon, scale_offset, multiply_before_cast):
    with np.errstate(all="ignore"):
        return rounded(_unrounded(s, scale, dtype, epsilon, scale_offset, multiply_before_cast), dtype)


def _sum(x, residual, sum_rounding):
    """(the sum that is normed, the sum that is returned)."""
    with np.errstate(all="ignore"):
        s = rounded(wide(x) + wide(residual), np.float64 if name_of(x.dtype) == "float64" else np.float32)
        stored = rounded(s, x.dtype)
    return (s if sum_rounding == "float32" else stored), stored


def rms_norm(x, scale=None, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True):
    return _normed(wide(x), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)


def add_rms_norm(x, residual, scale=None, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True,
                 sum_rounding="float32"):
    s, stored = _sum(x, residual, sum_rounding)
    return _normed(s, scale, x.dtype, epsilon, scale_offset, multiply_before_cast), stored


def rms_norm_add(x, residual, scale=None, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True,
                 norm_rounding="float32"):
    with np.errstate(all="ignore"):
        norm = _unrounded(wide(x), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)
        return rounded(wide(residual) + (norm if norm_rounding == "float32" else rounded(norm, x.dtype)), x.dtype)


def _groups(a, group_size):
    *rows, width = np.shape(a)
    size = group_size or width
    return wide(a).reshape(*rows, width // size, size)


def _gate_of(gate, y, gate_start):
    start = gate_start or 0
    return np.asarray(gate)[..., start:start + y.shape[-1]]


def _activation(g, name):
    """(the activation, its derivative, the size of the derivative's largest summand)."""
    sigmoid = 1.0 / (1.0 + np.exp(-g))
    if name == "sigmoid":
        return sigmoid, sigmoid * (1.0 - sigmoid), sigmoid * (1.0 - sigmoid)
    return g / (1.0 + np.exp(-g)), sigmoid * (1.0 + g * (1.0 - sigmoid)), sigmoid * (1.0 + np.abs(g) * (1.0 - sigmoid))


def gated_group_rms_norm(y, gate, scale, *, group_size=None, epsilon=1e-5, norm_before_gate=False, gate_start=None,
                         activation="silu", rounding="storage", out_dtype=None):
    with np.errstate(all="ignore"):
        act = _activation(_groups(_gate_of(gate, y, gate_start), group_size), activation)[0]
        v = _groups(y, group_size) * (1.0 if norm_before_gate else act)
        v = v * _inverse_root(v, epsilon)
        v = rounded(v, y.dtype) if rounding == "storage" else v
        v = v * _groups(scale, group_size) * (act if norm_before_gate else 1.0)
        return rounded(v.reshape(y.shape), y.dtype if out_dtype is None else out_dtype)


def _project(x, weight, transpose_b):
    with np.errstate(all="ignore"):
        return rounded(wide(x) @ (wide(weight).T if transpose_b else wide(weight)), x.dtype)


def matmul_partial_rms_norm(x, weight, scale, *, transpose_b=True, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True):
    y, n = _project(x, weight, transpose_b), len(scale)
    return _normed(y[..., :n], scale, x.dtype, epsilon, scale_offset, multiply_before_cast), y[..., n:]


# Derivatives. Roundings count as identity, so nothing below rounds but the sum that the derivative is taken at; the
# second value of each pair is the size of the row's largest summand, against which cancellation is to be judged.

def _row_size(*summands):
    return np.max(sum(np.abs(a) for a in summands), axis=-1, keepdims=True)


def _jvp_at(s, ds, scale, dscale, dtype, epsilon, scale_offset, multiply_before_cast):
    del multiply_before_cast  # it moves a rounding, nothing else
    factor = _factor(scale, scale_offset, dtype, True)
    r = _inverse_root(s, epsilon)
    w = np.ones(s.shape[-1]) if factor is None else factor
    direct, through_r = ds * r * w, -s * r**3 * np.mean(s * ds, axis=-1, keepdims=True) * w
    through_scale = 0.0 * s if dscale is None else s * r * dscale
    return direct + through_r + through_scale, _row_size(direct, through_r, through_scale)


def _vjp_at(s, dn, scale, dtype, epsilon, scale_offset, multiply_before_cast):
    del multiply_before_cast
    factor = _factor(scale, scale_offset, dtype, True)
    r = _inverse_root(s, epsilon)
    c = dn if factor is None else dn * factor
    direct, through_r = r * c, -s * r**3 * np.mean(c * s, axis=-1, keepdims=True)
    dscale = None if scale is None else np.sum((dn * s * r).reshape(-1, s.shape[-1]), axis=0)
    return direct + through_r, _row_size(direct, through_r), dscale


def rms_norm_jvp(x, scale, dx, dscale, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True):
    """(tangent, row size)."""
    dscale = None if dscale is None else wide(dscale)
    return _jvp_at(wide(x), wide(dx), scale, dscale, x.dtype, epsilon, scale_offset, multiply_before_cast)


def rms_norm_vjp(x, scale, dn, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True):
    """(cotangent of x, its row size, cotangent of scale)."""
    return _vjp_at(wide(x), wide(dn), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)


def add_rms_norm_jvp(x, residual, scale, dx, dresidual, dscale, *, sum_rounding="float32", epsilon=1e-6,
                     scale_offset=0.0, multiply_before_cast=True):
    """((tangent, row size) of normed, (tangent, row size) of the sum)."""
    s, _ = _sum(x, residual, sum_rounding)
    ds = wide(dx) + wide(dresidual)
    dscale = None if dscale is None else wide(dscale)
    normed = _jvp_at(s, ds, scale, dscale, x.dtype, epsilon, scale_offset, multiply_before_cast)
    return normed, (ds, _row_size(wide(dx), wide(dresidual)))


def add_rms_norm_vjp(x, residual, scale, dn, dsum, *, sum_rounding="float32", epsilon=1e-6, scale_offset=0.0,
                     multiply_before_cast=True):
    """(cotangent of x and of residual, its row size, cotangent of scale)."""
    s, _ = _sum(x, residual, sum_rounding)
    ds, size, dscale = _vjp_at(s, wide(dn), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)
    return ds + wide(dsum), size + _row_size(wide(dsum)), dscale


def _gated_parts(y, gate, scale, group_size, epsilon, norm_before_gate, gate_start, activation):
    """y, v, r, scale, act, slope of act and its size, and the two factors of which one is act: before the norm and after it."""
    y_wide, w = _groups(y, group_size), _groups(scale, group_size)
    act, slope, slope_size = _activation(_groups(_gate_of(gate, y, gate_start), group_size), activation)
    before, after = (np.ones_like(act), act) if norm_before_gate else (act, np.ones_like(act))
    v = y_wide * before
    return y_wide, v, _inverse_root(v, epsilon), w, act, slope, slope_size, before, after


def gated_group_rms_norm_jvp(y, gate, scale, dy, dgate, dscale, *, group_size=None, epsilon=1e-5, norm_before_gate=False, gate_start=None,
                             activation="silu"):
    """(tangent, size of its group's largest summand)."""
    y_wide, v, r, w, _, slope, _, before, after = _gated_parts(y, gate, scale, group_size, epsilon, norm_before_gate, gate_start, activation)
    dact = slope * _groups(_gate_of(dgate, y, gate_start), group_size)
    dv = _groups(dy, group_size) * before + (0.0 if norm_before_gate else y_wide * dact)
    summands = (r * dv * w * after, -v * r**3 * np.mean(v * dv, axis=-1, keepdims=True) * w * after,
                v * r * _groups(dscale, group_size) * after, v * r * w * dact if norm_before_gate else 0.0 * v)
    size = np.broadcast_to(_row_size(*summands), v.shape)
    return sum(summands).reshape(y.shape), size.reshape(y.shape)


def gated_group_rms_norm_vjp(y, gate, scale, dout, *, group_size=None, epsilon=1e-5, norm_before_gate=False, gate_start=None,
                             activation="silu"):
    """((cotangent of y, size), (cotangent of the gate, of its full width, size), cotangent of scale)."""
    y_wide, v, r, w, _, slope, slope_size, before, after = _gated_parts(
        y, gate, scale, group_size, epsilon, norm_before_gate, gate_start, activation)
    c = _groups(dout, group_size) * w * after
    direct, through_r = r * c, -v * r**3 * np.mean(c * v, axis=-1, keepdims=True)
    dv, dv_size = direct + through_r, _row_size(direct, through_r)
    dact = _groups(dout, group_size) * w * v * r if norm_before_gate else dv * y_wide
    dact_size = np.abs(dact) if norm_before_gate else dv_size * np.abs(y_wide)
    start = gate_start or 0
    around = [(0, 0)] * (y.ndim - 1) + [(start, gate.shape[-1] - start - y.shape[-1])]
    full = [np.pad(a.reshape(y.shape), around) for a in (dact * slope, dact_size * slope_size)]
    dscale = np.sum((_groups(dout, group_size) * after * v * r).reshape(-1, y.shape[-1]), axis=0)
    return ((dv * before).reshape(y.shape), (dv_size * np.abs(before)).reshape(y.shape)), tuple(full), dscale


# Heads, normed and rotated (SPEC 4 and 6).

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
        y = _unrounded(wide(x), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)
    if round_before_rope or not multiply_before_cast:
        y = rounded(y, x.dtype)
    steps = np.broadcast_to(np.asarray(0 if positions is None else positions), x.shape[:-2]).astype(np.float64)
    if freqs_cis is None:
        rope_dim = width if rope_dim is None else rope_dim
        inverse = np.asarray(inverse_frequencies(rope_dim, theta, width if style == "proportional" else None))
        angles = steps[..., None] * (inverse if freq_factors is None else inverse / wide(freq_factors))
        cos, sin, known = np.cos(angles), np.sin(angles), np.ones(steps.shape, bool)
    else:
        table = wide(freqs_cis)
        rope_dim, known = table.shape[1], (steps >= 0) & (steps < len(table))
        rows = table[np.where(known, steps, 0).astype(int)]
        cos, sin = rows[..., ::2], rows[..., 1::2]
    out, size = y.copy(), np.abs(y)
    for p, (a, b) in enumerate(pairs_of(width, rope_dim, style, placement)):
        c, s = cos[..., p, None], sin[..., p, None]
        out[..., a], out[..., b] = y[..., a] * c - y[..., b] * s, y[..., a] * s + y[..., b] * c
        size[..., a] = size[..., b] = np.abs(y[..., a]) + np.abs(y[..., b])
    known = known[..., None, None]
    return np.where(known, out, 0.0), np.where(known, size, 0.0)


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


def matmul_partial_rms_norm_vjp(x, weight, scale, dnormed, dunnormed, *, transpose_b=True, epsilon=1e-6, scale_offset=0.0,
                                multiply_before_cast=True):
    """(cotangent of x, its size), (cotangent of weight, its size), cotangent of scale. The size of a sum is that of its summands taken
    as random: the root of their squares."""
    y, n = _project(x, weight, transpose_b), len(scale)
    dy, _, dscale = _vjp_at(y[..., :n], wide(dnormed), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)
    dy = np.concatenate([dy, wide(dunnormed)], axis=-1)
    rows, drows = wide(x).reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    of_n_and_k = wide(weight) if transpose_b else wide(weight).T

    def products(a, b):
        return a @ b, np.sqrt(np.max(a**2 @ b**2, initial=0.0))

    dx, x_size = products(drows, of_n_and_k)
    dweight, weight_size = products(drows.T, rows)
    return (dx.reshape(x.shape), x_size), (dweight if transpose_b else dweight.T, weight_size), dscale


# Comparisons.

def bits(a):
    a = np.ascontiguousarray(np.asarray(a))
    return a.view(f"u{a.dtype.itemsize}")


def ulps(got, want, dtype):
    """Distance in representable values of `dtype`; +0 and -0 are one value."""
    def ordinal(a):
        b = bits(np.asarray(a).astype(dtype)).astype(np.int64)
        top = np.int64(1) << (8 * np.dtype(dtype).itemsize - 1)
        return np.where(b & top, top - b, b)

    return np.abs(ordinal(got) - ordinal(want))


def _flushed(a, dtype):
    """XLA:CPU may take values under the smallest normal float32 for zero."""
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, 0.0, a) if name_of(dtype) != "float64" else a


def _same_shape_and_kind(got, want, dtype, what):
    assert got.dtype == np.dtype(dtype), f"{what}: dtype {got.dtype}, wanted {np.dtype(dtype)}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    got = wide(got)
    for name, test in (("nan", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(got) != test(want)
        assert not wrong.any(), f"{what}: {name} differs in {_where(wrong, got, want)}"
    return got, np.isfinite(want)


def _where(wrong, got, want):
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{wrong.sum()} of {wrong.size} elements, first at {at}: got {got[at]!r}, wanted {want[at]!r}"


def assert_close(got, want, dtype, *, rtol=None, atol=None, what="value"):
    """`got`, of `dtype`, agrees with the oracle's float64 `want` as SPEC section 10 asks."""
    want = wide(want)
    values, finite = _same_shape_and_kind(np.asarray(got), want, dtype, what)
    values, want = (_flushed(np.where(finite, a, 0.0), dtype) for a in (values, want))
    if name_of(dtype) == "bfloat16" and rtol is None:
        off = ulps(values, want, dtype)
        assert off.size == 0 or off.max() <= 2, f"{what}: {int(off.max())} ulp in {_where(off > 2, values, want)}"
        allowed = 1e-3 * off.size
        assert (off > 1).sum() <= allowed, f"{what}: over 1 ulp in {_where(off > 1, values, want)}, allowed {allowed:.1f}"
        return
    rtol = RTOL[name_of(dtype)] if rtol is None else rtol
    atol = ATOL[name_of(dtype)] if atol is None else atol
    _assert_within(values, want, rtol * np.abs(want) + atol, what)


def assert_derivative_close(got, want, size, dtype, *, rounded_factors=0, what="derivative"):
    """A tangent or cotangent of `dtype`; `size` is the size of its row's largest summand.

    rounded_factors: how many factors of a summand may be the stored ones, each of which puts it half an ulp off.
    """
    values, finite = _same_shape_and_kind(np.asarray(got), want, dtype, what)
    least = np.finfo(np.float32).tiny if name_of(dtype) != "float16" else 2.0**-24
    floor = CANCELLATION[name_of(dtype)] * (16 * rounded_factors if rounded_factors and np.dtype(dtype).itemsize == 2 else 1)
    limit = DERIVATIVE_ULPS[name_of(dtype)] * np.abs(want) + floor * size + least
    _assert_within(np.where(finite, values, 0), np.where(finite, want, 0), np.broadcast_to(limit, want.shape), what)


def assert_sum_close(got, want, size, dtype, *, what="sum"):
    """A sum of two rounded summands; `size` is the largest of the three. Two may be an ulp off, and they may cancel."""
    values, finite = _same_shape_and_kind(np.asarray(got), want, dtype, what)
    limit = np.broadcast_to(2 * DERIVATIVE_ULPS[name_of(dtype)] * size + np.finfo(np.float32).tiny, want.shape)
    _assert_within(np.where(finite, values, 0), np.where(finite, want, 0), np.where(finite, limit, 1), what)


def assert_rotated_close(got, want, size, dtype, *, rounded_before=False, what="value"):
    """A rotated value of `dtype` and its unrounded float64 `want`; `size` is that of its summands, which may cancel.

    rounded_before: whether the norm was rounded before the rotation. One in 300 may then have been rounded the other way.
    """
    kind = name_of(dtype)
    values, finite = _same_shape_and_kind(np.asarray(got), np.where(np.isfinite(want), rounded(want, dtype), want), dtype, what)
    ulp = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}[kind]
    floor = {"float64": 1e-8}.get(kind, 4e-6) * size + (2.0**-24 if kind == "float16" else np.finfo(np.float32).tiny)
    want, values = np.where(finite, want, 0), np.where(finite, values, 0)
    limit = np.where(finite, 1.01 * ulp * np.abs(want) + floor, 1)
    if rounded_before:
        assert (np.abs(values - want) > limit).sum() <= 1 + want.size / 300, f"{what}: {_where(np.abs(values - want) > limit, values, want)}"
        limit = limit + np.where(finite, 2 * ulp * size, 0)
    _assert_within(values, want, limit, what)


def assert_scale_cotangent_close(got, want, dtype, *, tolerance=1e-2, what="scale cotangent"):
    """Within `tolerance` of the whole vector's norm."""
    values, _ = _same_shape_and_kind(np.asarray(got), want, dtype, what)
    error, size = np.linalg.norm(values - want), np.linalg.norm(want)
    assert error <= tolerance * size, f"{what}: off by {error:.3e}, its norm is {size:.3e}, allowed {tolerance * size:.3e}"


def assert_same_casts(got, want, dtype, *, roundings=1, what="value"):
    """Bit equality, but for 1 ulp in 0.1 % of the elements for each of the `roundings` in a row that the value went through.

    Summation order may flip a rounding, a cast may not; an ulp of an inner rounding can become two of the last one.
    """
    off = ulps(np.asarray(got), want, dtype)
    assert off.max() <= roundings and (off > 0).mean() <= 1e-3 * roundings, (
        f"{what}: {(off > 0).mean():.2%} of the elements differ, by up to {int(off.max())} ulp")


def assert_same_bits(got, want, what="value"):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype}{got.shape} against {want.dtype}{want.shape}"
    wrong = (bits(got) != bits(want)) & ~(np.isnan(wide(got)) & np.isnan(wide(want)))  # the bits of a nan are the hardware's
    assert not wrong.any(), f"{what}: bits differ in {_where(wrong, wide(got), wide(want))}"


def _assert_within(got, want, limit, what):
    error = np.abs(got - want)
    wrong = ~(error <= limit)
    if wrong.any():
        worst = np.unravel_index(np.argmax(np.where(wrong, error / np.maximum(limit, 1e-300), 0)), error.shape)
        raise AssertionError(
            f"{what}: {_where(wrong, got, want)}; worst at {tuple(int(i) for i in worst)}: got {got[worst]!r}, "
            f"wanted {want[worst]!r}, off by {error[worst]:.3e}, allowed {limit[worst]:.3e}")
