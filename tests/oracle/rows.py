"""The norms of rows, of groups and of what a projection gives, and then their derivatives."""

import numpy as np

from .rounding import name_of, rounded, wide


def _factor(scale, offset, dtype, multiply_before_cast):
    if scale is None:
        return None
    wider = np.float64 if name_of(dtype) == "float64" else np.float32
    factor = rounded(wide(scale) + wide(np.float32(offset)), wider)
    return factor if multiply_before_cast else rounded(factor, dtype)


def _inverse_root(s, epsilon):
    return 1.0 / np.sqrt(np.mean(s * s, axis=-1, keepdims=True) + wide(np.float32(epsilon)))


def unrounded(s, scale, dtype, epsilon, scale_offset, multiply_before_cast):
    """The norm before its last rounding."""
    factor = _factor(scale, scale_offset, dtype, multiply_before_cast)
    value = s * _inverse_root(s, epsilon)
    if factor is None:
        return value
    return (value if multiply_before_cast else rounded(value, dtype)) * factor


def _normed(s, scale, dtype, epsilon, scale_offset, multiply_before_cast):
    with np.errstate(all="ignore"):
        return rounded(unrounded(s, scale, dtype, epsilon, scale_offset, multiply_before_cast), dtype)


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
        norm = unrounded(wide(x), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)
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
