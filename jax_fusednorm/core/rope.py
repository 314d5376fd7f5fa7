"""Rotary frequencies, and angles that stay right at long positions.

A float32 product position * frequency is off by 1e-3 rad and more at position 131,072. Here a frequency is the part of a turn that one position
adds, a binary fraction of 64 bits made from float64, and angles are wrapping integer products of it: 3e-9 rad up to position 2^24, under
any compiler and math mode. The kernels do the same arithmetic (metal_src/kernels/rope.h).
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from . import checks, sharding

SCALINGS = ("default", "linear", "llama3", "yarn", "proportional")


def inverse_frequencies(rope_dim, theta, scaling=None, *, denominator=None):
    """(float64 [rope_dim / 2], radians that one position adds to each pair's angle; the factor of cos and sin).

    scaling: None, or a Hugging Face rope dictionary; see `rope_table`.
    """
    own = theta ** -(np.arange(0, rope_dim, 2, dtype=np.float64) / (denominator or rope_dim))
    if scaling is None:
        return own, 1.0
    return {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "proportional": _default}[scaling["rope_type"]](
        own, rope_dim, theta, scaling)


def _default(own, rope_dim, theta, scaling):
    return own, 1.0


def _linear(own, rope_dim, theta, scaling):
    return own / scaling["factor"], 1.0


def _llama3(own, rope_dim, theta, scaling):
    """Long waves are stretched, short ones kept, those between blended by how many fit into the old context."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling["original_max_position_embeddings"] * own / (2 * np.pi)
    kept = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return own * (kept + (1 - kept) / scaling["factor"]), 1.0


def _yarn(own, rope_dim, theta, scaling):
    """As llama3, blended along the pairs, between those that turn beta_fast and beta_slow times in the old context."""
    factor = scaling["factor"]

    def pair_of(rotations):
        return rope_dim * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope_dim - 1)
    stretched = np.clip((np.arange(rope_dim // 2) - first) / ((last - first) or 1e-3), 0.0, 1.0)

    def magnitude(weight):
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        some, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        amplitude = magnitude(some) / magnitude(all_dims) if some and all_dims else magnitude(1.0)
    return own * (1 - stretched + stretched / factor), amplitude


def rope_table(max_positions, rope_dim, *, theta=10000.0, scaling=None, head_dim=None):
    """The cosines and sines of every position, for `freqs_cis`.

    Equivalent to, in float64::

        angle = jnp.arange(max_positions)[:, None] * theta ** -(jnp.arange(0, rope_dim, 2) / rope_dim)
        jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1).reshape(max_positions, rope_dim).astype(jnp.float32)

    Args:
      max_positions: positions 0 to max_positions - 1 have a row.
      rope_dim: how many channels rotate: twice the number of pairs.
      theta: the base of the frequencies, at least 1.
      scaling: None, or a Hugging Face rope dictionary: "rope_type" is "default"; "linear" (with "factor"); "llama3" ("factor",
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"); "yarn" ("factor",
        "original_max_position_embeddings", and where wanted "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
        "mscale_all_dim"; its attention factor multiplies cos and sin); or "proportional" (Gemma 4: needs `head_dim`). A "rope_theta"
        in it must equal `theta`.
      head_dim: for "proportional" alone: the exponent's denominator, and the table's width; the pairs beyond rope_dim / 2 have cos 1
        and sin 0.

    Returns:
      float32 [max_positions, rope_dim], or [max_positions, head_dim] for "proportional": cos and sin of each pair side by side.

    Raises:
      ValueError: a wrong size, theta or scaling.

    Formulas: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023; the Llama 3.1 and Gemma 4 model cards.
    """
    op = "rope_table"
    max_positions = checks.integer(op, "max_positions", max_positions, at_least=1)
    rope_dim = checks.integer(op, "rope_dim", rope_dim, at_least=1)
    if rope_dim % 2:
        checks.fail(op, "rope_dim", f"{rope_dim}", "an even number was wanted: channels rotate in pairs")
    theta = checks.real(op, "theta", theta, at_least=1)
    proportional = _check_scaling(op, scaling, theta) == "proportional"
    if proportional != (head_dim is not None):
        checks.fail(op, "head_dim", f"{head_dim}", "it goes with scaling of the rope_type 'proportional', and with no other")
    if proportional and not (checks.integer(op, "head_dim", head_dim) % 2 == 0 and rope_dim <= head_dim):
        checks.fail(op, "head_dim", f"{head_dim}", f"an even number of at least rope_dim, {rope_dim}, was wanted")
    own, amplitude = inverse_frequencies(rope_dim, theta, scaling, denominator=head_dim)
    table = np.empty((max_positions, (head_dim or rope_dim) // 2, 2), np.float32)
    table[:] = (1.0, 0.0)
    for start in range(0, max_positions, 4096):  # a float64 copy of the whole could be large
        angle = np.arange(start, min(start + 4096, max_positions), dtype=np.float64)[:, None] * own
        table[start:start + 4096, :rope_dim // 2] = amplitude * np.stack([np.cos(angle), np.sin(angle)], -1)
    return jnp.asarray(table.reshape(max_positions, -1))


_NEEDED = {"linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
           "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}

_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def _check_scaling(op, scaling, theta):
    """The scaling's rope_type, or None."""
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        checks.fail(op, "scaling", f"{scaling!r}", "a Hugging Face rope dictionary was wanted: {'rope_type': 'linear', 'factor': 8.0}")
    kind = scaling.get("rope_type")
    if kind not in SCALINGS:
        checks.fail(op, "scaling", f"of rope_type {kind!r}", f"one of {', '.join(map(repr, SCALINGS))} was wanted")
    missing = [name for name in _NEEDED.get(kind, ()) if scaling.get(name) is None]
    if missing:
        checks.fail(op, "scaling", f"{scaling}", f"rope_type {kind!r} needs {', '.join(map(repr, missing))} too")
    for name in (*_NEEDED.get(kind, ()), *(_OPTIONAL if kind == "yarn" else ())):
        if scaling.get(name) is not None and checks.real(op, f"scaling[{name!r}]", scaling[name], at_least=0) == 0 and name in _NEEDED[kind]:
            checks.fail(op, f"scaling[{name!r}]", "0", "a positive number was wanted")
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        checks.fail(op, "scaling['high_freq_factor']", f"{scaling['high_freq_factor']}",
                    f"more than its low_freq_factor, {scaling['low_freq_factor']}, was wanted")
    if kind == "yarn" and theta == 1:
        checks.fail(op, "theta", "1.0", "more was wanted: rope_type 'yarn' tells pairs apart by their frequencies")
    if scaling.get("rope_theta", theta) != theta:
        checks.fail(op, "theta", f"{theta}", f"the scaling's own rope_theta, {scaling['rope_theta']}, was wanted: pass theta={scaling['rope_theta']}")
    return kind


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
