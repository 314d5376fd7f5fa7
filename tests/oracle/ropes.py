"""Rope dictionaries, pair by pair, after the papers and transformers' formulas."""

import math


def _ntk(keys, theta, rope_dim, length):
    original, factor = keys["original_max_position_embeddings"], keys["factor"]
    longest = max(length, original)
    base = theta
    if rope_dim > 2:
        base = theta * (factor * longest / original - (factor - 1)) ** (rope_dim / (rope_dim - 2))
    return [base ** (-2 * p / rope_dim) for p in range(rope_dim // 2)]


def _llama3(keys, f):
    original, low, high = (keys[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    wave = 2 * math.pi / f
    if wave < original / high:
        return f
    if wave > original / low:
        return f / keys["factor"]
    smooth = (original / wave - low) / (high - low)
    return (1 - smooth) * f / keys["factor"] + smooth * f


def _yarn(keys, theta, rope_dim):
    ends = []
    for turns in (keys.get("beta_fast") or 32, keys.get("beta_slow") or 1):
        ends.append(rope_dim * math.log(keys["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta)))
    low, high = ends
    if keys.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    high = high + 0.001 if low == high else high
    found = []
    for p in range(rope_dim // 2):
        ramp = min(max((p - low) / (high - low), 0.0), 1.0)
        f = theta ** (-2 * p / rope_dim)
        found.append(f / keys["factor"] * ramp + f * (1 - ramp))
    return found


def _yarn_amplitude(keys):
    def m(weight):
        return 1.0 if keys["factor"] <= 1 else 0.1 * weight * math.log(keys["factor"]) + 1.0

    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return m(keys["mscale"]) / m(keys["mscale_all_dim"])
    return m(1)


def _long_amplitude(keys):
    factor, original = keys.get("factor"), keys["original_max_position_embeddings"]
    factor = factor or keys["max_position_embeddings"] / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def scaled_frequencies(keys, theta, rope_dim, length, head_dim=None):
    """(the frequency of each of rope_dim / 2 pairs, what cos and sin are multiplied by) for sequences of `length`."""
    kind = keys["rope_type"]
    own = [theta ** (-2 * p / (head_dim or rope_dim)) for p in range(rope_dim // 2)]
    amplitude = keys.get("attention_factor")
    if kind == "dynamic":
        return _ntk(keys, theta, rope_dim, length), 1.0
    if kind == "llama3":
        return [_llama3(keys, f) for f in own], 1.0
    if kind == "yarn":
        keys = dict(keys, factor=keys.get("factor") or keys["max_position_embeddings"] / keys["original_max_position_embeddings"])
        return _yarn(keys, theta, rope_dim), _yarn_amplitude(keys) if amplitude is None else amplitude
    if kind == "longrope":
        factors = keys["long_factor"] if length > keys["original_max_position_embeddings"] else keys["short_factor"]
        return [f / factor for f, factor in zip(own, factors, strict=True)], _long_amplitude(keys) if amplitude is None else amplitude
    return [f / keys.get("factor", 1.0) for f in own], 1.0
