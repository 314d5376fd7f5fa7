"""RMSNorm of every attention head, then its rotary position embedding."""

import dataclasses
from collections.abc import Sequence
from typing import get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, rope, sharding
from ..core.numerics import compute_dtype, constant, last_mean, rounded
from ..core.primitive import Op
from ..core.types import Copy, Implementation, Layout, Placement, Style
from . import head_derivative
from . import rms_norm as _rms_norm

STYLES = get_args(Style)
LAYOUTS = get_args(Layout)


@overload
def head_rms_norm_rope(x: ArrayLike, scale: ArrayLike | None, positions: ArrayLike | None, *,
                       theta: float = 10000.0, rope_dim: int | None = None, style: Style = "neox",
                       placement: Placement = "prefix", freq_factors: ArrayLike | None = None, freqs_cis: ArrayLike | None = None,
                       epsilon: float = 1e-6, scale_offset: float = 0.0, multiply_before_cast: bool = True, round_before_rope: bool | None = None,
                       copies: tuple[()] = (), implementation: Implementation | None = None) -> jax.Array: ...


@overload
def head_rms_norm_rope(x: ArrayLike, scale: ArrayLike | None, positions: ArrayLike | None, *,
                       theta: float = 10000.0, rope_dim: int | None = None, style: Style = "neox",
                       placement: Placement = "prefix", freq_factors: ArrayLike | None = None, freqs_cis: ArrayLike | None = None,
                       epsilon: float = 1e-6, scale_offset: float = 0.0, multiply_before_cast: bool = True, round_before_rope: bool | None = None,
                       copies: Sequence[Copy], implementation: Implementation | None = None) -> tuple[jax.Array, ...]: ...


def head_rms_norm_rope(x: ArrayLike, scale: ArrayLike | None, positions: ArrayLike | None, *,
                       theta: float = 10000.0, rope_dim: int | None = None, style: Style = "neox",
                       placement: Placement = "prefix", freq_factors: ArrayLike | None = None, freqs_cis: ArrayLike | None = None,
                       epsilon: float = 1e-6, scale_offset: float = 0.0, multiply_before_cast: bool = True, round_before_rope: bool | None = None,
                       copies: Sequence[Copy] = (), implementation: Implementation | None = None) -> jax.Array | tuple[jax.Array, ...]:
    """Root-mean-square normalization of every head, then the rotation of its channels by the token's position.

    Equivalent to, with everything in float32 (float64 for float64 `x`), for the default style and placement::

        y = rms_norm(x, scale)                                        # its options; not rounded before the rotation
        a, b, rest = y[..., :P], y[..., P:2 * P], y[..., 2 * P:]      # P = rope_dim // 2
        angle = positions[..., None, None] * theta ** -(jnp.arange(P) / P) / freq_factors
        y = jnp.concatenate([a * cos(angle) - b * sin(angle), a * sin(angle) + b * cos(angle), rest], -1).astype(x.dtype)

    but for the angles, which are right within 3e-9 rad up to position 2^24.

    Args:
      x: [..., T, H, D] in float32, bfloat16 or float16: T tokens of H heads.
      scale: [D] in any of these dtypes, or None to multiply by nothing.
      positions: integers that broadcast to [..., T]. Negative ones rotate backwards, those beyond int32 count as its ends. None only
        where rope_dim is 0.
      theta: static, at least 1; the base of the frequencies.
      rope_dim: static, even, 0 to D: how many channels rotate; None: all D (with freqs_cis, the table's width).
      style: static; the P = rope_dim / 2 pairs are "neox" (p, p + P); "interleaved" (2 p, 2 p + 1); or "proportional" (p, p + D / 2) with
        D in place of rope_dim in the exponent (Gemma 4).
      placement: static; "prefix" or "suffix": whether the first or the last rope_dim channels rotate; not for "proportional".
      freq_factors: [P] positive numbers that divide the angles, 1e30 or inf for no rotation, or None. A constant to derivatives.
      freqs_cis: [max_positions, rope_dim] in place of theta and freq_factors: cos and sin of each pair side by side, as `rope_table`
        makes them. The rows of a token with a position outside the table are zeros.
      epsilon, scale_offset, multiply_before_cast: static; as in `rms_norm`.
      round_before_rope: static; whether the norm is rounded to x's dtype before the rotation. None: not multiply_before_cast. With
        multiply_before_cast=False it always is.
      copies: static; ((dtype, layout), ...), more results, each converted from the same float32 values as the first: layout is
        "token_major", [..., T, H, D], or "head_major", [..., H, T, D].
      implementation: as in `rms_norm`.

    Returns:
      [..., T, H, D] in x's dtype; with copies a tuple of it and them.

    Raises:
      ValueError: a wrong shape, dtype or option, at trace time.
      NotImplementedError: a kernel was asked for by name and cannot run.

    Derivatives of every order and mode exist for x, scale and freqs_cis; roundings count as the identity.
    Formulas: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer, 2021.
    """
    op = "head_rms_norm_rope"
    x = checks.heads(op, "x", x)
    scale = checks.scale(op, "scale", scale, x.shape[-1])
    options, frequencies = make_options(op, x.shape[-1], theta, rope_dim, style, placement, freq_factors, freqs_cis, multiply_before_cast,
                                        round_before_rope)
    spec = _rms_norm.make_spec(Spec, op, scale, epsilon, scale_offset, multiply_before_cast, implementation,
                               copies=_copies(op, copies), **options)
    x = sharding.whole(x)
    positions = checked_positions(op, positions, x, frequencies)
    out = HEAD_RMS_NORM_ROPE.bind(x, positions, frequencies, scale, spec=spec)
    return tuple(out) if spec.copies else out[0]


