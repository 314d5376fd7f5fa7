"""Hugging Face's rope dictionaries: the keys of each rope_type, and what they make of the frequencies, in float64.

The formulas are those of transformers' modeling_rope_utils. A key is used, or refused by its name: one dropped in silence is a wrong table.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from . import checks

# ---- the scalings: (own frequencies, keys as `read` gives them, theta, how many positions) -> (frequencies, the factor of cos and sin) ----


def _default(own, keys, theta, length):
    return own, 1.0


def _divided(own, keys, theta, length):
    return own / keys.get("factor", 1.0), 1.0


def _dynamic(own, keys, theta, length):
    """A theta larger by growth ** (rope_dim / (rope_dim - 2)): the first pair's frequency stays, the last one's is divided by growth."""
    stretch = max(length / keys["original_max_position_embeddings"], 1.0)
    growth = keys["factor"] * stretch - (keys["factor"] - 1)
    return own * growth ** -(np.arange(len(own)) / max(len(own) - 1, 1)), 1.0  # a single pair turns one radian for any theta


def _llama3(own, keys, theta, length):
    """Long waves are stretched, short ones kept, those between blended by how many fit into the old context."""
    low, high = keys["low_freq_factor"], keys["high_freq_factor"]
    waves = keys["original_max_position_embeddings"] * own / (2 * np.pi)
    kept = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return own * (kept + (1 - kept) / keys["factor"]), 1.0


def _yarn(own, keys, theta, length):
    """As llama3, blended along the pairs, between those that turn beta_fast and beta_slow times in the old context."""
    factor, rope_dim = keys["factor"], 2 * len(own)

    def pair_of(rotations):
        return rope_dim * math.log(keys["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(keys.get("beta_fast") or 32), pair_of(keys.get("beta_slow") or 1)
    if keys.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope_dim - 1)
    stretched = np.clip((np.arange(len(own)) - first) / ((last - first) or 1e-3), 0.0, 1.0)

    def magnitude(weight):
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = keys.get("attention_factor")
    if amplitude is None:
        some, all_dims = keys.get("mscale"), keys.get("mscale_all_dim")
        amplitude = magnitude(some) / magnitude(all_dims) if some and all_dims else magnitude(1.0)
    return own * (1 - stretched + stretched / factor), amplitude


def _longrope(own, keys, theta, length):
    original = keys["original_max_position_embeddings"]
    amplitude = keys.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(keys["factor"]) / math.log(original)) if keys["factor"] > 1 else 1.0
    return own / keys["long_factor" if length > original else "short_factor"], amplitude


class Kind(NamedTuple):
    """A rope_type."""

    scaled: Callable
    needed: tuple = ()
    optional: tuple = ()

    @property
    def keys(self):
        return (*COMMON, *self.needed, *self.optional)


NAMES = ("rope_type", "type")
COMMON = ("rope_theta", "partial_rotary_factor")
_ORIGINAL, _LENGTH = "original_max_position_embeddings", "max_position_embeddings"
KINDS = {
    "default": Kind(_default),
    "linear": Kind(_divided, ("factor",)),
    "proportional": Kind(_divided, (), ("factor",)),
    "dynamic": Kind(_dynamic, ("factor", _ORIGINAL)),
    "llama3": Kind(_llama3, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "yarn": Kind(_yarn, ("factor", _ORIGINAL),
                 (_LENGTH, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")),
    "longrope": Kind(_longrope, ("short_factor", "long_factor", _ORIGINAL), ("factor", _LENGTH, "attention_factor")),
}
ALIASES = {"su": "longrope", "mrope": "default"}

# ---- reading a dictionary ----

_SECTIONS = "it says which axis' position turns which pair, and the table is the same without it: take it out"
_MSCALES = "only Phi-3.5-MoE has it: take it out, and pass as 'attention_factor' the one for the table's length"
_ELSEWHERE = {
    **dict.fromkeys(("mrope_section", "mrope_interleaved", "interleaved", "xdrope_section"), _SECTIONS),
    **dict.fromkeys(("short_mscale", "long_mscale"), _MSCALES),
    "alpha": "only HunYuan has it: pass theta=rope_theta * alpha ** (rope_dim / (rope_dim - 2)) and no scaling",
    "llama_4_scaling_beta": "it scales queries by their position, which no table does: take it out, and scale the queries",
}
_MAY_BE_ZERO = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def _quoted(names):
    return ", ".join(map(repr, names))


def _kind_of(op, scaling):
    """The rope_type's own name."""
    found = {}
    for key in NAMES:
        if (name := scaling.get(key)) is not None:
            found[key] = ALIASES.get(name, name) if isinstance(name, str) else name
            if not isinstance(name, str) or found[key] not in KINDS:
                near = difflib.get_close_matches(str(name), [*KINDS, *ALIASES], n=1)
                hint = f", perhaps {near[0]!r}" if near else ": its positions have two axes, and a table one" if name == "axial" else ""
                checks.fail(op, "scaling", f"of {key} {name!r}", f"one of {_quoted(KINDS)} was wanted{hint}")
    if len(set(found.values())) > 1:
        both = f"of rope_type {scaling['rope_type']!r} and of type {scaling['type']!r}"
        checks.fail(op, "scaling", both, "one of the two was wanted: take one out")
    return next(iter(found.values()), "default")


