"""Projection, and the RMSNorm of its first outputs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.typing import ArrayLike

from ..core import checks, sharding
from ..core.numerics import compute_dtype, last_mean, rounded
from ..core.primitive import Op
from ..core.types import Implementation
from . import rms_norm as _rms_norm


def matmul_partial_rms_norm(x: ArrayLike, weight: ArrayLike, scale: ArrayLike, *, epsilon: float = 1e-6, scale_offset: float = 0.0,
                            transpose_b: bool = True, multiply_before_cast: bool = True,
                            implementation: Implementation | None = None) -> tuple[jax.Array, jax.Array]:
    """The product of activations and a weight, its first outputs normalized by their root mean square (the fused down-projection
    of queries, keys and values in multi-head latent attention).

    Equivalent to, with everything in float32 (float64 for float64 `x`)::

        y = (x @ weight.T).astype(x.dtype)                  # transpose_b=False: x @ weight
        n = len(scale)
        return rms_norm(y[..., :n], scale), y[..., n:]      # as rms_norm's options say

    Args:
      x: [..., K] in float32, bfloat16 or float16; any leading axes, none of which may be needed: zero rows are fine.
      weight: [N, K], or [K, N] with transpose_b=False, of x's dtype.
      scale: [n] in any of these dtypes, with n from 1 to N: as many outputs are normalized.
      epsilon, scale_offset, multiply_before_cast: as in `rms_norm`.
      transpose_b: static; the weight's layout.
      implementation: None for the default in force, or "auto", "jnp", "kernel", "host", "metal", "cuda".

    Returns:
      (normed [..., n], unnormed [..., N - n]), both in x's dtype; the second may be empty.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Few rows, FEW_ROWS of them at most, are multiplied by a kernel that reads the weight once; more are XLA's matrix product, and
    only the norm is a kernel. Products are summed in float32 of full precision either way, in another order.

    Derivatives of every order and mode exist for x, weight and scale; roundings count as the identity. The backward pass keeps
    the product, [..., N], beside x, weight and scale, and has two matrix products in x's dtype, as those of a plain projection.

    Formulas: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; DeepSeek-AI, DeepSeek-V2, 2024, for the projection.
    """
    op = "matmul_partial_rms_norm"
    x = checks.activation(op, "x", x)
    transpose_b = checks.flag(op, "transpose_b", transpose_b)
    weight, outputs = _weight(op, checks.floats(op, "weight", weight), x, transpose_b)
    scale = checks.floats(op, "scale", scale)
    if scale.ndim != 1 or not 1 <= scale.shape[0] <= outputs:
        checks.fail(op, "scale", f"of shape {list(scale.shape)}", f"one axis of 1 to {outputs} elements was wanted, one for each output "
                    "that is normalized")
    spec = _rms_norm.make_spec(Spec, op, scale, epsilon, scale_offset, multiply_before_cast, implementation, transpose_b=transpose_b)
    normed, unnormed, _ = _OPS[transpose_b].bind(x, weight, scale, spec=spec)
    return normed, unnormed


# The most rows that are faster with a kernel that reads the weight once than with XLA's matrix product: by launcher, for weights [K, N]
# and [N, K], of 2-byte and of 4-byte elements. Those of host are measured (`python benchmarks/matmul.py`), and those of cuda, too, on an
# H200 with jax 0.11.2 (`--platform cuda`); those of metal are guesses.
FEW_ROWS = {"host": ((12, 8), (8, 32)), "metal": ((8, 8), (8, 8)), "cuda": ((0, 0), (1, 0))}


@dataclasses.dataclass(frozen=True)
class Spec(_rms_norm.Spec):
    transpose_b: bool


def _weight(op, weight, x, transpose_b):
    """The weight, and how many outputs it has."""
    if weight.dtype != x.dtype:
        checks.fail(op, "weight", f"{weight.dtype}", f"the dtype of `x`, {x.dtype}, was wanted: cast one of the two")
    width = x.shape[-1]
    layout, alternative = (f"[N, {width}]", f"[{width}, N]")[::1 if transpose_b else -1]
    if weight.ndim != 2 or weight.shape[transpose_b] != width or 0 in weight.shape:
        checks.fail(op, "weight", f"of shape {list(weight.shape)}", f"{layout} was wanted with transpose_b={transpose_b}, for `x` of "
                    f"{list(x.shape)}, N at least 1: {alternative} is for transpose_b={not transpose_b}")
    return weight, weight.shape[not transpose_b]


def _dot(x, weight, spec, dtype):
    """x times weight in `dtype`, without a transposed copy of the weight. Full precision: else a GPU multiplies float32 in fewer digits."""
    contracted = ((x.ndim - 1,), (1 if spec.transpose_b else 0,))
    return jax.lax.dot_general(x, weight, (contracted, ((), ())), precision="highest", preferred_element_type=dtype)


def _product(x, weight, spec, cut=()):
    """Rounded once to x's dtype, and still in the wider one. Of parts it is summed and gathered, which sends less than the weight holds."""
    y = _dot(x, weight, spec, compute_dtype(x.dtype))
    if "k" in cut:
        y = jax.lax.psum(y, cut["k"])
    y = rounded(y, x.dtype)
    return jax.lax.all_gather(y, cut["n"], axis=y.ndim - 1, tiled=True) if "n" in cut else y


