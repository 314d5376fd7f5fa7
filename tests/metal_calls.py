"""One call of each kernel as a launcher would make it: operands, params, what must come out, and the bytes that must move."""

import dataclasses
import functools
import struct
from collections.abc import Callable

import embed
import ml_dtypes
import msl_variants
import numpy as np
import oracle
from metal_driver import Array, launch
from msl_variants import ARGUMENTS

DTYPES = {"float": np.float32, "bfloat": ml_dtypes.bfloat16, "half": np.float16}
KERNELS = ("rms_norm", "rms_norm_add", "add_rms_norm", "rms_norm_tangent", "rms_norm_cotangent", "gated_group_rms_norm",
           "gated_group_rms_norm_cotangent")
EPSILON, OFFSET = 1e-6, 0.5


def text_of(kernel):
    return next(text for text in map(embed.assemble, embed.FILES) if kernel in embed.kernels(text))


variants = functools.cache(msl_variants.variants)


@functools.cache
def widths_of_shapes(standin, itemsize):
    """{shape: (the narrowest, the widest of its widths)} for rows of up to 16,400 elements: every shape there is."""
    found = {}
    for width in range(1, 16401):
        shape = standin.shape(width, itemsize)
        found[shape] = (found.get(shape, (width,))[0], width)
    return found