def _refuse(op, name, value, kind, told):
    known = KINDS[kind].keys
    others = [other for other, each in KINDS.items() if name in each.keys]
    near = difflib.get_close_matches(str(name), (*NAMES, *known), n=1, cutoff=0.5)
    has_none = f"rope_type {kind!r} has no such key" if told else f"no 'rope_type' is said, and {kind!r} has no such key"
    if name in _ELSEWHERE:
        wanted = _ELSEWHERE[name]
    elif others:
        wanted = f"{has_none} ({_quoted(others)} {'has' if len(others) == 1 else 'have'}): take it out, or say another rope_type"
    elif near:
        wanted = f"{has_none}: {near[0]!r} was perhaps meant"
    else:
        wanted = f"{has_none}: take it out. Those that it has are {_quoted(known)}"
    checks.fail(op, f"scaling[{name!r}]", f"{value!r}", wanted)


def _number(op, argument, value, *, zero=False):
    if isinstance(value, (bool, np.bool_)):
        checks.fail(op, argument, f"{value!r}", "a number was wanted")
    number = checks.real(op, argument, value, at_least=0)
    if number < np.finfo(np.float32).tiny and not (zero and number == 0):
        checks.fail(op, argument, f"{number:g}", "a positive number was wanted" + (", or 0" if zero else ""))
    return number


def _value(op, name, value):
    argument = f"scaling[{name!r}]"
    if name == "truncate":
        return checks.flag(op, argument, value)
    if name not in ("short_factor", "long_factor"):
        return _number(op, argument, value, zero=name in _MAY_BE_ZERO)
    if not isinstance(value, (list, tuple, np.ndarray)):
        checks.fail(op, argument, f"{value!r}", "a list of numbers was wanted, one for each pair")
    return np.array([_number(op, f"{argument}[{i}]", each) for i, each in enumerate(value)])


def read(op, scaling):
    """A dictionary as {"rope_type": its own name, key: checked value}, in which a key that was None is missing."""
    if scaling is None:
        return {"rope_type": "default"}
    if not isinstance(scaling, Mapping):
        checks.fail(op, "scaling", f"{scaling!r}", "a Hugging Face rope dictionary was wanted: {'rope_type': 'linear', 'factor': 8.0}")
    if layers := [name for name, value in scaling.items() if isinstance(value, Mapping)]:
        checks.fail(op, "scaling", f"of one dictionary per layer type, {_quoted(layers)}",
                    f"a table is for one of them: pass scaling[{layers[0]!r}], and make one table for each")
    kind = _kind_of(op, scaling)
    found, everything = {"rope_type": kind}, {name for each in KINDS.values() for name in each.keys}
    for name, value in scaling.items():
        if name in NAMES or value is None and name in everything:
            continue
        if name not in KINDS[kind].keys:
            _refuse(op, name, value, kind, any(scaling.get(key) for key in NAMES))
        found[name] = _value(op, name, value)
    _complete(op, kind, found)
    return found


