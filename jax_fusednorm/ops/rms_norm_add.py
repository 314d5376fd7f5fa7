"""RMSNorm and the addition of its residual."""

import dataclasses
from typing import get_args

import jax
from jax.typing import ArrayLike

from ..core import checks, sharding
from ..core.numerics import compute_dtype, last_mean, rounded
from ..core.primitive import Op
from ..core.types import Implementation, Rounding
from . import rms_norm as _rms_norm


def rms_norm_add(x: ArrayLike, residual: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, norm_rounding: Rounding = "float32", implementation: Implementation | None = None) -> jax.Array:
    """The root-mean-square normalization of a branch, added to the residual stream (the post-norms of the Gemma family).

    Equivalent to, with everything in float32 (float64 for float64 `x`)::

        normed = rms_norm(x, scale)       # as rms_norm's options say; norm_rounding="float32": without its last rounding
        return (residual + normed).astype(x.dtype)

    Args:
      x: the branch, [..., D] in float32, bfloat16 or float16.
      residual: the stream, of x's shape and dtype. It is added, not normalized.
      scale: [D] in any of these dtypes, or None to multiply by nothing.
      epsilon, scale_offset, multiply_before_cast: as in `rms_norm`.
      norm_rounding: static. "float32": one rounding, after the addition (mlx-native). "storage": the norm is rounded to x's
        dtype first (Hugging Face).
      implementation: None for the default in force, or "auto", "jnp", "kernel", "host", "metal", "cuda".

    Returns:
      [..., D] in x's dtype.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Derivatives of every order and mode exist for x, residual and scale; roundings count as the identity. The backward pass
    keeps x and the scale.
    """
    op = "rms_norm_add"
    x = checks.activation(op, "x", x)
    residual = checks.like(op, "residual", residual, "x", x)
    scale = checks.scale(op, "scale", scale, x.shape[-1])
    spec = _rms_norm.make_spec(Spec, op, scale, epsilon, scale_offset, multiply_before_cast, implementation,
                               norm_rounding=checks.option(op, "norm_rounding", norm_rounding, get_args(Rounding)))
    return RMS_NORM_ADD.bind(x, residual, scale, spec=spec)[0]


@dataclasses.dataclass(frozen=True)
class Spec(_rms_norm.Spec):
    norm_rounding: str


def reference(x, residual, scale=None, *, spec, mean=last_mean):
    wide = compute_dtype(x.dtype)
    norm = _rms_norm.normalized(x.astype(wide), scale, x.dtype, spec, mean)
    if spec.norm_rounding == "storage":
        norm = rounded(norm, x.dtype)
    return [(residual.astype(wide) + norm).astype(x.dtype)]


def kernel(call, x, residual, scale=None, *, spec):
    return call("rms_norm_add", [jax.ShapeDtypeStruct(x.shape, x.dtype)], x, residual, *_rms_norm.kernel_scale(x, scale),
                epsilon=spec.epsilon, scale_offset=spec.scale_offset, multiply_before_cast=spec.multiply_before_cast,
                round_norm=spec.norm_rounding == "storage")


def _jvp(primals, tangents, spec):
    """The residual passes its tangent on; the rest is the norm's own derivative."""
    x, _, *scale = primals
    x_dot, residual_dot, *scale_dot = tangents
    out = RMS_NORM_ADD.op.bind(*primals, spec=spec)
    [norm_dot] = _rms_norm.RMS_NORM.push((x, *scale), (x_dot, *scale_dot), out, spec)
    return out, [sharding.tangent_of(out[0], norm_dot, residual_dot)]


RMS_NORM_ADD = Op("rms_norm_add", reference, operands=("*d", "*d", "d"), results=("*d",), kernel=kernel, jvp=_jvp)
