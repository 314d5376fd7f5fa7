"""The ops as the transformation tests see them: a callable, a plain formula of the same, and arguments."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import numpy as np
import pytest

import jax_fusednorm
import plain


@dataclasses.dataclass(frozen=True)
class Tested:
    """`rows` operands of shape [..., D] come before the scale [D]; the result is always a tuple here."""

    name: str
    op: Callable
    formula: Callable
    rows: int
    options: tuple = ()
    cotangent_kernel: str = "rms_norm_cotangent"

    def __str__(self):
        return self.name

    def bound(self, implementation):
        return _as_tuple(functools.partial(self.op, implementation=implementation, **dict(self.options)))

    @property
    def plain(self):
        return _as_tuple(functools.partial(self.formula, **dict(self.options)))

    def arguments(self, shape, dtype="float32", scale_dtype="float32", seed=0):
        scale = plain.draw_scale(seed + 9, shape[-1], scale_dtype)
        rows = [plain.draw(seed + i, shape, dtype) for i in range(self.rows)]
        return (*rows, *([] if scale is None else [scale]))


def _as_tuple(f):
    def call(*args):
        out = f(*args)
        return out if isinstance(out, tuple) else (out,)
    return call


_GEMMA = (("scale_offset", 1.0),)
_LLAMA = (("multiply_before_cast", False), ("sum_rounding", "storage"))
RMS_NORM = Tested("rms_norm", jax_fusednorm.rms_norm, plain.rms_norm, 1, _GEMMA)
ADD_RMS_NORM = Tested("add_rms_norm", jax_fusednorm.add_rms_norm, plain.add_rms_norm, 2, _GEMMA)
ADD_RMS_NORM_STORAGE = Tested("add_rms_norm_storage", jax_fusednorm.add_rms_norm, plain.add_rms_norm, 2, _LLAMA)
RMS_NORM_ADD = Tested("rms_norm_add", jax_fusednorm.rms_norm_add, plain.rms_norm_add, 2, _GEMMA)
GATED = Tested("gated_group_rms_norm", jax_fusednorm.gated_group_rms_norm, plain.gated_group_rms_norm, 2,
               cotangent_kernel="gated_group_rms_norm_cotangent")
NORMS = (RMS_NORM, ADD_RMS_NORM, ADD_RMS_NORM_STORAGE, RMS_NORM_ADD)
ALL = (*NORMS, GATED)

every_norm = pytest.mark.parametrize("tested", NORMS, ids=str)  # of whole rows, and with a tangent kernel
every_op = pytest.mark.parametrize("tested", ALL, ids=str)


def loss(f):
    """A scalar in which every result of `f` counts, each element with a weight of its own."""
    def total(*args):
        outs = f(*args)
        return sum((jax.numpy.sin(o.astype(jax.numpy.float32) + i) * (1.0 + jax.numpy.arange(o.shape[-1]) / o.shape[-1])).sum()
                   for i, o in enumerate(outs))
    return total


def assert_trees_close(got, want, *, rtol=2e-5, atol=2e-5, what=""):
    got_leaves, want_leaves = jax.tree.leaves_with_path(got), jax.tree.leaves(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(got_leaves, want_leaves):
        assert g.shape == w.shape and g.dtype == w.dtype, f"{what}{path}: {g.dtype}{g.shape} against {w.dtype}{w.shape}"
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        # large sums deserve a tolerance of their own size
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol * max(1.0, np.abs(w).max(initial=0)), err_msg=f"{what}{path}")


def kernel_calls(f, *args):
    """How many of the package's custom calls `f` lowers to."""
    return len(re.findall(r"custom_call @jax_fusednorm", jax.jit(f).lower(*args).as_text()))


def kernels_expected(implementation):
    return 0 if implementation == "jnp" else 1
