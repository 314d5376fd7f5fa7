"""RMSNorm over the last axis."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks, lowering
from ..core.numerics import compute_dtype, last_mean, rounded
from ..core.primitive import Op
from ..core.types import Implementation
from . import norm_derivative


def rms_norm(x: ArrayLike, scale: ArrayLike | None = None, *, epsilon: float = 1e-6, scale_offset: float = 0.0,
             multiply_before_cast: bool = True, implementation: Implementation | None = None) -> jax.Array:
    """Root-mean-square normalization of the last axis.

    Equivalent to, with everything in float32 (float64 for float64 `x`)::

        r = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
        y = (x * r * (scale + scale_offset)).astype(x.dtype)                                   # multiply_before_cast
        y = (x * r).astype(x.dtype) * (scale + scale_offset).astype(x.dtype)                   # else, in x's dtype

    Args:
      x: [..., D] in float32, bfloat16 or float16; any leading axes, none of which may be needed: zero rows are fine.
      scale: [D] in any of these dtypes, whatever x's is, or None to multiply by nothing.
      epsilon: static, finite, at least 0; added to the mean square, so in x's unit squared. Kept in float32.
      scale_offset: static; added to the scale in float32 (1.0 for the Gemma and Qwen3-Next families).
      multiply_before_cast: static; True rounds once, after the scale (Gemma); False rounds to x's dtype first and
        multiplies in it (Llama, Qwen3, DeepSeek).
      implementation: None for the default in force, or "auto", "jnp", "kernel", "host", "metal", "cuda".

    Returns:
      [..., D] in x's dtype.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Derivatives of every order and mode exist for x and scale; roundings count as the identity.
    Formula: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    op = "rms_norm"
    x = checks.activation(op, "x", x)
    scale = checks.scale(op, "scale", scale, x.shape[-1])
    spec = make_spec(Spec, op, scale, epsilon, scale_offset, multiply_before_cast, implementation)
    return RMS_NORM.bind(x, scale, spec=spec)[0]


@dataclasses.dataclass(frozen=True)
class Spec:
    epsilon: float
    scale_offset: float
    multiply_before_cast: bool
    implementation: str


def make_spec(spec_type, op, scale, epsilon, scale_offset, multiply_before_cast, implementation, **rest):
    """The options that every norm has, checked and folded into `spec_type`."""
    spec = spec_type(
        epsilon=checks.real(op, "epsilon", epsilon, at_least=0),
        scale_offset=checks.real(op, "scale_offset", scale_offset),
        multiply_before_cast=checks.flag(op, "multiply_before_cast", multiply_before_cast),
        implementation=lowering.requested(op, implementation), **rest)
    checks.no_offset_without_scale(op, scale, spec.scale_offset)
    return spec


def normalized(s, scale, dtype, spec, mean):
    """s * rsqrt(mean(s^2) + epsilon) * (scale + offset) in s's dtype, without its last rounding to `dtype`."""
    unit = s * jax.lax.rsqrt(mean(s * s) + spec.epsilon)
    if scale is None:
        return unit
    gain = scale.astype(s.dtype) + spec.scale_offset if spec.scale_offset else scale.astype(s.dtype)
    if not spec.multiply_before_cast:
        unit, gain = rounded(unit, dtype), rounded(gain, dtype)
    return unit * gain


def reference(x, scale=None, *, spec, mean=last_mean):
    return [normalized(x.astype(compute_dtype(x.dtype)), scale, x.dtype, spec, mean).astype(x.dtype)]


def kernel_scale(x, scale):
    """The scale as the kernels take it, if there is one: of x's dtype, or in float32, which holds any other exactly."""
    return [] if scale is None else [scale if scale.dtype == x.dtype else scale.astype(jnp.float32)]


def kernel(call, x, scale=None, *, spec):
    return call("rms_norm", [jax.ShapeDtypeStruct(x.shape, x.dtype)], x, *kernel_scale(x, scale),
                epsilon=spec.epsilon, scale_offset=spec.scale_offset,
                multiply_before_cast=spec.multiply_before_cast)


RMS_NORM = Op("rms_norm", reference, operands=("*d", "d"), results=("*d",), kernel=kernel,
              tangent_kernel=norm_derivative.tangent_kernel, cotangent_kernel=norm_derivative.cotangent_kernel)
