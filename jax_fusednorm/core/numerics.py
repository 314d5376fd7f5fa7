"""The casts that every reference is written with."""

import functools

import jax
import jax.numpy as jnp


def compute_dtype(dtype):
    """float32, or float64 for float64 storage: what statistics and products are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)  # promote_types fails under strict promotion


def constant(value):
    """An array that the package made itself, on the device: no transfer of the caller's, which is what jax.transfer_guard is about."""
    with jax.transfer_guard_host_to_device("allow"):
        return jnp.asarray(value)


def last_mean(v):
    """The mean over the last axis, kept as an axis of one. References take it as an argument: a sharded axis needs another."""
    return jnp.mean(v, axis=-1, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(v, dtype):
    """`v` rounded once to `dtype`, still in its own dtype. The derivative is the identity.

    Not a pair of casts: XLA may drop those as excess precision.
    """
    info = jnp.finfo(dtype)
    if info.bits >= jnp.finfo(v.dtype).bits:
        return v
    out = jax.lax.reduce_precision(v, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.nexp < jnp.finfo(v.dtype).nexp:
        # reduce_precision flushes float16's subnormals, which are whole multiples of the smallest one
        step = jnp.asarray(info.smallest_subnormal, v.dtype)
        tiny = jnp.abs(v) < jnp.asarray(info.tiny, v.dtype)
        out = jnp.where(tiny, jnp.round(v / step) * step, out)
    return out


@rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return rounded(primals[0], dtype), tangents[0]
