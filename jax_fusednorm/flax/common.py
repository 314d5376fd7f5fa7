"""What the nnx and linen modules share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import canonicalize_dtype
from jax.nn import initializers

from ..core import lowering
from ..ops.gated_group_rms_norm import gated_group_rms_norm
from ..ops.qk_rms_norm_rope import qk_rms_norm_rope

ONES = initializers.ones


# The default initializers are functions of this file, not closures made anew: so equal modules compare equal, and pickle.

def default_kernel_init(*args: Any, **kwargs: Any) -> jax.Array:
    """Flax's own for linear layers."""
    return initializers.lecun_normal()(*args, **kwargs)


def default_scale_init(*args: Any, **kwargs: Any) -> jax.Array:
    """Ones. As a module's scale_init it stands for what makes scale + scale_offset one: see `initial_scale`."""
    return ONES(*args, **kwargs)


def promote(dtype, scale, *arrays):
    """The arrays in the dtype that Flax would compute in: `dtype`, or where it is None what they and the scale promote to.

    The scale itself keeps its dtype: the ops take any, and a cast would be one more pass over it.
    """
    dtype = canonicalize_dtype(*arrays, scale, dtype=dtype)
    return [jnp.asarray(a, dtype) for a in arrays]


def initial_scale(scale_init, scale_offset):
    """The initializer asked for, or one that makes scale + scale_offset one."""
    return initializers.constant(1.0 - scale_offset) if scale_init in (None, default_scale_init) else scale_init


def checked_implementation(module, value):
    """What a module is told, refused where it is written and not where it is called."""
    if value is not None:
        lowering.requested(type(module).__name__, value)
    return value


def gated(module, scale, y, gate):
    """What a GatedGroupRMSNorm computes. The gate keeps its dtype: the op takes any beside y's."""
    y, = promote(module.dtype, scale, y)
    return gated_group_rms_norm(
        y, gate, scale, group_size=module.group_size, epsilon=module.epsilon, norm_before_gate=module.norm_before_gate,
        gate_start=module.gate_start, activation=module.activation, rounding=module.rounding, implementation=module.implementation)


def rotated(module, scales, q, k, positions, freq_factors, freqs_cis, **columns):
    """What a QKNormRope computes. columns: where a fused projection, as q, has what."""
    q, *given = promote(module.dtype, scales[0], *(a for a in (q, k) if a is not None))
    k = given[0] if given else None
    return qk_rms_norm_rope(
        q, k, *scales, positions, theta=module.theta, rope_dim=module.rope_dim, style=module.style, placement=module.placement,
        freq_factors=freq_factors, freqs_cis=freqs_cis, epsilon=module.epsilon, scale_offset=module.scale_offset,
        multiply_before_cast=module.multiply_before_cast, round_before_rope=module.round_before_rope, implementation=module.implementation, **columns)


def has_kernel(module, x, mask):
    """Whether the op computes what Flax's module is set to: the last axis alone, no mask, no mean over devices."""
    def last(axes):
        return tuple(np.atleast_1d(axes)) in ((-1,), (jnp.ndim(x) - 1,))
    return (last(module.reduction_axes) and last(module.feature_axes) and mask is None and module.axis_name is None
            and not jnp.iscomplexobj(x))


def check_flax_path(module):
    """Flax's own path knows none of the options that it has not."""
    if module.scale_offset or not module.multiply_before_cast or module.implementation not in (None, "auto", "jnp"):
        raise ValueError(
            "RMSNorm: `scale_offset`, `multiply_before_cast=False` and a kernel asked for by `implementation` need the last "
            "axis as the only reduction and feature axis, and no mask or axis_name: leave them at their defaults.")
