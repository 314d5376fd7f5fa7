"""The host kernels themselves, called without XLA: every level, on buffers that lie anywhere."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

import oracle
from plain import placed

DTYPES = {"float32": (np.float32, 2), "bfloat16": (ml_dtypes.bfloat16, 3), "float16": (np.float16, 4)}
LEVELS = ("v2", "v3", "v4")
WIDTHS = (1, 7, 16, 57, 257, 960, 4097)


class Params(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_uint), ("width", ctypes.c_uint), ("epsilon", ctypes.c_float), ("scale_offset", ctypes.c_float)]


def add_rms_norm(library, level, x, residual, scale, offset, in_place=False):
    """(normed, sum) with every buffer at another offset."""
    rows, width = x.shape
    code, scale_code = (next(c for t, c in DTYPES.values() if t == a.dtype) for a in (x, scale))
    step = x.dtype.itemsize
    x, residual, scale = placed(x, offset), placed(residual, (offset + step) % 64), placed(scale, (offset + 4) % 64)
    nan = np.full_like(x, np.nan)
    normed, total = (x, residual) if in_place else (placed(nan, (offset + 3 * step) % 64), placed(nan, (offset + 5 * step) % 64))
    params = Params(rows, width, 1e-6, 0.0)
    buffers = (ctypes.c_void_p * 6)(*(a.ctypes.data for a in (x, residual, scale, normed, total)), ctypes.addressof(params))
    variant = (ctypes.c_ubyte * 8)(code, scale_code, 0, 0, 1)
    scratch = np.empty(width, np.float32)
    ran = library.jax_fusednorm_run_host_kernel(b"add_rms_norm", variant, level.encode(), buffers,
                                                scratch.ctypes.data_as(ctypes.c_void_p), rows)
    return (normed, total) if ran else pytest.skip(f"this processor has no {level}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_bits_do_not_depend_on_where_the_buffers_lie(host_library, level, dtype):
    numpy_dtype = DTYPES[dtype][0]
    rng = np.random.default_rng(0)
    for width in WIDTHS:
        x, residual = (rng.standard_normal((3, width)).astype(numpy_dtype) for _ in range(2))
        scale = rng.standard_normal(width).astype(np.float32)
        want = [a.tobytes() for a in add_rms_norm(host_library, level, x, residual, scale, 0)]
        for offset in range(0, 64, np.dtype(numpy_dtype).itemsize):
            got = add_rms_norm(host_library, level, x, residual, scale, offset)
            assert [a.tobytes() for a in got] == want, f"width {width}, {offset} bytes off a 64-byte boundary"
        assert [a.tobytes() for a in add_rms_norm(host_library, level, x, residual, scale, 0, in_place=True)] == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_agrees_with_float64(host_library, level, dtype):
    numpy_dtype = DTYPES[dtype][0]
    rng = np.random.default_rng(1)
    for width in WIDTHS:
        x, residual = (rng.standard_normal((5, width)).astype(numpy_dtype) for _ in range(2))
        scale = rng.standard_normal(width).astype(numpy_dtype)
        got = add_rms_norm(host_library, level, x, residual, scale, 2 * np.dtype(numpy_dtype).itemsize)
        want = oracle.add_rms_norm(x, residual, scale)
        for g, w in zip(got, want):
            oracle.assert_close(g, w, dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_storage_conversion_is_exact(host_library, level, dtype):
    """sum = x + 0 with x in float steps: every 16-bit value survives, and the sum of two of them is rounded to nearest even."""
    numpy_dtype = DTYPES[dtype][0]
    every = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype).reshape(64, 1024)
    other = np.random.default_rng(2).permutation(every.ravel()).reshape(every.shape)
    scale = np.ones(1024, np.float32)
    with np.errstate(all="ignore"):
        for residual in (np.zeros_like(every), other):
            _, total = add_rms_norm(host_library, level, every, residual, scale, 0)
            want = (every.astype(np.float32) + residual.astype(np.float32)).astype(numpy_dtype)
            nan = np.isnan(want.astype(np.float32))
            np.testing.assert_array_equal(np.isnan(total.astype(np.float32)), nan)
            np.testing.assert_array_equal(total.view(np.uint16)[~nan], want.view(np.uint16)[~nan])
