"""Argument checks. Every message names the op, the argument, what came, what was wanted and what to do."""

import math

import jax
import jax.numpy as jnp
import numpy as np

STORAGE = ("float32", "bfloat16", "float16")
FLOAT32_MAX = float(np.finfo(np.float32).max)


def fail(op, argument, got, wanted):
    raise ValueError(f"{op}: `{argument}` is {got}, but {wanted}.")


def _dtype_is(array, names):
    return array.dtype.name in names


def array(op, argument, value):
    """`value` as a JAX array. A traced value is passed on as it is: converting it again can lose its sharding."""
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        fail(op, argument, f"a {type(value).__name__}", f"an array was wanted: {error}")


def exact(op, argument, value, kind):
    """`value` as a JAX array, or if of `kind` (jnp.integer, jnp.floating) as one of NumPy with all its bits, of which JAX may keep half."""
    if isinstance(value, jax.Array):
        return value
    try:
        found = np.asarray(value)
    except (TypeError, ValueError):  # traced values in a list
        return array(op, argument, value)
    return found if jnp.issubdtype(found.dtype, kind) else array(op, argument, value)


def floats(op, argument, value):
    """An array in float32, bfloat16 or float16 (or float64 under x64)."""
    value = array(op, argument, value)
    if not _dtype_is(value, (*STORAGE, "float64")):
        fail(op, argument, f"{value.dtype}", f"one of {', '.join(STORAGE)} was wanted: cast it with `.astype`")
    return value


def activation(op, argument, value):
    """A float array [..., D] with D >= 1."""
    value = floats(op, argument, value)
    if value.ndim == 0:
        fail(op, argument, "a scalar", "at least one axis was wanted, the last of which is normalized: reshape it to [1] or more")
    if value.shape[-1] == 0:
        fail(op, argument, f"of shape {list(value.shape)}", "the last axis is the one normalized and must hold at least one element")
    return value


def heads(op, argument, value):
    """An activation [..., T, H, D]."""
    value = activation(op, argument, value)
    if value.ndim < 3:
        fail(op, argument, f"of shape {list(value.shape)}", "[..., T, H, D] was wanted, tokens, heads and channels: reshape it")
    return value


def query_heads(op, queries, keys, *arrays):
    """Of attention, each head of keys serves as many of queries. Inside shard_map a device may have any of them."""
    if keys and queries % keys and not any(jax.typeof(a).mat.varying for a in arrays):
        swapped = "; are the two swapped?" if queries < keys else ""
        fail(op, "q", f"of {queries} heads beside {keys} of keys", f"a multiple of the keys' {keys} was wanted{swapped}")


def like(op, argument, value, first_argument, first):
    """An array of the same shape and dtype as `first`."""
    value = array(op, argument, value)
    for what, got, wanted in (("dtype", value.dtype, first.dtype), ("shape", value.shape, first.shape)):
        if got != wanted:
            wanted = list(wanted) if what == "shape" else wanted
            got = list(got) if what == "shape" else got
            fail(op, argument, f"of {what} {got}", f"the {what} of `{first_argument}`, {wanted}, was wanted: "
                 + ("cast one of the two" if what == "dtype" else "broadcast or reshape one of the two"))
    return value


def scale(op, argument, value, width):
    """A float array [width], or None."""
    if value is None:
        return None
    value = floats(op, argument, value)
    if value.shape != (width,):
        fail(op, argument, f"of shape {list(value.shape)}", f"shape [{width}] was wanted, one value per normalized element")
    return value


def real(op, argument, value, at_least=-math.inf):
    """A static number that is finite in the float32 the kernels get."""
    if isinstance(value, jax.core.Tracer):
        fail(op, argument, "a traced value", "a static number was wanted: pass a Python float, or mark it static in `jax.jit`")
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("float() would read a number from it")
        value = float(value)
    except (TypeError, ValueError):
        fail(op, argument, f"{value!r}", "a number was wanted")
    if not max(at_least, -FLOAT32_MAX) <= value <= FLOAT32_MAX:  # nan fails too
        bound = f" and at least {at_least}" if at_least > -math.inf else ""
        fail(op, argument, f"{value}", f"a number finite in float32{bound} was wanted")
    return value


def flag(op, argument, value):
    if not isinstance(value, (bool, np.bool_)):
        fail(op, argument, f"{value!r}", "True or False was wanted")
    return bool(value)


def integer(op, argument, value, at_least=0):
    """A static integer."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < at_least:
        fail(op, argument, f"{value!r}", f"a static integer of at least {at_least} was wanted")
    return int(value)


def int32(op, argument, value, shape, what):
    """Integers of `shape`, in which None is any number, as int32: those beyond it count as its ends."""
    value = exact(op, argument, value, jnp.integer)
    if not jnp.issubdtype(value.dtype, jnp.integer) or len(value.shape) != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape)):
        fail(op, argument, f"{value.dtype}{list(value.shape)}", f"integers of shape {['any' if n is None else n for n in shape]} were wanted, {what}")
    return clipped(value)


def clipped(value):
    """Integers as int32, of which those beyond it become its ends."""
    ends, own = jnp.iinfo(jnp.int32), jnp.iinfo(value.dtype)
    if own.max > ends.max:
        value = value.clip(max(own.min, ends.min), ends.max)
    return jnp.asarray(value.astype(jnp.int32))


def divisor(op, argument, value, width, of):
    """A static integer that divides `width`."""
    value = integer(op, argument, value, at_least=1)
    if width % value:
        fail(op, argument, f"{value}", f"a divisor of {width}, {of}, was wanted")
    return value


def float_dtype(op, argument, value):
    """The name of a float dtype."""
    try:
        name = jnp.dtype(value).name
    except TypeError:
        name = repr(value)
    return option(op, argument, name, (*STORAGE, "float64") if jax.config.jax_enable_x64 else STORAGE)


def option(op, argument, value, choices):
    if not isinstance(value, str) or value not in choices:
        fail(op, argument, f"{value!r}", f"one of {', '.join(map(repr, choices))} was wanted")
    return value


def no_offset_without_scale(op, scale, scale_offset):
    if scale is None and scale_offset:
        fail(op, "scale_offset", f"{scale_offset}", "it needs a scale to be added to: pass `scale`, or leave it 0")
