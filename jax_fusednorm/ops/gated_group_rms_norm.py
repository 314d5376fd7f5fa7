"""Gating and the RMSNorm of groups of channels."""

import dataclasses
import math
from typing import get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..core import checks, lowering, sharding
from ..core.numerics import compute_dtype, last_mean, rounded
from ..core.primitive import Op
from ..core.types import Activation, Implementation, Rounding
from . import norm_derivative


def gated_group_rms_norm(y: ArrayLike, gate: ArrayLike, scale: ArrayLike, *, group_size: int | None = None, epsilon: float = 1e-5,
                         norm_before_gate: bool = False, gate_start: int | None = None, activation: Activation = "silu",
                         rounding: Rounding = "storage", out_dtype: DTypeLike | None = None,
                         implementation: Implementation | None = None) -> jax.Array:
    """The root-mean-square normalization of each group of channels, gated (the tail of a Mamba-2 mixer and of its relatives).

    Equivalent to, with everything in float32 (float64 for float64 `y`)::

        groups = lambda a: a.reshape(*a.shape[:-1], -1, group_size)
        act = jax.nn.silu(gate)                             # activation="sigmoid": jax.nn.sigmoid(gate)
        v = groups(y) if norm_before_gate else groups(y * act)
        v = v * jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + epsilon)
        v = v.reshape(y.shape)                              # rounding="storage": then rounded to y's dtype
        out = v * scale * act if norm_before_gate else v * scale
        return out.astype(out_dtype)

    Args:
      y: [..., I] in float32, bfloat16 or float16.
      gate: [..., I] in any of these dtypes, whatever y's is; with gate_start [..., W], the fused projection that holds it.
      scale: [I] in any of these dtypes.
      group_size: static, a divisor of I; None: one group, the whole row.
      epsilon: static, finite, at least 0; added to the mean square. Kept in float32.
      norm_before_gate: static; False gates first (Mamba-2, Zamba2, Nemotron-H), True gates what is normalized (Qwen3-Next, Kimi-Linear).
      gate_start: static; None, or the column of `gate` where its I columns start. Kernels read a gate of y's dtype or float32
        in place, wherever it starts: nothing is copied. The cotangent has gate's full width, and zeros elsewhere.
      activation: static, "silu" or "sigmoid".
      rounding: static. "storage": what is normalized is rounded to y's dtype before the scale (Hugging Face); "float32": the
        result is rounded once (mamba_ssm).
      out_dtype: static, the result's dtype; None: y's.
      implementation: None for the default in force, or "auto", "jnp", "kernel", "host", "metal", "cuda".

    Returns:
      [..., I] in out_dtype.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Derivatives of every order and mode exist for y, gate and scale; roundings count as the identity.
    Formula: Dao and Gu, Transformers are SSMs, 2024, whose norm this is, in groups.
    """
    op = "gated_group_rms_norm"
    y = checks.activation(op, "y", y)
    width = y.shape[-1]
    gate_start = None if gate_start is None else checks.integer(op, "gate_start", gate_start)
    gate = _gate(op, checks.floats(op, "gate", gate), gate_start, y)
    scale = checks.scale(op, "scale", checks.array(op, "scale", scale), width)
    size = checks.divisor(op, "group_size", width if group_size is None else group_size, width, "the last axis of `y`")
    spec = Spec(
        epsilon=checks.real(op, "epsilon", epsilon, at_least=0),
        norm_before_gate=checks.flag(op, "norm_before_gate", norm_before_gate),
        gate_start=gate_start,
        activation=checks.option(op, "activation", activation, tuple(ACTIVATIONS)),
        rounding=checks.option(op, "rounding", rounding, get_args(Rounding)),
        out_dtype=checks.float_dtype(op, "out_dtype", y.dtype if out_dtype is None else out_dtype),
        implementation=lowering.requested(op, implementation))
    groups = width // size
    if gate_start is None:
        y_, scale, gate = sharding.splittable(groups, (y, scale, gate))
        [out] = GATED.bind(*(sharding.split_last(a, groups) for a in (y_, gate, scale)), spec=spec)
    else:
        y_, scale, gate = sharding.splittable(groups, (y, scale), (gate,))
        [out] = GATED_IN_PLACE.bind(sharding.split_last(y_, groups), gate, sharding.split_last(scale, groups), spec=spec)
    return sharding.merged_last(out, y)


ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


@dataclasses.dataclass(frozen=True)
class Spec:
    epsilon: float
    norm_before_gate: bool
    gate_start: int | None
    activation: str
    rounding: str
    out_dtype: str
    implementation: str