@dataclasses.dataclass(frozen=True)
class Rotation(_rms_norm.Spec):
    """The options of every op that rotates heads."""

    style: str
    placement: str
    round_before_rope: bool


@dataclasses.dataclass(frozen=True)
class Spec(Rotation):
    copies: tuple = ()  # (dtype's name, layout)


def make_options(op, width, theta, rope_dim, style, placement, freq_factors, freqs_cis, multiply_before_cast, round_before_rope):
    """(the fields of Rotation, the frequencies operand), checked."""
    checks.option(op, "style", style, STYLES)
    checks.option(op, "placement", placement, get_args(Placement))
    if style == "proportional" and placement == "suffix":
        checks.fail(op, "placement", "'suffix'", "style 'proportional' rotates the first pairs: leave it 'prefix'")
    if round_before_rope is None:
        round_before_rope = not multiply_before_cast
    if not checks.flag(op, "round_before_rope", round_before_rope) and not multiply_before_cast:
        checks.fail(op, "round_before_rope", "False", "multiply_before_cast=False multiplies in x's dtype, and so rounds: leave it None")
    theta = checks.real(op, "theta", theta, at_least=1)
    if freqs_cis is not None:
        frequencies = _table(op, freqs_cis, theta, rope_dim, freq_factors, width)
        rotated = frequencies.shape[-1]
    else:
        rotated = width if rope_dim is None else checks.integer(op, "rope_dim", rope_dim)
        _check_rope_dim(op, "rope_dim", rotated, width)
        own = rope.turns_of(rope.inverse_frequencies(rotated, theta, denominator=width if style == "proportional" else None)[0])
        frequencies = constant(own) if freq_factors is None else _divided(op, freq_factors, own, theta, style, width)
    if style == "proportional" and width % 2:
        checks.fail(op, "style", "'proportional'", f"it needs an even number of channels a head, and there are {width}")
    return dict(style=style, placement=placement, round_before_rope=round_before_rope), frequencies


def _check_rope_dim(op, argument, rotated, width):
    if rotated % 2 or rotated > width:
        checks.fail(op, argument, f"{rotated}", f"an even number from 0 to the head's {width} channels was wanted")


