"""RMSNorm and rotary position embedding of queries and keys in one call."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..core import checks, rope, sharding
from ..core.numerics import compute_dtype, last_mean
from ..core.primitive import Op
from . import head_derivative
from . import head_rms_norm_rope as _heads
from . import rms_norm as _rms_norm


def qk_rms_norm_rope(q, k, q_scale, k_scale, positions, *, num_heads=None, num_kv_heads=None, q_start=0, k_start=None, v_start=None,
                     theta=10000.0, rope_dim=None, style="neox", placement="prefix", freq_factors=None, freqs_cis=None, epsilon=1e-6,
                     scale_offset=0.0, multiply_before_cast=True, round_before_rope=None, implementation=None):
    """`head_rms_norm_rope` of queries and of keys, with one computation of the angles.

    Equivalent to::

        head_rms_norm_rope(q, q_scale, positions, ...), head_rms_norm_rope(k, k_scale, positions, ...)

    or, of a fused projection, which is given as `q`, with None as `k`::

        columns = lambda start, heads: q[..., start:start + heads * D].reshape(*q.shape[:-1], heads, D)
        (head_rms_norm_rope(columns(q_start, num_heads), q_scale, positions, ...),
         head_rms_norm_rope(columns(k_start, num_kv_heads), k_scale, positions, ...),
         columns(v_start, num_kv_heads))                                                      # where v_start is given

    Args:
      q: [..., T, Hq, D] in float32, bfloat16 or float16; or [..., T, W], a fused projection of queries, keys and perhaps values, which
        a kernel reads in place and whose gradient it writes whole, zeros beside these columns.
      k: [..., T, Hk, D] in q's dtype; or None.
      q_scale, k_scale: [D] each in any of these dtypes, or None to multiply by nothing. Of a fused projection one at least is needed: it
        tells D.
      positions and the options below: as in `head_rms_norm_rope`.
      num_heads, num_kv_heads: static, with a fused projection only: how many heads of queries, and of keys (and values), it holds.
      q_start, k_start, v_start: static, with a fused projection only: the columns where queries, keys and values start; without v_start
        there are no values.

    Returns:
      (q, k), of the shapes and dtype of the arguments. Of a fused projection (q [..., T, num_heads, D], k [..., T, num_kv_heads, D]), or
      with v_start (q, k, v): values are as they were.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Derivatives of every order and mode exist for q, k, the scales and freqs_cis; roundings count as the identity.
    Formulas: as in `head_rms_norm_rope`. The model families that norm each head of queries and keys: Qwen3, Gemma 3.
    """
    op = "qk_rms_norm_rope"
    given = [s for s in (q_scale, k_scale) if s is not None]
    packed = k is None
    if packed:
        q = checks.activation(op, "q", q)
        columns = _columns(op, q, given, num_heads, num_kv_heads, q_start, k_start, v_start)
        checks.query_heads(op, columns["num_heads"], columns["num_kv_heads"], q)
        width = columns["width"]
    else:
        columns = {}
        for argument, value, default in (("num_heads", num_heads, None), ("num_kv_heads", num_kv_heads, None), ("q_start", q_start, 0),
                                         ("k_start", k_start, None), ("v_start", v_start, None)):
            if value != default:
                checks.fail(op, argument, f"{value!r}", "it goes with a fused projection, [..., T, W] as `q` and None as `k`: leave it out")
        q, k = checks.heads(op, "q", q), checks.heads(op, "k", k)
        for what, got, wanted in (("dtype", k.dtype, q.dtype), ("shape", (*k.shape[:-2], k.shape[-1]), (*q.shape[:-2], q.shape[-1]))):
            if got != wanted:
                checks.fail(op, "k", f"of {what} {getattr(k, what)}", f"q has {what} {getattr(q, what)}, and the two may differ in their heads alone")
        checks.query_heads(op, q.shape[-2], k.shape[-2], q, k)
        width = q.shape[-1]
    scales = [checks.scale(op, f"{name}_scale", scale, width) for name, scale in (("q", q_scale), ("k", k_scale))]
    options, frequencies = _heads.make_options(op, width, theta, rope_dim, style, placement, freq_factors, freqs_cis, multiply_before_cast,
                                               round_before_rope)
    given = [s for s in scales if s is not None]
    spec = _rms_norm.make_spec(Packed if packed else _heads.Rotation, op, given[0] if len(given) == 2 else None, epsilon, scale_offset,
                               multiply_before_cast, implementation, **options, **columns)
    if len(given) == 1:  # the primitive knows both or neither
        scales = [jnp.ones(width, given[0].dtype) if s is None else s for s in scales]
    q = sharding.whole(q)
    positions = _heads.checked_positions(op, positions, q, frequencies, after=1 if packed else 2)
    if packed:
        return tuple(PACKED.bind(q, positions, frequencies, *scales, spec=spec))
    k = sharding.whole(k)
    if not sharding.cut_alike(q, k):  # so that in shard_map over the heads of one the other's result is known to be the same on all devices
        alone = _heads.Spec(**dataclasses.asdict(spec))
        return tuple(_heads.HEAD_RMS_NORM_ROPE.bind(x, _heads.checked_positions(op, positions, x, frequencies), frequencies, scale, spec=alone)[0]
                     for x, scale in zip((q, k), scales))
    return tuple(QK_RMS_NORM_ROPE.bind(q, k, positions, frequencies, *scales, spec=spec))


@dataclasses.dataclass(frozen=True)
class Packed(_heads.Rotation):
    """Where a fused projection has what."""

    width: int
    num_heads: int
    num_kv_heads: int
    q_start: int
    k_start: int
    v_start: int | None

    def parts(self):
        """(start, heads) of queries, keys and values."""
        values = () if self.v_start is None else ((self.v_start, self.num_kv_heads),)
        return (self.q_start, self.num_heads), (self.k_start, self.num_kv_heads), *values

    def starts(self):
        return [start for start, _ in self.parts()]


def _columns(op, q, scales, num_heads, num_kv_heads, q_start, k_start, v_start):
    """The fields of Packed, checked."""
    if q.ndim < 2:
        checks.fail(op, "q", f"of shape {list(q.shape)}", "[..., T, W] was wanted, a fused projection of T tokens, where `k` is None")
    for argument, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("k_start", k_start)):
        if value is None:
            checks.fail(op, argument, "None", "`k` is too, so `q` is a fused projection: how many heads it holds was wanted, and where keys start")
    if not scales:
        checks.fail(op, "q_scale", "None, as `k_scale` is", "one of them was wanted with a fused projection: it tells how wide a head is")
    scale = checks.floats(op, "q_scale or k_scale", scales[0])
    if scale.ndim != 1 or scale.shape[0] == 0:
        checks.fail(op, "q_scale or k_scale", f"of shape {list(scale.shape)}", "shape [D] was wanted, one value per channel of a head")
    width = scale.shape[0]
    counts = [checks.integer(op, name, count) for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads))]
    starts = {"q_start": q_start, "k_start": k_start, "v_start": v_start}
    for (argument, start), heads in zip(starts.items(), (counts[0], counts[1], counts[1])):
        if start is None:  # no values
            continue
        if checks.integer(op, argument, start) + heads * width > q.shape[-1]:
            checks.fail(op, argument, f"{start}", f"{heads} heads of {width} channels from there on were wanted in `q` of {list(q.shape)}")
    return dict(width=width, num_heads=counts[0], num_kv_heads=counts[1], **starts)


def reference(q, k, positions, frequencies, q_scale=None, k_scale=None, *, spec, mean=last_mean):
    angles = rope.cos_sin(positions, frequencies, compute_dtype(q.dtype))
    return [_heads.normed_and_rotated(x, scale, *angles, spec, mean).astype(x.dtype) for x, scale in ((q, q_scale), (k, k_scale))]


def _slices(projection, spec):
    """Queries, keys and perhaps values [..., T, heads, D]."""
    return [jax.lax.slice_in_dim(projection, start, start + heads * spec.width, axis=-1).reshape(*projection.shape[:-1], heads, spec.width)
            for start, heads in spec.parts()]


def packed_reference(projection, *operands, spec, mean=last_mean):
    q, k, *v = _slices(projection, spec)
    return [*reference(q, k, *operands, spec=spec, mean=mean), *v]


def kernel(call, q, k, positions, frequencies, *scales, spec):
    return call("head_rms_norm_rope", [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)], q, positions, frequencies, k,
                *_heads.kernel_scales(q, *scales), **_heads.kernel_attributes(spec, has_k=True))


def _in_place(projection, spec):
    """Whether heads start where the kernels can load them: whatever the width, a GPU loads no more than eight channels at once."""
    return all(n % math.gcd(spec.width, 8) == 0 for n in (projection.shape[-1], *spec.starts()))


def packed_kernel(call, projection, positions, frequencies, *scales, spec):
    if not _in_place(projection, spec):
        q, k, *v = _slices(projection, spec)
        return [*kernel(call, q, k, positions, frequencies, *scales, spec=spec), *v]
    shapes = [jax.ShapeDtypeStruct((*projection.shape[:-1], heads, spec.width), projection.dtype) for heads in (spec.num_heads, spec.num_kv_heads)]
    made = call("head_rms_norm_rope_packed", shapes, projection, positions, frequencies, *_heads.kernel_scales(projection, *scales),
                q_start=spec.q_start, k_start=spec.k_start, **_heads.rotation_attributes(spec))
    return [*made, *_slices(projection, spec)[2:]]  # values: XLA's slice, which what reads them may take into itself


def cotangent_kernel(call, q, k, positions, frequencies, *args, spec, active):
    scales, bars = args[:len(active) - 4], args[len(active) - 4:]
    if active[3]:
        return NotImplemented
    found = head_derivative.cotangents(call, [q, k], positions, frequencies, _heads.kernel_scales(q, *scales), bars,
                                       _heads.cotangent_attributes(spec), wanted=any(active[4:]))
    return _of_active(found, (q, k, *scales), (*active[:2], *active[4:]))


def packed_cotangent_kernel(call, projection, positions, frequencies, *args, spec, active):
    scales, bars = args[:len(active) - 3], args[len(active) - 3:]
    ends = [(start, start + heads * spec.width) for start, heads in sorted(spec.parts())]
    used_twice = any(end > later for (_, end), (later, _) in zip(ends, ends[1:]))
    if active[2] or used_twice or not _in_place(projection, spec):
        return NotImplemented
    starts = dict(q_start=spec.q_start, k_start=spec.k_start, v_start=-1 if spec.v_start is None else spec.v_start)
    found = head_derivative.packed_cotangents(call, projection, positions, frequencies, _heads.kernel_scales(projection, *scales), bars,
                                              _heads.cotangent_attributes(spec), starts, wanted=any(active[3:]))
    return _of_active(found, (projection, *scales), (active[0], *active[3:]))


def _of_active(found, operands, active):
    return [f.astype(o.dtype) for f, o, wanted in zip(found, operands, active) if wanted]


# The channels of k, though as many as q's, are named otherwise: its scale's gradient is a sum over k's heads alone.
QK_RMS_NORM_ROPE = Op("qk_rms_norm_rope", reference, operands=("*thd", "*tge", "*t", "pc", "d", "e"), results=("*thd", "*tge"),
                      whole="", uncut="de", kernel=kernel, cotangent_kernel=cotangent_kernel)
# Where devices had a part of the heads each, the columns of those would be no part of the projection.
PACKED = Op("qk_rms_norm_rope", packed_reference, operands=("*tw", "*t", "pc", "d", "e"),
            results=lambda spec: ("*thd", "*tge", "*tge")[:len(spec.parts())], whole="", uncut="whgde", kernel=packed_kernel,
            cotangent_kernel=packed_cotangent_kernel)
