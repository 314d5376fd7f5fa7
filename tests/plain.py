"""Plain jnp formulas for JAX to differentiate, and arrays to feed them. Nothing here knows the package."""

import jax.numpy as jnp
import numpy as np

# Every pair of scale options; without a scale there is no offset.
OPTIONS = tuple(dict(multiply_before_cast=m, scale_offset=o) for m in (True, False) for o in (0.0, 1.0))
NO_SCALE_OPTIONS = tuple(o for o in OPTIONS if not o["scale_offset"])


def options_for(scale_dtype):
    return NO_SCALE_OPTIONS if scale_dtype is None else OPTIONS


def _unrounded(s, scale, dtype, epsilon, scale_offset, multiply_before_cast):
    value = s / jnp.sqrt(jnp.mean(s * s, axis=-1, keepdims=True) + epsilon)
    if scale is None:
        return value
    factor = scale.astype(s.dtype) + scale_offset
    if multiply_before_cast:
        return value * factor
    return value.astype(dtype).astype(s.dtype) * factor.astype(dtype).astype(s.dtype)


def _norm(s, scale, dtype, *options):
    return _unrounded(s, scale, dtype, *options).astype(dtype)


def rms_norm(x, scale=None, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True):
    wider = jnp.promote_types(x.dtype, jnp.float32)
    return _norm(x.astype(wider), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)


def add_rms_norm(x, residual, scale=None, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True,
                 sum_rounding="float32"):
    wider = jnp.promote_types(x.dtype, jnp.float32)
    s = x.astype(wider) + residual.astype(wider)
    stored = s.astype(x.dtype)
    s = s if sum_rounding == "float32" else stored.astype(wider)
    return _norm(s, scale, x.dtype, epsilon, scale_offset, multiply_before_cast), stored


def rms_norm_add(x, residual, scale=None, *, epsilon=1e-6, scale_offset=0.0, multiply_before_cast=True,
                 norm_rounding="float32"):
    wider = jnp.promote_types(x.dtype, jnp.float32)
    norm = _unrounded(x.astype(wider), scale, x.dtype, epsilon, scale_offset, multiply_before_cast)
    if norm_rounding == "storage":
        norm = norm.astype(x.dtype).astype(wider)
    return (residual.astype(wider) + norm).astype(x.dtype)


def gated_group_rms_norm(y, gate, scale, *, group_size=None, epsilon=1e-5, norm_before_gate=False, gate_start=None, activation="silu"):
    wider, size = jnp.promote_types(y.dtype, jnp.float32), group_size or y.shape[-1]
    start = gate_start or 0
    g = gate[..., start:start + y.shape[-1]].astype(wider)
    act = 1 / (1 + jnp.exp(-g)) * (g if activation == "silu" else 1)
    v = y.astype(wider) * (1 if norm_before_gate else act)
    grouped = v.reshape(*v.shape[:-1], -1, size)
    v = (grouped / jnp.sqrt(jnp.mean(grouped * grouped, axis=-1, keepdims=True) + epsilon)).reshape(v.shape).astype(y.dtype).astype(wider)
    return (v * scale.astype(wider) * (act if norm_before_gate else 1)).astype(y.dtype)


def matmul_partial_rms_norm(x, weight, scale, *, transpose_b=True, **options):
    wider = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.einsum("...k,nk->...n" if transpose_b else "...k,kn->...n", x.astype(wider), weight.astype(wider), precision="highest").astype(x.dtype)
    return rms_norm(y[..., :len(scale)], scale, **options), y[..., len(scale):]


def _values(seed, shape, spread=0.0):
    rng = np.random.default_rng([seed, *shape])
    values = rng.standard_normal(shape)
    if spread:
        values = values * 10.0 ** rng.uniform(-spread, spread, (*shape[:-1], 1))
    return values.astype(np.float32)


def draw(seed, shape, dtype="float32", *, spread=0.0):
    """Normal values; `spread` gives each row a size of its own, between 10**-spread and 10**spread."""
    # cast by numpy: jnp would compile a cast for every shape
    return jnp.asarray(_values(seed, shape, spread).astype(jnp.dtype(dtype)))


def draw_scale(seed, width, dtype):
    return None if dtype is None else jnp.asarray((0.75 + 0.5 * _values(seed, (width,))).astype(jnp.dtype(dtype)))


def placed(array, offset):
    """A copy of `array` that starts `offset` bytes after a 64-byte boundary, among bytes that are nan as any dtype."""
    memory = np.full(array.nbytes + 128, 0xff, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    view = memory[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view
