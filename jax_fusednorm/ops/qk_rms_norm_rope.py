"""RMSNorm and rotary position embedding of queries and keys in one call."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks, rope, sharding
from ..core.numerics import compute_dtype, last_mean
from ..core.primitive import Op
from ..core.types import Implementation, Placement, Style
from . import head_rms_norm_rope as _heads
from . import rms_norm as _rms_norm


def qk_rms_norm_rope(q: ArrayLike, k: ArrayLike, q_scale: ArrayLike | None, k_scale: ArrayLike | None, positions: ArrayLike | None, *,
                     theta: float = 10000.0, rope_dim: int | None = None, style: Style = "neox",
                     placement: Placement = "prefix", freq_factors: ArrayLike | None = None, freqs_cis: ArrayLike | None = None,
                     epsilon: float = 1e-6, scale_offset: float = 0.0, multiply_before_cast: bool = True, round_before_rope: bool | None = None,
                     implementation: Implementation | None = None) -> tuple[jax.Array, jax.Array]:
    """`head_rms_norm_rope` of queries and of keys, with one computation of the angles.

    Equivalent to::

        head_rms_norm_rope(q, q_scale, positions, ...), head_rms_norm_rope(k, k_scale, positions, ...)

    Args:
      q: [..., T, Hq, D] in float32, bfloat16 or float16.
      k: [..., T, Hk, D] in q's dtype.
      q_scale, k_scale: [D] each in any of these dtypes, or None to multiply by nothing.
      positions and the options: as in `head_rms_norm_rope`.

    Returns:
      (q, k), of the shapes and dtype of the arguments.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Derivatives of every order and mode exist for q, k, the scales and freqs_cis; roundings count as the identity.
    Formulas: as in `head_rms_norm_rope`. The model families that norm each head of queries and keys: Qwen3, Gemma 3.
    """
    op = "qk_rms_norm_rope"
    q, k = checks.heads(op, "q", q), checks.heads(op, "k", k)
    for what, got, wanted in (("dtype", k.dtype, q.dtype), ("shape", (*k.shape[:-2], k.shape[-1]), (*q.shape[:-2], q.shape[-1]))):
        if got != wanted:
            checks.fail(op, "k", f"of {what} {getattr(k, what)}", f"q has {what} {getattr(q, what)}, and the two may differ in their heads alone")
    width = q.shape[-1]
    scales = [checks.scale(op, f"{name}_scale", scale, width) for name, scale in (("q", q_scale), ("k", k_scale))]
    options, frequencies = _heads.make_options(op, width, theta, rope_dim, style, placement, freq_factors, freqs_cis, multiply_before_cast,
                                               round_before_rope)
    given = [s for s in scales if s is not None]
    spec = _rms_norm.make_spec(_heads.Rotation, op, given[0] if len(given) == 2 else None, epsilon, scale_offset, multiply_before_cast,
                               implementation, **options)
    if len(given) == 1:  # the primitive knows both or neither
        scales = [jnp.ones(width, given[0].dtype) if s is None else s for s in scales]
    q, k = sharding.whole(q), sharding.whole(k)
    return tuple(QK_RMS_NORM_ROPE.bind(q, k, _heads.checked_positions(op, positions, q, frequencies), frequencies, *scales, spec=spec))


def reference(q, k, positions, frequencies, q_scale=None, k_scale=None, *, spec, mean=last_mean):
    angles = rope.cos_sin(positions, frequencies, compute_dtype(q.dtype))
    return [_heads.normed_and_rotated(x, scale, *angles, spec, mean).astype(x.dtype) for x, scale in ((q, q_scale), (k, k_scale))]


def kernel(call, q, k, positions, frequencies, q_scale=None, k_scale=None, *, spec):
    scales = [] if q_scale is None else _heads.kernel_scales(q, q_scale, k_scale)
    return call("head_rms_norm_rope", [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)], q, positions, frequencies, k, *scales,
                **_heads.kernel_attributes(spec, has_k=True))


QK_RMS_NORM_ROPE = Op("qk_rms_norm_rope", reference, operands=("*thd", "*tgd", "*t", "pc", "d", "d"), results=("*thd", "*tgd"),
                      whole="", uncut="d", kernel=kernel)
