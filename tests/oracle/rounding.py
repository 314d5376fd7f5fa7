"""How the oracle rounds: once, to nearest even, to any dtype."""

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np


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
