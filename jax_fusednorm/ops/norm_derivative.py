"""The kernels that every norm's tangent and cotangent share.

At s = x (+ residual), with r = rsqrt(mean(s^2) + epsilon), gain = scale + offset and D elements a row, the linear map
J v = r v - s r^3 / D sum(s v) is symmetric, so that

    tangent    normed' = gain * J s' + s r gain'        sum' = s'
    cotangent  s~ = J (gain * normed~) + sum~           gain~ = sum over rows of normed~ s r

Roundings count as the identity: float32 inside, one rounding for each result. Source: differentiation of the formula.
"""

import math

import jax
import jax.numpy as jnp


def partial_rows(launcher, row_bytes):
    """Rows of partial scale gradients: one for each team that works at the same time, so few that adding them up costs little."""
    if launcher == "cuda":  # 512 threads on each of the 132 multiprocessors of an H100 or H200, in the teams of launch/shape.h
        return 132 * 16 // min(16, 1 << ((row_bytes - 1) // 1024).bit_length())
    return 64  # enough for every core


def _gain(scale, width, spec):
    return jnp.ones(width, jnp.float32) if scale is None else scale.astype(jnp.float32) + spec.scale_offset


def _split(args, active, points):
    """args -> (x [, residual]), scale or None, what follows the operands."""
    n = len(active)
    return args[:points], args[points] if n > points else None, args[n:]


def tangent_kernel(call, *args, spec, active, points=1):
    at, scale, tangents = _split(args, active, points)
    x, width = at[0], at[0].shape[-1]
    moving = tangents[:sum(active[:points])]
    if len(moving) == 2 and x.dtype.itemsize < 4:
        return NotImplemented  # their sum would be rounded before it is used
    s_dot = sum(moving) if moving else jnp.zeros_like(x)
    gain_dot = [tangents[-1].astype(jnp.float32)] if any(active[points:]) else []
    [normed_dot] = call("rms_norm_tangent", [jax.ShapeDtypeStruct(x.shape, x.dtype)],
                        *at, s_dot, _gain(scale, width, spec), *gain_dot,
                        epsilon=spec.epsilon, has_residual=points == 2)
    return [normed_dot, s_dot] if getattr(spec, "return_sum", False) else [normed_dot]


def cotangent_kernel(call, *args, spec, active, points=1):
    at, scale, cotangents = _split(args, active, points)
    x, width = at[0], at[0].shape[-1]
    rows, most = math.prod(x.shape[:-1]), partial_rows(call.launcher, width * x.dtype.itemsize)
    teams = rows if isinstance(rows, int) and rows < most else most  # an exported batch size may be a symbol
    partials = jax.ShapeDtypeStruct((teams, width), jnp.float32)
    wants_scale = any(active[points:])
    s_bar, *gain_bar = call("rms_norm_cotangent", [jax.ShapeDtypeStruct(x.shape, x.dtype), *[partials] * wants_scale],
                            *at, *cotangents, _gain(scale, width, spec),
                            epsilon=spec.epsilon, has_residual=points == 2, has_sum=len(cotangents) == 2)
    return [s_bar] * sum(active[:points]) + [jnp.sum(p, axis=0).astype(scale.dtype) for p in gain_bar]