def _complete(op, kind, found):
    """Adds a factor that follows from two lengths, and refuses what does not fit together."""
    if _LENGTH in found and _ORIGINAL in found:
        ratio = found[_LENGTH] / found[_ORIGINAL]
        if not math.isclose(found.setdefault("factor", ratio), ratio):
            checks.fail(op, "scaling['factor']", f"{found['factor']}",
                        f"{_LENGTH} / {_ORIGINAL} is {ratio:g}: take out the one that is wrong")
    needed = list(KINDS[kind].needed)
    if kind == "longrope" and "attention_factor" not in found:
        needed.append("factor")
    if missing := [name for name in needed if name not in found]:
        origin = {_ORIGINAL: f" (config.{_LENGTH})" if kind == "dynamic" else f" (config.{_ORIGINAL}, or else config.{_LENGTH})",
                  "factor": f" (or {_LENGTH!r})" if _LENGTH in KINDS[kind].optional else ""}
        shown = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}
        checks.fail(op, "scaling", f"{shown}", f"rope_type {kind!r} needs {', '.join(repr(name) + origin.get(name, '') for name in missing)} too")
    if kind == "llama3" and not found["low_freq_factor"] < found["high_freq_factor"]:
        checks.fail(op, "scaling['high_freq_factor']", f"{found['high_freq_factor']}",
                    f"more than its low_freq_factor, {found['low_freq_factor']}, was wanted")
    if len(alone := [name for name in ("mscale", "mscale_all_dim") if name in found]) == 1:
        checks.fail(op, f"scaling[{alone[0]!r}]", f"{found[alone[0]]}",
                    "'mscale' and 'mscale_all_dim' have a say together, and neither alone: give both, or take it out")
    if kind == "longrope" and "attention_factor" not in found and found[_ORIGINAL] <= 1:
        checks.fail(op, f"scaling[{_ORIGINAL!r}]", f"{found[_ORIGINAL]}", "more than 1 was wanted: the attention factor divides by its logarithm")


def fit(op, keys, *, rope_dim, theta, head_dim):
    """Refuses what does not fit the table's own arguments."""
    kind, proportional, part = keys["rope_type"], keys["rope_type"] == "proportional", keys.get("partial_rotary_factor")
    if kind == "yarn" and theta == 1:
        checks.fail(op, "theta", "1.0", "more was wanted: rope_type 'yarn' tells pairs apart by their frequencies")
    for name in ("short_factor", "long_factor"):
        if name in keys and len(keys[name]) != rope_dim // 2:
            checks.fail(op, f"scaling[{name!r}]", f"of {len(keys[name])} numbers", f"rope_dim / 2, {rope_dim // 2}, were wanted, one for each pair")
    if part is not None and part > 1:
        checks.fail(op, "scaling['partial_rotary_factor']", f"{part}", "1 at most was wanted: it is the part of a head's channels that rotates")
    if head_dim is None and proportional:
        checks.fail(op, "head_dim", "None", "rope_type 'proportional' needs it: the channels of a head")
    if head_dim is None and part not in (None, 1.0):
        checks.fail(op, "scaling['partial_rotary_factor']", f"{part}", "it is of a head's channels: pass them as `head_dim`, and as `rope_dim` "
                    "int(head_dim * partial_rotary_factor)")
    if head_dim is not None and part is None and not proportional:
        checks.fail(op, "head_dim", f"{head_dim}", "it goes with rope_type 'proportional' or a 'partial_rotary_factor' in `scaling`: leave it out")
    if head_dim is not None and not (checks.integer(op, "head_dim", head_dim) % 2 == 0 and rope_dim <= head_dim):
        checks.fail(op, "head_dim", f"{head_dim}", f"an even number of at least rope_dim, {rope_dim}, was wanted")
    if head_dim is not None and part is not None:
        rotating = 2 * int(part * head_dim // 2) if proportional else int(head_dim * part)
        if rope_dim != rotating:
            checks.fail(op, "rope_dim", f"{rope_dim}", f"{rotating}, the part {part} of head_dim {head_dim}, was wanted: pass rope_dim={rotating}, "
                        "or take 'partial_rotary_factor' out")