def _partial_norm(y, scale, dtype, spec, mean):
    width = scale.shape[0]
    return [_rms_norm.normalized(y[..., :width], scale, dtype, spec, mean).astype(dtype), y[..., width:].astype(dtype)]


def reference(x, weight, scale, *, spec, mean=last_mean, cut=()):
    y = _product(x, weight, spec, cut)
    return [*_partial_norm(y, scale, x.dtype, spec, mean), y.astype(x.dtype)]


def kernel(call, x, weight, scale, *, spec):
    rows, outputs, width = x.shape[:-1], weight.shape[not spec.transpose_b], scale.shape[0]
    [scale] = _rms_norm.kernel_scale(x, scale)
    options = dict(epsilon=spec.epsilon, scale_offset=spec.scale_offset, multiply_before_cast=spec.multiply_before_cast)
    results = [jax.ShapeDtypeStruct((*rows, n), x.dtype) for n in (width, outputs - width)]
    count, few = math.prod(rows), FEW_ROWS[call.launcher][spec.transpose_b][x.dtype.itemsize == 4]
    if isinstance(count, int) and count <= few:  # an exported batch size may be a symbol
        product = jax.ShapeDtypeStruct((*rows, outputs), x.dtype)
        return call("matmul_partial_rms_norm", [*results, product], x, weight, scale, transpose_b=spec.transpose_b, **options)
    if count == 1:  # XLA norms one row as fast
        return NotImplemented
    product = _product(x, weight, spec).astype(x.dtype)
    return [*call("partial_rms_norm", results, product, scale, **options), product]


def _jvp(primals, tangents, spec):
    """The derivative is that of a norm at the product, which is kept, and of the product, which is linear in each operand."""
    x, weight, scale = primals
    x_dot, weight_dot, scale_dot = tangents
    out = _OPS[spec.transpose_b].op.bind(*primals, spec=spec)
    *_, product = out
    moving = ((x_dot, (x_dot, weight)), (weight_dot, (x, weight_dot)))
    product_dot = sharding.tangent_of(product, *(_dot(*factors, spec, x.dtype) for of, factors in moving if type(of) is not ad.Zero))
    return out, [*AT_THE_PRODUCT.push((product, scale), (product_dot, scale_dot), out[:2], spec), product_dot]


def _at_the_product(y, scale, *, spec, mean=last_mean):
    return _partial_norm(y.astype(compute_dtype(y.dtype)), scale, y.dtype, spec, mean)


def _op(weight):
    # k is summed over, and n is cut where the normed outputs end
    return Op("matmul_partial_rms_norm", reference, operands=("*k", weight, "d"), results=("*d", "*m", "*n"), uncut="kn", joined="kn",
              kernel=kernel, jvp=_jvp)


_OPS = {True: _op("nk"), False: _op("kn")}
# Only its derivatives are used.
AT_THE_PRODUCT = Op("partial_rms_norm", _at_the_product, operands=("*n", "d"), results=("*d", "*m"), uncut="n")