def _table(op, freqs_cis, theta, rope_dim, freq_factors, width):
    table = checks.array(op, "freqs_cis", freqs_cis)
    if not jnp.issubdtype(table.dtype, jnp.floating) or table.ndim != 2:
        checks.fail(op, "freqs_cis", f"{table.dtype}{list(table.shape)}", "floats of shape [max_positions, rope_dim] were wanted: see rope_table")
    _check_rope_dim(op, "freqs_cis.shape[1]", table.shape[1], width)
    for argument, given in (("theta", theta != 10000.0), ("rope_dim", rope_dim not in (None, table.shape[1])),
                            ("freq_factors", freq_factors is not None)):
        if given:
            checks.fail(op, argument, "given beside freqs_cis", "the table says it all: leave it out")
    return sharding.whole(table.astype(jnp.float32), (0, 1))


def _divided(op, factors, own, theta, style, width):
    pairs = len(own)
    factors = checks.exact(op, "freq_factors", factors, jnp.floating)
    if factors.shape != (pairs,) or not jnp.issubdtype(factors.dtype, jnp.floating):
        checks.fail(op, "freq_factors", f"{factors.dtype}{list(factors.shape)}", f"floats of shape [{pairs}] were wanted, one for each pair")
    if isinstance(factors, jax.core.Tracer):
        return rope.divided(own, jax.lax.stop_gradient(factors))
    values = np.asarray(factors, np.float64)
    if not (values > 0).all():  # nan fails too
        checks.fail(op, "freq_factors", f"{values.min()} at its least", "positive numbers were wanted")
    inverse, _ = rope.inverse_frequencies(2 * pairs, theta, denominator=width if style == "proportional" else None)
    return constant(rope.turns_of(inverse / values))


def _copies(op, copies):
    try:
        pairs = [(jnp.dtype(dtype).name, layout) for dtype, layout in copies]
    except (TypeError, ValueError):
        checks.fail(op, "copies", f"{copies!r}", "pairs of a dtype and a layout were wanted: ((jnp.bfloat16, 'head_major'),)")
    for dtype, layout in pairs:
        checks.option(op, "copies' dtype", dtype, checks.STORAGE)
        checks.option(op, "copies' layout", layout, LAYOUTS)
    return tuple(pairs)


def checked_positions(op, positions, x, frequencies, *, after=2):
    """int32 [..., T], cut over devices as x's tokens are, of which it has `after` axes more."""
    if positions is None:
        if frequencies.size:
            checks.fail(op, "positions", "None", "only a head that does not rotate, rope_dim=0, needs none")
        positions = constant(np.zeros((), np.int32))
    positions = checks.exact(op, "positions", positions, jnp.integer)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        checks.fail(op, "positions", f"{positions.dtype}", "integers were wanted: cast them with `.astype(jnp.int32)`")
    try:
        return sharding.broadcast_rows(checks.clipped(positions), x, x.ndim - after)
    except ValueError:
        wanted = f"what broadcasts to {list(x.shape[:-after])} was wanted, a position for each token"
        if after == 2:
            tokens, heads, _ = x.shape[-3:]
            wanted += f": of an array of heads of shape {list(x.shape)}, [..., T, H, D], the tokens are axis -3, {tokens} of them"
            if heads != tokens and positions.shape[-1] == heads:  # as x of [..., H, T, D] would have it
                wanted += ", and the heads axis -2: if yours is [..., H, T, D], pass `.swapaxes(-2, -3)` of it"
        checks.fail(op, "positions", f"of shape {list(positions.shape)}", wanted)


