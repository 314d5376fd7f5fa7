"""rope_table's dictionaries against transformers itself: drawn dictionaries, its own rotary embeddings at their lengths, and the dictionary of
every config that it has."""

import random
import re

import numpy as np
import pytest

from jax_fusednorm import rope_table
from jax_fusednorm.core import rope, rope_scaling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

SEED, DRAWS = 18, 60


def drawn(kind, draw):
    """(rope_dim, head_dim or None, theta, dictionary, config's max_position_embeddings)."""
    pairs = draw.choice((1, 2, 3, 16, 32, 64, 128))
    theta = draw.choice((2.0, 1e4, 5e5, 1e6, 1e8))
    original = draw.choice((2, 64, 4096, 8192, 131072))
    factor = draw.choice((1.0, 1, 1.5, 8, 32.0, 1e4, draw.uniform(1, 64)))
    longest = int(original * draw.choice((1, 2, 16, 40)))
    keys = dict(rope_type=kind, factor=factor, original_max_position_embeddings=original)
    if kind == "linear":
        del keys["original_max_position_embeddings"]
    if kind == "llama3":
        low = draw.choice((0.5, 1.0, 2.0))
        keys |= dict(low_freq_factor=low, high_freq_factor=low * draw.choice((1.5, 4.0, 16)))
    if kind == "yarn":
        maybe = dict(beta_fast=draw.choice((0, 16, 32.0, 100)), beta_slow=draw.choice((0, 0.5, 1, 4.0)), truncate=draw.random() < 0.5,
                     attention_factor=draw.choice((None, 0.5, 1.2)))
        keys |= {name: maybe[name] for name in maybe if draw.random() < 0.5}
        if draw.random() < 0.5:
            keys |= dict(mscale=draw.choice((0, 0.707, 1.0)), mscale_all_dim=draw.choice((0, 0.707, 1)))
    if kind == "longrope":
        keys |= {name: [draw.uniform(1, 64) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
        if draw.random() < 0.3:
            keys["attention_factor"] = draw.uniform(0.5, 2)
    if kind in ("yarn", "longrope") and draw.random() < 0.3:
        keys["factor"], keys["max_position_embeddings"] = None, longest
    head_dim = None
    if kind == "proportional":
        head_dim = 2 * pairs * draw.choice((1, 2, 4))
        keys = dict(rope_type=kind, partial_rotary_factor=2 * pairs / head_dim) | ({"factor": factor} if draw.random() < 0.5 else {})
    return 2 * pairs, head_dim, theta, keys, longest if kind != "dynamic" else original


def theirs_of(keys, *, theta, head_dim, longest, length):
    """transformers' (frequencies, factor)."""
    parameters = {name: value for name, value in keys.items() if name != "max_position_embeddings"} | {"rope_theta": theta}
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=longest, rope_parameters=parameters)
    inverse, factor = ROPE_INIT_FUNCTIONS[keys["rope_type"]](config, "cpu", seq_len=length)
    return inverse.double().numpy(), factor


@pytest.mark.parametrize("kind", ROPE_INIT_FUNCTIONS)
def test_drawn_dictionaries_have_transformers_frequencies(kind):
    draw = random.Random(f"{SEED} {kind}")
    for i in range(DRAWS):
        rope_dim, head_dim, theta, keys, longest = drawn(kind, draw)
        if kind == "dynamic" and rope_dim == 2:
            continue  # theirs divides by zero
        original = keys.get("original_max_position_embeddings", 64)
        length = draw.choice((1, original - 1, original, original + 1, 5 * original)) or 1
        theirs, their_factor = theirs_of(keys, theta=theta, head_dim=head_dim or rope_dim, longest=longest, length=length)
        ours, amplitude = rope.inverse_frequencies(rope_dim, theta, rope_scaling.read("test", keys), denominator=head_dim, length=length)
        np.testing.assert_allclose(ours, theirs[:rope_dim // 2], rtol=1e-5, err_msg=f"draw {i}, seed {SEED}: {keys}, {length}")
        assert (theirs[rope_dim // 2:] == 0).all() and amplitude == pytest.approx(their_factor, rel=1e-12), keys


def compare(rotary, table, length):
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    for got, want in ((table[:, ::2], cos), (table[:, 1::2], sin)):
        np.testing.assert_allclose(got, want[0, :, :half].numpy(), atol=length * 2**-23, rtol=0)


@pytest.mark.parametrize("beyond", (-1, 0, 1, 100))
def test_phi_3_s_own_embedding_at_its_original_length(beyond):
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    original, draw = 64, random.Random(SEED)
    scaling = dict(type="longrope", short_factor=[draw.uniform(1, 2) for _ in range(8)], long_factor=[draw.uniform(1, 40) for _ in range(8)])
    config = transformers.Phi3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, rope_scaling=dict(scaling),
                                     original_max_position_embeddings=original, max_position_embeddings=32 * original)
    legacy = dict(scaling, original_max_position_embeddings=original, max_position_embeddings=config.max_position_embeddings)
    for each in (legacy, config.rope_parameters | {"factor": 32.0}):
        compare(Phi3RotaryEmbedding(config), np.asarray(rope_table(original + beyond, 16, scaling=each)), original + beyond)


@pytest.mark.parametrize("beyond", (-1, 0, 1, 100))
def test_llama_s_own_dynamic_embedding(beyond):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(head_dim=16, max_position_embeddings=64, rope_scaling=dict(type="dynamic", factor=4.0), rope_theta=5e5)
    scaling = config.rope_parameters | dict(original_max_position_embeddings=config.max_position_embeddings)
    compare(LlamaRotaryEmbedding(config), np.asarray(rope_table(64 + beyond, 16, scaling=scaling)), 64 + beyond)


def layers_of(config):
    """{layer type or None: (its dictionary, the channels of its heads)} of a config's text model."""
    config, found = config.get_text_config(), {}
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [key for key, value in parameters.items() if isinstance(value, dict)]
    for layer in nested or [None]:
        try:
            own = config.per_layer_config[layer] if config.is_heterogeneous else config
            width = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        except (AttributeError, KeyError, TypeError, ValueError):  # a config of other things, without heads
            continue
        if scaling := parameters[layer] if nested else parameters:
            found[layer] = scaling, width
    return config, found


@pytest.mark.slow
def test_the_dictionary_of_every_config():
    """Each is a table of transformers' frequencies, if need be without the keys that an error says to take out."""
    same, shortened, refused = set(), 0, 0
    for name, cls in transformers.CONFIG_MAPPING.items():
        try:
            config, layers = layers_of(cls())
        except Exception:  # noqa: BLE001, a config that needs arguments, each in its own way
            continue
        for layer, (scaling, width) in layers.items():
            kind, part = scaling.get("rope_type", "default"), scaling.get("partial_rotary_factor") or 1.0
            rope_dim = 2 * int(part * width // 2) if kind == "proportional" else int(width * part)
            if rope_dim < 2 or rope_dim % 2 or None in (scaling.get("rope_theta"), width):
                continue
            head_dim = width if "partial_rotary_factor" in scaling else None
            taken, table = dict(scaling), None
            while table is None:  # what an error says to take out
                try:
                    table = np.asarray(rope_table(300, rope_dim, scaling=taken, head_dim=head_dim))
                except ValueError as error:
                    key = re.search(r"`scaling\['(\w+)'\]` is .*: take it out", str(error))
                    if not key:
                        assert "rope_type 'axial'" in str(error) or "'partial_rotary_factor']` is 4.0" in str(error), error
                        break
                    del taken[key[1]]
            if table is None:
                refused += 1
                continue
            shortened += taken != scaling
            frequencies, factor = scaling["rope_theta"] ** -(np.arange(0, rope_dim, 2) / rope_dim), 1.0
            if kind != "default":
                theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=300, **({"layer_type": layer} if layer else {}))
                frequencies = theirs.double().numpy()[:rope_dim // 2]
            angles = np.arange(300)[:, None] * frequencies
            np.testing.assert_allclose(table[:, :rope_dim:2], factor * np.cos(angles), atol=300 * 2**-22, err_msg=f"{name} {layer}")
            same.add((name, layer, kind))
    print(f"{len(same)} equal, {shortened} of them without a key, {refused} refused")
    assert len(same) > 100 and len({kind for _, _, kind in same}) >= 4
