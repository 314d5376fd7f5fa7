"""rope_table's dictionaries: each rope_type is its formula, at extremes too, and every key counts or is refused by its name."""

import re

import numpy as np
import pytest

import oracle
from jax_fusednorm import rope_table
from jax_fusednorm.core import rope_scaling

ORIGINAL = 24
LINEAR = dict(rope_type="linear", factor=8.0)
DYNAMIC = dict(rope_type="dynamic", factor=3.0, original_max_position_embeddings=ORIGINAL)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=0.5, high_freq_factor=2.0, original_max_position_embeddings=ORIGINAL)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, beta_fast=3.0, beta_slow=0.2)
LONGROPE = dict(rope_type="longrope", factor=4.0, original_max_position_embeddings=ORIGINAL,
                short_factor=[1.0, 1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 1.5, 3.0, 6, 40.0])
PROPORTIONAL = dict(rope_type="proportional", factor=2.0, partial_rotary_factor=0.5)


def without(keys, *names):
    return {name: value for name, value in keys.items() if name not in names}


CONFIGS = {
    "default": dict(rope_type="default"),
    "linear": LINEAR, "a large factor": dict(LINEAR, factor=1e30), "a factor below one": dict(LINEAR, factor=0.25),
    "dynamic": DYNAMIC, "dynamic by one": dict(DYNAMIC, factor=1), "dynamic, a large factor": dict(DYNAMIC, factor=1e9),
    "llama3": LLAMA3, "llama3 by one": dict(LLAMA3, factor=1.0), "llama3, all long": dict(LLAMA3, original_max_position_embeddings=1),
    "yarn": YARN, "yarn by one": dict(YARN, factor=1.0), "yarn, all of it whole": dict(YARN, original_max_position_embeddings=1),
    "yarn, not truncated": dict(YARN, truncate=False), "yarn, no betas": dict(YARN, beta_fast=0, beta_slow=None),
    "yarn, its own factor": dict(YARN, attention_factor=1.25), "yarn, of two lengths": dict(without(YARN, "factor"), max_position_embeddings=96),
    "yarn, mscales": dict(YARN, mscale=1.0, mscale_all_dim=0.7), "yarn, an mscale of zero": dict(YARN, mscale=2.0, mscale_all_dim=0),
    "longrope": LONGROPE, "longrope by one": dict(LONGROPE, factor=1), "longrope, a large factor": dict(LONGROPE, factor=1e30),
    "longrope, its own factor": dict(without(LONGROPE, "factor"), attention_factor=1.5),
    "longrope, both factors": dict(LONGROPE, attention_factor=1.5),
    "longrope, of two lengths": dict(without(LONGROPE, "factor"), max_position_embeddings=3 * ORIGINAL),
    "longrope, shortened": dict(LONGROPE, factor=0.5),
    "proportional": PROPORTIONAL, "proportional, no factor": without(PROPORTIONAL, "factor", "partial_rotary_factor"),
}
LENGTHS = {"within": ORIGINAL - 1, "all of it": ORIGINAL, "one beyond": ORIGINAL + 1, "far beyond": 6 * ORIGINAL}


