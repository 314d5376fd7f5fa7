"""Rotary frequencies, and angles that stay right at long positions.

A float32 product position * frequency is off by 1e-3 rad and more at position 131,072. Here a frequency is the part of a turn that one position
adds, a binary fraction of 64 bits made from float64, and angles are wrapping integer products of it: 3e-9 rad up to position 2^24, under
any compiler and math mode. The kernels do the same arithmetic (metal_src/kernels/rope.h).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from . import checks, rope_scaling, sharding

def inverse_frequencies(rope_dim, theta, scaling=None, *, denominator=None, length=0):
    """(float64 [rope_dim / 2], radians that one position adds to each pair's angle; the factor of cos and sin).

    scaling: None, or a rope dictionary as `rope_scaling.read` gives it. length: of the sequence, where the scaling asks.
    """
    own = theta ** -(np.arange(0, rope_dim, 2, dtype=np.float64) / (denominator or rope_dim))
    if scaling is None:
        return own, 1.0
    return rope_scaling.KINDS[scaling["rope_type"]].scaled(own, scaling, theta, length)


def rope_table(max_positions: int, rope_dim: int, *, theta: float | None = None, scaling: Mapping[str, object] | None = None,
               head_dim: int | None = None) -> jax.Array:
    """The cosines and sines of every position, for `freqs_cis`.

    Equivalent to, in float64::

        angle = jnp.arange(max_positions)[:, None] * theta ** -(jnp.arange(0, rope_dim, 2) / rope_dim)
        jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1).reshape(max_positions, rope_dim).astype(jnp.float32)

    Args:
      max_positions: positions 0 to max_positions - 1 have a row.
      rope_dim: how many channels rotate: twice the number of pairs.
      theta: the base of the frequencies, at least 1; None: the scaling's "rope_theta", or 10000.
      scaling: None, or a Hugging Face rope dictionary; see below.
      head_dim: the channels of a head, for "proportional" or where the scaling has a "partial_rotary_factor".

    Returns:
      float32 [max_positions, rope_dim], or [max_positions, head_dim] for "proportional": cos and sin of each pair side by side.

    Raises:
      ValueError: a wrong size or theta; a scaling's key that is missing, unknown, of another rope_type or of a wrong value.

    A scaling is what a config of transformers calls rope_parameters, or once rope_scaling. Of the frequencies f = theta^(-2p / rope_dim) of
    the pairs p it makes, by its "rope_type" (or "type"), with the keys named:

    - "default", also if there is none, and "mrope": f.
    - "linear": f / factor.
    - "proportional" (Gemma 4): f / factor, "factor" being 1 by default, with head_dim as the exponent's denominator; the pairs beyond
      rope_dim / 2, of the head_dim / 2 that there are, have cos 1 and sin 0.
    - "dynamic": f of the theta multiplied by (factor * length / original - (factor - 1))^(rope_dim / (rope_dim - 2)), where the table's length,
      max_positions, is beyond the original, "original_max_position_embeddings", which for transformers is config.max_position_embeddings.
    - "llama3": with waves = original * f / 2 pi, how often a pair turns in the original context, f / factor where waves is below
      "low_freq_factor", f where it is above "high_freq_factor", and between the two a mean, weighted by waves.
    - "yarn": f / factor for the pairs that turn less than "beta_slow" (1) times in the original context, f for those that turn more than
      "beta_fast" (32) times, and between the two a mean, weighted by p; with "truncate" (True) the ends of that range are whole. cos and sin
      are multiplied by "attention_factor": by default m(mscale) / m(mscale_all_dim), if both are there and not 0, else m(1), where
      m(w) = 0.1 w ln(factor) + 1.
    - "longrope", or "su" (Phi 3): f / short_factor, or where the table's length is beyond the original f / long_factor, lists of a number for
      each pair. cos and sin are multiplied by "attention_factor": by default sqrt(1 + ln(factor) / ln(original)).

    The original is "original_max_position_embeddings" throughout; for "yarn" and "longrope" a "max_position_embeddings" divided by it may stand
    in for the factor. Any of them may have a "rope_theta", and a "partial_rotary_factor": then rope_dim must be that part of head_dim. A key
    that is None is as good as missing. No other key is taken. "dynamic" and "longrope" look at a sequence's length in transformers, so that
    a table stands for sequences of its own length: make one of each length that is served.

    Formulas: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023; Ding et al., LongRoPE, 2024; the Llama 3.1 and Gemma 4 model cards; and
    transformers' modeling_rope_utils, which they are tested against.
    """
    op = "rope_table"
    max_positions = checks.integer(op, "max_positions", max_positions, at_least=1)
    rope_dim = checks.integer(op, "rope_dim", rope_dim, at_least=1)
    if rope_dim % 2:
        checks.fail(op, "rope_dim", f"{rope_dim}", "an even number was wanted: channels rotate in pairs")
    scaling = rope_scaling.read(op, scaling)
    own_theta = scaling.get("rope_theta", 10000.0)
    theta = checks.real(op, "theta", own_theta if theta is None else theta, at_least=1)
    if theta != scaling.get("rope_theta", theta):
        checks.fail(op, "theta", f"{theta}", f"the scaling's own rope_theta, {own_theta}, was wanted: pass theta={own_theta}, or leave it out")
    rope_scaling.fit(op, scaling, rope_dim=rope_dim, theta=theta, head_dim=head_dim)
    width = head_dim if scaling["rope_type"] == "proportional" else rope_dim
    frequencies, amplitude = inverse_frequencies(rope_dim, theta, scaling, denominator=width, length=max_positions)
    table = np.empty((max_positions, width // 2, 2), np.float32)
    table[:] = (1.0, 0.0)
    for start in range(0, max_positions, 4096):  # a float64 copy of the whole could be large
        angle = np.arange(start, min(start + 4096, max_positions), dtype=np.float64)[:, None] * frequencies
        table[start:start + 4096, :rope_dim // 2] = amplitude * np.stack([np.cos(angle), np.sin(angle)], -1)
    return jnp.asarray(table.reshape(max_positions, -1))


# ---- angles ----

def turns_of(inverse):
    """uint32 [pairs, 2]: the turns that a position adds, as high and low word of a 64-bit binary fraction. Whole turns drop out."""
    fraction = np.asarray(inverse, np.float64) / (2 * np.pi) % 1.0 * 2.0**32
    high = np.floor(fraction)
    return np.stack([high, np.floor((fraction - high) * 2.0**32)], -1).astype(np.uint32)


def divided(turns, factors):
    """turns / factors for traced float32 factors: long division in integers. What is not a positive number stops its pair."""
    bits = jax.lax.bitcast_convert_type(factors.astype(jnp.float32), jnp.uint32)
    exponent = (bits >> 23).astype(jnp.int32)  # the sign is its bit 8
    ok = (factors > 0) & (exponent < 255) & (exponent > 0)
    mantissa = bits & 0x7FFFFF | 0x800000
    remainder, quotient = jnp.zeros_like(bits), []
    for word in (jnp.asarray(turns[:, 0]), jnp.asarray(turns[:, 1]), jnp.zeros_like(bits)):
        digits = jnp.zeros_like(bits)
        for shift in (24, 16, 8, 0):
            part = remainder << 8 | word >> shift & 0xFF
            digits, remainder = digits << 8 | part // mantissa, part % mantissa
        quotient.append(digits)
    left = 118 - exponent  # factor = mantissa * 2^(exponent - 150), and the quotient has 32 bits more than the turns

    def word(k):
        """The k-th word of the quotient shifted to the left."""
        out = jnp.zeros_like(bits)
        for i, q in enumerate(quotient):
            by = left + 32 * (k + 1 - i)
            up, down = jnp.clip(by, 0, 31).astype(jnp.uint32), jnp.clip(-by, 0, 31).astype(jnp.uint32)
            out |= jnp.where((by > -32) & (by < 32), jnp.where(by >= 0, q << up, q >> down), 0).astype(jnp.uint32)
        return out

    return jnp.where(ok[:, None], jnp.stack([word(0), word(1)], -1), jnp.uint32(0))


def _high_word(a, b):
    """The high word of a 32 x 32 bit product."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    return a1 * b1 + (middle >> 16) + (a0 * b1 + (middle & 0xFFFF) >> 16)


def cos_sin(positions, frequencies, dtype):
    """(cos, sin) [..., T, pairs] of int32 positions [..., T], and [..., T, 1]: whether there are any.

    frequencies: turns, uint32 [pairs, 2]; or freqs_cis, a table [max_positions, 2 * pairs], which ends.
    """
    if frequencies.dtype == jnp.uint32:
        steps = jax.lax.bitcast_convert_type(positions, jnp.uint32)[..., None]
        high, low = frequencies[:, 0], frequencies[:, 1]
        turn = steps * high + _high_word(steps, low) - jnp.where(positions[..., None] < 0, low, jnp.uint32(0))
        angle = jax.lax.bitcast_convert_type(turn, jnp.int32).astype(dtype) * jnp.asarray(2 * np.pi / 2**32, dtype)
        return jnp.cos(angle), jnp.sin(angle), None
    rows, width = frequencies.shape
    known = (positions >= 0) & (positions < rows)
    frequencies = frequencies if rows else jnp.zeros((1, width), frequencies.dtype)  # jnp refuses to index nothing
    found = sharding.take_rows(frequencies, jnp.where(known, positions, 0)).astype(dtype).reshape(*positions.shape, width // 2, 2)
    return found[..., 0], found[..., 1], known[..., None]
