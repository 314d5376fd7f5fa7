"""How close to the oracle a result must be, for each kind of it: the tolerances, and the assertions that apply them."""

import numpy as np

from .rounding import name_of, rounded, wide

# SPEC's tolerances. bfloat16 is counted in units in the last place instead.
RTOL = {"float32": 1e-4, "float16": 2e-3, "float64": 1e-12}
ATOL = {"float32": 1e-5, "float16": 1e-3, "float64": 1e-12}
DERIVATIVE_ULPS = {"bfloat16": 2 * 2.0**-8, "float16": 2 * 2.0**-11, "float32": 1e-4, "float64": 1e-11}
# Summands that cancel leave an error of their own size, not of the result's: a sixteenth of an ulp of the largest.
CANCELLATION = {"bfloat16": 2.0**-12, "float16": 2.0**-15, "float32": 1e-5, "float64": 1e-12}


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