def _gate(op, gate, start, y):
    if start is None:
        wanted = y.shape
    else:
        wanted = (*y.shape[:-1], max(start + y.shape[-1], gate.shape[-1] if gate.ndim else 0))
    if gate.shape != wanted:
        least = "" if start is None else " or more columns"
        checks.fail(op, "gate", f"of shape {list(gate.shape)}", f"{list(wanted)}{least} was wanted, for `y` of {list(y.shape)}"
                    + ("" if start is None else f" and gate_start={start}"))
    return gate


def _columns(gate, y, spec, part=()):
    """The gate of y [..., groups, group_size], in its shape. part: which of the equal parts of all groups and of their channels y is."""
    if spec.gate_start is None:
        return gate
    whole = [n * part[axis][1] if axis in part else n for n, axis in zip(y.shape[-2:], "gd")]
    columns = jax.lax.slice_in_dim(gate, spec.gate_start, spec.gate_start + math.prod(whole), axis=-1).reshape(*gate.shape[:-1], *whole)
    for axis in part:
        n = y.shape["gd".index(axis) - 2]
        columns = jax.lax.dynamic_slice_in_dim(columns, part[axis][0] * n, n, axis="gd".index(axis) - 2)
    return columns


def _among_columns(part, gate, spec):
    """`part`, of y's shape, where _columns takes it from, and zeros in the rest of the gate."""
    if spec.gate_start is None:
        return part
    part = part.reshape(*part.shape[:-2], math.prod(part.shape[-2:]))
    after = gate.shape[-1] - spec.gate_start - part.shape[-1]
    return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(spec.gate_start, after)])


def reference(y, gate, scale, *, spec, mean=last_mean, part=()):
    wide = compute_dtype(y.dtype)
    act = ACTIVATIONS[spec.activation](_columns(gate, y, spec, part).astype(wide))
    v = y.astype(wide) if spec.norm_before_gate else y.astype(wide) * act
    v = v * jax.lax.rsqrt(mean(v * v) + spec.epsilon)
    if spec.rounding == "storage":
        v = rounded(v, y.dtype)
    v = v * scale.astype(wide)
    return [(v * act if spec.norm_before_gate else v).astype(spec.out_dtype)]


def _kernel_gate(y, gate, spec):
    """(the gate as the kernels take it, their attributes): in place where it is of y's dtype or float32, which holds any other exactly."""
    start = spec.gate_start
    if gate.dtype not in (y.dtype, jnp.float32):
        gate, start = _columns(gate, y, spec).astype(jnp.float32), None
    width = math.prod(y.shape[-2:]) if start is None else gate.shape[-1]
    return gate, dict(gate_width=width, gate_start=start or 0, silu=spec.activation == "silu", epsilon=spec.epsilon,
                      norm_first=spec.norm_before_gate)


def kernel(call, y, gate, scale, *, spec):
    gate, attributes = _kernel_gate(y, gate, spec)
    dtype = y.dtype if spec.out_dtype == y.dtype else jnp.float32
    scale = scale if scale.dtype == dtype else scale.astype(jnp.float32)
    [out] = call("gated_group_rms_norm", [jax.ShapeDtypeStruct(y.shape, dtype)], y, gate, scale, round_norm=spec.rounding == "storage", **attributes)
    return [out.astype(spec.out_dtype)]


def cotangent_kernel(call, y, gate, scale, out_bar, *, spec, active):
    kernel_gate, attributes = _kernel_gate(y, gate, spec)
    out_bar = out_bar if out_bar.dtype == y.dtype else out_bar.astype(jnp.float32)
    rows, groups, size = math.prod(y.shape[:-2]), *y.shape[-2:]
    most = max(1, norm_derivative.partial_rows(call.launcher, size * y.dtype.itemsize) // groups)
    blocks = rows if isinstance(rows, int) and rows < most else most  # an exported batch size may be a symbol
    y_bar, gate_bar, scale_bar = call(
        "gated_group_rms_norm_cotangent",
        [jax.ShapeDtypeStruct(y.shape, y.dtype), jax.ShapeDtypeStruct(y.shape, kernel_gate.dtype),
         jax.ShapeDtypeStruct((blocks, groups, size), jnp.float32)],
        y, kernel_gate, scale.astype(jnp.float32), out_bar, **attributes)
    results = (y_bar, _among_columns(gate_bar.astype(gate.dtype), gate, spec), jnp.sum(scale_bar, axis=0).astype(scale.dtype))
    return [r for r, wanted in zip(results, active) if wanted]


def _op(gate, **axes):
    return Op("gated_group_rms_norm", reference, operands=("*gd", gate, "gd"), results=("*gd",), kernel=kernel,
              cotangent_kernel=cotangent_kernel, **axes)


GATED = _op("*gd")
# The columns of a wider gate are not cut as those of y are: a device that has some of the groups needs the whole gate.
GATED_IN_PLACE = _op("*w", uncut="w", parted="gd")
