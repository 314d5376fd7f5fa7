"""Residual addition and the RMSNorm of the sum."""

import dataclasses
import functools
from typing import Literal, get_args, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks, sharding
from ..core.numerics import compute_dtype, last_mean, rounded
from ..core.primitive import Op
from ..core.types import Implementation, Rounding
from . import norm_derivative, rms_norm as _rms_norm


@overload
def add_rms_norm(x: ArrayLike, residual: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, sum_rounding: Rounding = "float32", return_sum: Literal[True] = True,
                 implementation: Implementation | None = None) -> tuple[jax.Array, jax.Array]: ...


@overload
def add_rms_norm(x: ArrayLike, residual: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, sum_rounding: Rounding = "float32", return_sum: Literal[False],
                 implementation: Implementation | None = None) -> jax.Array: ...


@overload
def add_rms_norm(x: ArrayLike, residual: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, sum_rounding: Rounding = "float32", return_sum: bool,
                 implementation: Implementation | None = None) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def add_rms_norm(x: ArrayLike, residual: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6, scale_offset: float = 0.0,
                 multiply_before_cast: bool = True, sum_rounding: Rounding = "float32", return_sum: bool = True,
                 implementation: Implementation | None = None) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The sum of two activations, and its root-mean-square normalization.

    Equivalent to, with everything in float32 (float64 for float64 `x`)::

        s = x + residual                                    # sum_rounding="storage": then rounded to x's dtype
        normed = rms_norm(s, scale)                         # from this s, rounded as rms_norm's options say
        return normed, s.astype(x.dtype)

    Args:
      x, residual: [..., D], of one shape and dtype: float32, bfloat16 or float16.
      scale: [D] in any of these dtypes, or None to multiply by nothing.
      epsilon, scale_offset, multiply_before_cast: as in `rms_norm`.
      sum_rounding: static. "float32": the norm sees the unrounded sum (MAX, FlashInfer, mlx-native). "storage": the norm
        sees the sum as returned (Hugging Face, vLLM, mlx-lm); the backward pass then keeps one activation, the sum,
        instead of both operands.
      return_sum: static; False returns the norm alone and does not write the sum.
      implementation: None for the default in force, or "auto", "jnp", "kernel", "host", "metal", "cuda".

    Returns:
      (normed, sum), both [..., D] in x's dtype, or normed alone.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Derivatives of every order and mode exist for x, residual and scale; roundings count as the identity.
    """
    op = "add_rms_norm"
    x = checks.activation(op, "x", x)
    residual = checks.like(op, "residual", residual, "x", x)
    scale = checks.scale(op, "scale", scale, x.shape[-1])
    spec = _rms_norm.make_spec(
        Spec, op, scale, epsilon, scale_offset, multiply_before_cast, implementation,
        sum_rounding=checks.option(op, "sum_rounding", sum_rounding, get_args(Rounding)),
        return_sum=checks.flag(op, "return_sum", return_sum))
    out = ADD_RMS_NORM.bind(x, residual, scale, spec=spec)
    return tuple(out) if spec.return_sum else out[0]


@dataclasses.dataclass(frozen=True)
class Spec(_rms_norm.Spec):
    sum_rounding: str
    return_sum: bool


def reference(x, residual, scale=None, *, spec, mean=last_mean):
    s = x.astype(compute_dtype(x.dtype)) + residual.astype(compute_dtype(x.dtype))
    if spec.sum_rounding == "storage":
        s = rounded(s, x.dtype)
    normed = _rms_norm.normalized(s, scale, x.dtype, spec, mean).astype(x.dtype)
    return [normed, s.astype(x.dtype)] if spec.return_sum else [normed]


def kernel(call, x, residual, scale=None, *, spec):
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return call("add_rms_norm", [like_x] * (1 + spec.return_sum), x, residual, *_rms_norm.kernel_scale(x, scale),
                epsilon=spec.epsilon, scale_offset=spec.scale_offset,
                multiply_before_cast=spec.multiply_before_cast, round_sum=spec.sum_rounding == "storage")


def _jvp_at_the_sum(primals, tangents, spec):
    """With the sum rounded first, the derivative is that of a plain norm at the sum, the one activation kept."""
    if spec.sum_rounding != "storage":
        return NotImplemented
    (x_dot, residual_dot, *scale_dot), scale = tangents, primals[2:]
    normed, total = ADD_RMS_NORM.op.bind(*primals, spec=dataclasses.replace(spec, return_sum=True))
    out = [normed, total][:1 + spec.return_sum]
    total_dot = sharding.tangent_of(total, x_dot, residual_dot)
    op = NORM_AND_INPUT if spec.return_sum else _rms_norm.RMS_NORM
    return out, op.push((total, *scale), (total_dot, *scale_dot), out, spec)


def _norm_and_input(s, scale=None, *, spec, mean=last_mean):
    wide = s.astype(compute_dtype(s.dtype))  # both results come from it, so that their cotangents are added before they are rounded
    return [_rms_norm.normalized(wide, scale, s.dtype, spec, mean).astype(s.dtype), wide.astype(s.dtype)]


ADD_RMS_NORM = Op("add_rms_norm", reference, operands=("*d", "*d", "d"), results=("*d", "*d"), kernel=kernel,
                  tangent_kernel=functools.partial(norm_derivative.tangent_kernel, points=2),
                  cotangent_kernel=functools.partial(norm_derivative.cotangent_kernel, points=2), jvp=_jvp_at_the_sum)
# add_rms_norm seen from its own sum: only its derivatives are used.
NORM_AND_INPUT = Op("rms_norm_and_input", _norm_and_input, operands=("*d", "d"), results=("*d", "*d"),
                    tangent_kernel=norm_derivative.tangent_kernel, cotangent_kernel=norm_derivative.cotangent_kernel)