def rotated(y, cos, sin, known, spec):
    """y [..., T, H, D] with its pairs turned; cos, sin [..., T, P]."""
    width, pairs = y.shape[-1], cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if spec.style == "proportional":
        half = width // 2
        a, a_rest, b, b_rest = jnp.split(y, (pairs, half, half + pairs), axis=-1)
        parts = [a * cos - b * sin, a_rest, a * sin + b * cos, b_rest]
    else:
        first = width - 2 * pairs if spec.placement == "suffix" else 0
        before, turning, after = jnp.split(y, (first, first + 2 * pairs), axis=-1)
        if spec.style == "neox":
            a, b = jnp.split(turning, 2, axis=-1)
            turned = [a * cos - b * sin, a * sin + b * cos]
        else:
            a, b = turning[..., ::2], turning[..., 1::2]
            turned = [jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(turning.shape)]
        parts = [before, *turned, after]
    out = jnp.concatenate(parts, axis=-1)
    return out if known is None else jnp.where(known[..., None], out, jnp.zeros((), out.dtype))


def normed_and_rotated(x, scale, cos, sin, known, spec, mean):
    """One array of heads in the computing dtype, before its last rounding."""
    y = _rms_norm.normalized(x.astype(compute_dtype(x.dtype)), scale, x.dtype, spec, mean)
    return rotated(rounded(y, x.dtype) if spec.round_before_rope else y, cos, sin, known, spec)


def reference(x, positions, frequencies, scale=None, *, spec, mean=last_mean):
    out = normed_and_rotated(x, scale, *rope.cos_sin(positions, frequencies, compute_dtype(x.dtype)), spec, mean)
    return [out.astype(x.dtype)] + [(out if layout == "token_major" else out.swapaxes(-2, -3)).astype(dtype)
                                    for dtype, layout in spec.copies]


def cotangent_attributes(spec):
    return dict(epsilon=spec.epsilon, scale_offset=spec.scale_offset, style=np.int32(STYLES.index(spec.style)), suffix=spec.placement == "suffix")


def rotation_attributes(spec):
    return dict(cotangent_attributes(spec), multiply_before_cast=spec.multiply_before_cast, round_before_rope=spec.round_before_rope)


def kernel_attributes(spec, has_k=False, head_major=0):
    return dict(rotation_attributes(spec), has_k=has_k, head_major=np.int64(head_major))


def kernel_scales(x, *scales):
    """The scales as the kernels take them: all of x's dtype, or all float32."""
    return scales if all(s.dtype == x.dtype for s in scales) else [s.astype(jnp.float32) for s in scales]


def kernel(call, x, positions, frequencies, scale=None, *, spec):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    head_major = (*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1])
    distinct = tuple(dict.fromkeys(spec.copies))
    shapes += [jax.ShapeDtypeStruct(head_major if layout == "head_major" else x.shape, dtype) for dtype, layout in distinct]
    out, *made = call("head_rms_norm_rope", shapes, x, positions, frequencies, *_rms_norm.kernel_scale(x, scale),
                      **kernel_attributes(spec, head_major=sum((layout == "head_major") << i for i, (_, layout) in enumerate(distinct))))
    return [out, *(made[distinct.index(copy)] for copy in spec.copies)]


def cotangent_kernel(call, x, positions, frequencies, *args, spec, active):
    scales, bars = args[:len(active) - 3], args[len(active) - 3:]
    if active[2] or spec.copies:  # a table's is a sum over heads for each position; a copy's has a dtype and an order of its own
        return NotImplemented
    x_bar, scale_bar = head_derivative.cotangents(call, [x], positions, frequencies, kernel_scales(x, *scales), bars, cotangent_attributes(spec),
                                                  wanted=any(active[3:]))
    return [x_bar] * active[0] + [scale_bar.astype(scale.dtype) for scale in scales if active[3]]


def results(spec):
    return ("*thd", *("*htd" if layout == "head_major" else "*thd" for _, layout in spec.copies))


HEAD_RMS_NORM_ROPE = Op("head_rms_norm_rope", reference, operands=("*thd", "*t", "pc", "d"), results=results, whole="", uncut="d", kernel=kernel,
                        cotangent_kernel=cotangent_kernel)