@dataclasses.dataclass
class Call:
    arrays: list      # by buffer; results hold nan. One that is absent is another, bound again
    params: bytes
    check: Callable   # of the arrays afterwards
    moved: Callable   # again -> {buffer: (bytes read, bytes written)}; again: how often a row is read, 1 if it is kept
    sums: int = 1     # over each row, all made at once
    most_kept: int = 4  # packs of a row; a thread that has more reads them again
    teams: int = 0
    width: int = 0
    kernel: str = ""
    variant: tuple = ()

    @property
    def dtype(self):
        return self.arrays[0].dtype

    @property
    def rows(self):
        """Of `width`, each of them summed."""
        return self.arrays[0].size // self.width

    def instantiation(self, standin):
        return f"{self.kernel}<{', '.join([*self.variant, *map(str, standin.shape(self.width, self.dtype.itemsize))])}>"

    def messages(self, standin, pipeline):
        """(the messages, the arrays that they bind)"""
        _, _, simdgroups, teams = standin.shape(self.width, self.dtype.itemsize)
        placed = {id(a): Array(a) for a in self.arrays}
        arrays = [placed[id(a)] for a in self.arrays]
        return launch(pipeline, arrays, self.params, -(-self.teams // teams), teams * simdgroups * 32, 16 * simdgroups), arrays


def call(kernel, variant, rows, width):
    """A call of one variant on operands of this size."""
    rng = np.random.default_rng(width)
    words = {"true": True, "false": False, **DTYPES, "ones": None}
    made = globals()[f"_{kernel}"](rng, rows, width, *(words[word] for word in variant))
    return dataclasses.replace(made, kernel=kernel, variant=variant, width=width, teams=made.teams or rows)


def _rows(rng, rows, width, dtype):
    """Ordinary rows; one of zeros and one of tiny numbers, in which a left-out epsilon shows."""
    x = rng.standard_normal((rows, width))
    x[1:2] = 0
    x[2:3] *= 1e-4
    return x.astype(dtype)


def _scale(rng, x, dtype):
    """(the scale as bound, its offset, the bytes that one row reads of it)"""
    if dtype is None:
        return x, 0.0, 0
    scale = rng.standard_normal(x.shape[1]).astype(dtype)
    return scale, OFFSET, scale.nbytes


def _empty(like):
    return np.full(like.shape, np.nan, like.dtype)


def _norm(x, scale, offset, in_t):
    """(the params, the options of the oracle)"""
    return struct.pack("IIff", *x.shape, EPSILON, offset), {
        "scale": None if scale is x else scale, "epsilon": EPSILON, "scale_offset": offset, "multiply_before_cast": not in_t}


def _rms_norm(rng, rows, width, dtype, scale_dtype, in_t):
    x = _rows(rng, rows, width, dtype)
    scale, offset, scale_bytes = _scale(rng, x, scale_dtype)
    params, options = _norm(x, scale, offset, in_t)
    want = oracle.rms_norm(x, **options)
    return Call([x, scale, _empty(x)], params, lambda a: oracle.assert_close(a[2], want, dtype),
                lambda again: {0: (again * x.nbytes, 0), 1: (rows * scale_bytes, 0), 2: (0, x.nbytes)})


def _rms_norm_add(rng, rows, width, dtype, scale_dtype, in_t, round_norm):
    x, residual = (_rows(rng, rows, width, dtype) for _ in range(2))
    scale, offset, scale_bytes = _scale(rng, x, scale_dtype)
    params, options = _norm(x, scale, offset, in_t)
    want = oracle.rms_norm_add(x, residual, norm_rounding="storage" if round_norm else "float32", **options)
    return Call([x, residual, scale, _empty(x)], params, lambda a: oracle.assert_close(a[3], want, dtype),
                lambda again: {0: (again * x.nbytes, 0), 1: (x.nbytes, 0), 2: (rows * scale_bytes, 0), 3: (0, x.nbytes)})


def _add_rms_norm(rng, rows, width, dtype, scale_dtype, in_t, round_sum, wants_sum):
    x, residual = (_rows(rng, rows, width, dtype) for _ in range(2))
    scale, offset, scale_bytes = _scale(rng, x, scale_dtype)
    params, options = _norm(x, scale, offset, in_t)
    want = oracle.add_rms_norm(x, residual, sum_rounding="storage" if round_sum else "float32", **options)
    normed = _empty(x)

    def check(a):
        for got, wanted in list(zip(a[3:], want))[:1 + wants_sum]:
            oracle.assert_close(got, wanted, dtype)

    return Call([x, residual, scale, normed, _empty(x) if wants_sum else normed], params, check,
                lambda again: {0: (again * x.nbytes, 0), 1: (again * x.nbytes, 0), 2: (rows * scale_bytes, 0), 3: (0, x.nbytes),
                               4: (0, x.nbytes * wants_sum)})


def _rms_norm_tangent(rng, rows, width, dtype, has_residual, has_gain_dot):
    x, residual, s_dot = (_rows(rng, rows, width, dtype) for _ in range(3))
    gain, gain_dot = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
    zeros = np.zeros_like(x)
    (want, size), _ = oracle.add_rms_norm_jvp(x, residual if has_residual else zeros, gain, s_dot, zeros,
                                              gain_dot if has_gain_dot else None, epsilon=EPSILON)
    return Call([x, residual if has_residual else x, s_dot, gain, gain_dot if has_gain_dot else gain, _empty(x)],
                struct.pack("IIIf", rows, width, rows, EPSILON), lambda a: oracle.assert_derivative_close(a[5], want, size, dtype),
                lambda again: {0: (again * x.nbytes, 0), 1: (again * x.nbytes * has_residual, 0), 2: (again * x.nbytes, 0),
                               3: (rows * gain.nbytes, 0), 4: (rows * gain.nbytes * has_gain_dot, 0), 5: (0, x.nbytes)}, sums=2)


def _rms_norm_cotangent(rng, rows, width, dtype, has_residual, has_sum, wants_gain):
    x, residual, normed_bar, sum_bar = (_rows(rng, rows, width, dtype) for _ in range(4))
    gain = rng.standard_normal(width).astype(np.float32)
    zeros = np.zeros_like(x)
    want, size, gain_want = oracle.add_rms_norm_vjp(x, residual if has_residual else zeros, gain, normed_bar,
                                                    sum_bar if has_sum else zeros, epsilon=EPSILON)
    teams = max(rows // 2, 1) if wants_gain else rows
    s_bar = _empty(x)
    gain_bar = np.full((teams, width), np.nan, np.float32) if wants_gain else s_bar

    def check(a):
        oracle.assert_derivative_close(a[5], want, size, dtype)
        if wants_gain:
            oracle.assert_scale_cotangent_close(a[6].sum(0), gain_want, np.float32, tolerance=1e-5)

    def moved(again):
        totals = rows * gain.nbytes * (again - 1)  # where they are not kept, they are read and written with each row
        return {0: (again * x.nbytes, 0), 1: (again * x.nbytes * has_residual, 0), 2: (again * x.nbytes, 0), 3: (x.nbytes * has_sum, 0),
                4: (2 * rows * gain.nbytes, 0), 5: (0, x.nbytes), 6: (totals, gain_bar.nbytes + totals) if wants_gain else (0, 0)}

    return Call([x, residual if has_residual else x, normed_bar, sum_bar if has_sum else x, gain, s_bar, gain_bar],
                struct.pack("IIIf", rows, width, teams, EPSILON), check, moved, sums=2, teams=teams)


def _gated(rng, rows, width, dtype, gate_dtype, norm_first, blocks):
    """(y, the gate, the scale, the params, the oracle's options): two groups a row, and a gate between other columns.

    Every second variant: the gate's packs are not aligned, and its activation is a sigmoid.
    """
    y = _rows(rng, rows, 2 * width, dtype)
    before, after = (3, 2) if norm_first else (8, 16)
    gate = rng.standard_normal((rows, before + 2 * width + after)).astype(gate_dtype)
    aligned = all(n * gate.itemsize % 16 == 0 for n in (before, gate.shape[1]))
    params = struct.pack("8If", rows, 2, width, blocks, gate.shape[1], before, aligned, not norm_first, EPSILON)
    return y, gate, rng.standard_normal(2 * width).astype(np.float32), params, dict(
        group_size=width, gate_start=before, epsilon=EPSILON, norm_before_gate=norm_first, activation="sigmoid" if norm_first else "silu")


def _gated_group_rms_norm(rng, rows, width, dtype, gate_dtype, out_dtype, scale_dtype, norm_first, round_norm):
    y, gate, scale, params, options = _gated(rng, rows, width, dtype, gate_dtype, norm_first, rows)
    scale, out = scale.astype(scale_dtype), np.full(y.shape, np.nan, out_dtype)
    want = oracle.gated_group_rms_norm(y, gate, scale, rounding="storage" if round_norm else "float32", out_dtype=out_dtype, **options)
    coarse = dict(rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-4) if round_norm and out_dtype != dtype else {}
    columns = y.size * gate.itemsize
    return Call([y, gate, scale, out], params, lambda a: oracle.assert_close(a[3], want, out_dtype, **coarse),
                lambda again: {0: (again * y.nbytes, 0), 1: ((1 if norm_first else again) * columns, 0), 2: (rows * scale.nbytes, 0),
                               3: (0, out.nbytes)}, teams=2 * rows)


def _gated_group_rms_norm_cotangent(rng, rows, width, dtype, gate_dtype, out_dtype, norm_first):
    blocks = max(rows // 2, 1)
    y, gate, scale, params, options = _gated(rng, rows, width, dtype, gate_dtype, norm_first, blocks)
    out_bar, y_bar = _rows(rng, rows, 2 * width, out_dtype), _empty(y)
    gate_bar, scale_bar = np.full(y.shape, np.nan, gate_dtype), np.full((blocks, 2 * width), np.nan, np.float32)
    (want, size), wants_gate, want_scale = oracle.gated_group_rms_norm_vjp(y, gate, scale, out_bar, **options)
    start = options["gate_start"]
    gate_want, gate_size = (np.broadcast_to(a, gate.shape)[:, start:start + 2 * width] for a in wants_gate)

    def check(a):
        oracle.assert_derivative_close(a[4], want, size, dtype)
        oracle.assert_derivative_close(a[5], gate_want, gate_size, gate_dtype)
        oracle.assert_scale_cotangent_close(a[6].sum(0), want_scale, np.float32, tolerance=1e-5)

    def moved(again):
        totals = rows * scale.nbytes * (again - 1)  # where they are not kept, they are read and written with each row
        return {0: (again * y.nbytes, 0), 1: (again * y.size * gate.itemsize, 0), 2: (2 * rows * scale.nbytes, 0),
                3: (again * out_bar.nbytes, 0), 4: (0, y_bar.nbytes), 5: (0, gate_bar.nbytes), 6: (totals, scale_bar.nbytes + totals)}

    return Call([y, gate, scale, out_bar, y_bar, gate_bar, scale_bar], params, check, moved, sums=2, teams=2 * blocks, most_kept=2)