def arguments_of(keys, rope_dim=10):
    keys = dict(keys)
    for name in ("short_factor", "long_factor"):
        if isinstance(keys.get(name), list):
            keys[name] = keys[name][:rope_dim // 2]
    return dict(rope_dim=rope_dim, scaling=keys, head_dim=2 * rope_dim if keys["rope_type"] == "proportional" else None)


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_table_is_its_formula(name, length):
    for rope_dim, theta in ((10, 1e4), (10, 1.0), (2, 1e4), (4, 3e38)):
        arguments = arguments_of(CONFIGS[name], rope_dim)
        if theta == 1 and "yarn" in name:
            continue
        table = np.asarray(rope_table(length, theta=theta, **arguments), np.float64)
        keys = {key: value for key, value in arguments["scaling"].items() if value is not None}
        frequencies, amplitude = oracle.scaled_frequencies(keys, theta, rope_dim, length, arguments["head_dim"])
        angles = np.arange(length)[:, None] * np.array(frequencies)
        assert np.isfinite(table).all() and table.shape == (length, arguments["head_dim"] or rope_dim)
        np.testing.assert_allclose(table[:, :rope_dim:2], amplitude * np.cos(angles), atol=1e-7 * amplitude, rtol=0)
        np.testing.assert_allclose(table[:, 1:rope_dim:2], amplitude * np.sin(angles), atol=1e-7 * amplitude, rtol=0)


BASES = {"default": dict(rope_type="default"), "linear": LINEAR, "dynamic": DYNAMIC, "llama3": LLAMA3, "yarn": YARN, "longrope": LONGROPE,
         "proportional": PROPORTIONAL}
OTHER = dict(factor=2.5, original_max_position_embeddings=19, low_freq_factor=0.8, high_freq_factor=1.1, beta_fast=9.0, beta_slow=0.5, truncate=False,
             attention_factor=1.7, max_position_embeddings=123, rope_theta=77.0, partial_rotary_factor=0.25, long_factor=[2.0] * 5,
             short_factor=[2.0] * 5, mscale=0.3, mscale_all_dim=0.9)
KEYS = {kind: each.keys for kind, each in rope_scaling.KINDS.items()}


def made(keys, length=60, **changed):
    """The table, or the name in the error."""
    try:
        return np.asarray(rope_table(length, **{**arguments_of(keys), **changed}))
    except ValueError as error:
        return str(error)


def differs(keys, changed):
    lengths = (ORIGINAL - 4, 60)  # short_factor counts in the first
    return any(isinstance(other, str) or not np.array_equal(one, other) for one, other in ((made(keys, n), made(changed, n)) for n in lengths))


@pytest.mark.parametrize("kind", rope_scaling.KINDS)
def test_every_key_counts(kind):
    """A key with another value is another table, or an error; so is a key that is taken out."""
    full = dict(BASES[kind], rope_theta=10.0, **(dict(mscale=1.0, mscale_all_dim=0.7, beta_fast=1.0) if kind == "yarn" else {}))
    assert not isinstance(made(full), str), made(full)
    for key in KEYS[kind]:
        assert differs(full, dict(full, **{key: OTHER[key]})), key
        if key in full and key != "partial_rotary_factor":
            assert differs(full, without(full, key)), f"without {key}"


@pytest.mark.parametrize("kind", rope_scaling.KINDS)
def test_every_other_key_is_refused_by_its_name(kind):
    everything = {key for keys in KEYS.values() for key in keys} | {
        "mrope_section", "mrope_interleaved", "interleaved", "xdrope_section", "short_mscale", "long_mscale", "alpha", "llama_4_scaling_beta",
        "finetuned", "ropetype", 3, "Factor", "full_attention"}
    for key in everything - set(KEYS[kind]):
        said = made({**BASES[kind], key: OTHER.get(key, 2.0)})
        assert isinstance(said, str) and f"`scaling[{key!r}]`" in said, (key, said)


@pytest.mark.parametrize("kind", rope_scaling.KINDS)
def test_a_misspelt_key_is_refused_with_the_right_one(kind):
    for key in KEYS[kind]:
        for misspelt in (key[:-1], key + "s", key.upper()[:1] + key[1:], key.replace("_", "-"), key.replace("or", "ro")):
            if misspelt not in KEYS[kind]:
                said = made({**BASES[kind], misspelt: OTHER[key]})
                assert isinstance(said, str) and f"`scaling[{misspelt!r}]`" in said and "perhaps" in said, (misspelt, said)


@pytest.mark.parametrize("kind", rope_scaling.KINDS)
def test_none_is_as_good_as_missing(kind):
    names = {key for keys in KEYS.values() for key in keys} - set(BASES[kind])
    np.testing.assert_array_equal(made(dict.fromkeys(names) | BASES[kind]), made(BASES[kind]))


@pytest.mark.parametrize("value", ("2", "2.0", b"2", True, [2.0], {}, float("nan"), float("inf"), -1.0, 2 + 0j), ids=repr)
def test_every_number_must_be_one(value):
    for kind, base in BASES.items():
        for key in KEYS[kind]:
            full = dict(base, mscale=1.0, mscale_all_dim=0.7) if kind == "yarn" else base
            bad = [1.0, value, 1.0, 1.0, 1.0] if key.endswith(("short_factor", "long_factor")) else value
            if key != "truncate" or value is not True:
                said = made(dict(full, **{key: bad}))
                assert isinstance(said, str) and key in said, (kind, key, said)
        if kind == "yarn":
            for text in ("False", "true", 0, 1, 1.0):
                assert "scaling['truncate']" in made(dict(base, truncate=text))


def test_legacy_spellings_are_the_same_tables():
    for kind, base in BASES.items():
        legacy = dict(arguments_of(base), scaling=without(base, "rope_type") | {"type": kind})
        np.testing.assert_array_equal(made(base), np.asarray(rope_table(60, **legacy)))
        np.testing.assert_array_equal(made(base), made(dict(base, type=kind)))
    np.testing.assert_array_equal(made(LONGROPE), made(dict(LONGROPE, rope_type="su")))
    np.testing.assert_array_equal(made(LONGROPE), made(dict(LONGROPE, type="su")))
    plain = np.asarray(rope_table(60, 10))
    for scaling in ({}, dict(type="mrope"), dict(rope_theta=1e4), dict(rope_type="default", type="mrope"), dict(partial_rotary_factor=1.0)):
        np.testing.assert_array_equal(plain, np.asarray(rope_table(60, 10, scaling=scaling)))


def test_the_dictionary_s_theta_is_used():
    for base in BASES.values():
        assert np.array_equal(made(dict(base, rope_theta=5e5)), made(base, theta=5e5)) and not np.array_equal(made(base), made(base, theta=5e5))
        assert np.array_equal(made(dict(base, rope_theta=5e5), theta=5e5), made(base, theta=5e5))
        said = made(dict(base, rope_theta=5e5), theta=1e4)
        assert "`theta` is 10000.0" in said and "theta=500000.0" in said


def test_a_part_of_a_head():
    """Of int(head_dim * partial_rotary_factor) channels, as transformers counts them, and for "proportional" of whole pairs."""
    for kind, base in BASES.items():
        part, rest = dict(base, partial_rotary_factor=0.3), without(base, "partial_rotary_factor")
        proportional = kind == "proportional"
        table = np.asarray(rope_table(60, 10, scaling=part, head_dim=36))
        assert table.shape == (60, 36 if proportional else 10)
        np.testing.assert_array_equal(table, np.asarray(rope_table(60, 10, scaling=rest, head_dim=36 if proportional else None)))
        for wrong in (8, 12):
            with pytest.raises(ValueError, match="rope_dim"):
                rope_table(60, wrong, scaling=part, head_dim=36)
        with pytest.raises(ValueError, match="head_dim"):
            rope_table(60, 10, scaling=part)
        odd = made(dict(base, partial_rotary_factor=0.5), head_dim=22)
        assert odd.shape == (60, 22) if proportional else "pass rope_dim=11" in odd


@pytest.mark.parametrize("scaling, says", (
    (dict(full_attention=LINEAR, sliding_attention=dict(rope_type="default")), ("'sliding_attention'", "pass scaling['full_attention']")),
    (dict(sliding_attention=None, full_attention=LINEAR), ("pass scaling['full_attention']",)),
    (dict(rope_type="yarm"), ("rope_type 'yarm'", "perhaps 'yarn'")),
    (dict(type="axial"), ("type 'axial'", "'longrope'")),
    (dict(rope_type=["yarn"]), ("rope_type ['yarn']",)),
    (dict(rope_type="yarn", type="linear", factor=2.0), ("take one out",)),
    (dict(type="mrope", mrope_section=[1, 2, 2]), ("scaling['mrope_section']", "take it out")),
    (dict(factor=2.0), ("scaling['factor']", "no 'rope_type'")),
    (without(DYNAMIC, "original_max_position_embeddings"), ("'original_max_position_embeddings' (config.max_position_embeddings)",)),
    (without(LONGROPE, "factor"), ("'factor' (or 'max_position_embeddings')",)),
    (without(LONGROPE, "long_factor", "short_factor"), ("'short_factor', 'long_factor'",)),
    (dict(LONGROPE, long_factor=[1.0]), ("scaling['long_factor']", "of 1 numbers", "5")),
    (dict(LONGROPE, short_factor=2.0), ("scaling['short_factor']", "list")),
    (dict(LONGROPE, short_factor=[1.0, 2.0, "3", 1.0, 1.0]), ("scaling['short_factor'][2]` is '3'",)),
    (dict(LONGROPE, long_factor=[1.0, 2.0, 0.0, 1.0, 1.0]), ("scaling['long_factor'][2]", "positive")),
    (dict(LONGROPE, original_max_position_embeddings=1), ("scaling['original_max_position_embeddings']", "more than 1")),
    (dict(YARN, mscale=1.0), ("scaling['mscale']", "'mscale_all_dim'")),
    (dict(YARN, beta_fast=5e-324), ("scaling['beta_fast']",)),
    (dict(YARN, max_position_embeddings=97), ("scaling['factor']", "max_position_embeddings")),
    (dict(rope_type="default", partial_rotary_factor=1.5), ("scaling['partial_rotary_factor']", "1 at most")),
    (dict(rope_theta=0.5), ("`theta` is 0.5",)),
), ids=str)
def test_what_cannot_be_says_what_to_do(scaling, says):
    with pytest.raises(ValueError, match="rope_table: ") as caught:
        rope_table(60, 10, scaling=scaling)
    for each in says:
        assert re.search(re.escape(each), str(caught.value)), str(caught.value)
