"""rope_table against float64, and its frequencies against Hugging Face's for the same config."""

import math

import numpy as np
import pytest

import oracle
from jax_fusednorm import rope_table
from jax_fusednorm.core import rope

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
DEEPSEEK = dict(rope_type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.7)
GPT_OSS = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, truncate=False)

# scaling, theta, rope_dim, head_dim
CONFIGS = {
    "none": (None, 1e4, 128, None),
    "default": (dict(rope_type="default"), 1e6, 128, None),
    "linear": (dict(rope_type="linear", factor=8.0), 1e6, 256, None),
    "llama 3.1": (LLAMA3, 5e5, 128, None),
    "qwen 3, yarn": (YARN, 1e6, 128, None),
    "yarn with its own factor": (dict(YARN, attention_factor=1.25), 1e6, 128, None),
    "deepseek": (DEEPSEEK, 1e4, 64, None),
    "gpt-oss": (GPT_OSS, 15e4, 64, None),
    "gemma 4": (dict(rope_type="proportional"), 1e6, 128, 512),
}


@pytest.mark.parametrize("theta, width", ((1e4, 2), (1e4, 64), (1e6, 128)))
def test_cosines_and_sines_are_float64_s(theta, width):
    table = np.asarray(rope_table(5001, width, theta=theta))
    assert table.shape == (5001, width) and table.dtype == np.float32
    angles = np.arange(5001.0)[:, None] * oracle.inverse_frequencies(width, theta)
    np.testing.assert_allclose(table[:, ::2], np.cos(angles), atol=6e-8, rtol=6e-8)
    np.testing.assert_allclose(table[:, 1::2], np.sin(angles), atol=6e-8, rtol=6e-8)


def test_a_proportional_table_is_as_wide_as_the_head():
    table = np.asarray(rope_table(50, 128, theta=1e6, scaling=dict(rope_type="proportional"), head_dim=512))
    assert table.shape == (50, 512)
    angles = np.arange(50.0)[:, None] * oracle.inverse_frequencies(128, 1e6, 512)
    np.testing.assert_allclose(table[:, :128:2], np.cos(angles), atol=6e-8)
    assert (table[:, 128::2] == 1).all() and (table[:, 129::2] == 0).all()


def test_yarn_s_factor_multiplies_both():
    table = np.asarray(rope_table(9, 64, theta=1e6, scaling=YARN), np.float64)
    np.testing.assert_allclose(np.hypot(table[:, ::2], table[:, 1::2]), 0.1 * math.log(4.0) + 1.0, rtol=1e-7)


def hugging_face(scaling, theta, rope_dim, head_dim):
    pytest.importorskip("torch")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    kind = scaling["rope_type"] if scaling else "default"
    parameters = dict(scaling or dict(rope_type="default"), rope_theta=theta)
    if head_dim:
        parameters["partial_rotary_factor"] = rope_dim / head_dim
    config = LlamaConfig(head_dim=head_dim or rope_dim, max_position_embeddings=131072, rope_parameters=parameters)
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return utilities.ROPE_INIT_FUNCTIONS[kind](config, "cpu")


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_hugging_face_s(name):
    scaling, theta, rope_dim, head_dim = CONFIGS[name]
    theirs, factor = hugging_face(scaling, theta, rope_dim, head_dim)
    ours, amplitude = rope.inverse_frequencies(rope_dim, theta, scaling, denominator=head_dim)
    np.testing.assert_allclose(ours, theirs.double().numpy()[:rope_dim // 2], rtol=2e-6)
    assert (theirs[rope_dim // 2:] == 0).all()
    assert amplitude == factor


@pytest.mark.parametrize("theta, width", ((1e4, 64), (1e6, 128), (1e7, 256)))
def test_angles_in_turns_are_right_where_float32_products_are_not(theta, width):
    """3e-9 radians up to position 2^24, against long doubles."""
    positions = np.array([1, 4095, 131072, 1000000, 2**24 - 1, 2**24])[:, None]
    exact = positions * np.longdouble(theta) ** -(np.arange(0, width, 2) / np.longdouble(width))
    inverse = rope.inverse_frequencies(width, theta)[0]
    high, low = rope.turns_of(inverse).astype(object).T
    turns = np.array((positions * (high * 2**32 + low)) % 2**64 // 2**11, np.float64) / 2.0**53

    def off(angles):
        difference = (np.asarray(angles, np.longdouble) - exact) / (2 * np.longdouble(np.pi))
        return 2 * np.pi * np.abs(difference - np.round(difference)).max(axis=1)

    assert (off(2 * np.longdouble(np.pi) * turns) <= 3e-9).all()
    products = off(positions.astype(np.float32) * inverse.astype(np.float32))
    assert products[2] > 1e-3 and products[3] > 1e-2


@pytest.mark.parametrize("arguments, says", (
    (dict(max_positions=0), "`max_positions` is 0"),
    (dict(rope_dim=7), "`rope_dim` is 7"),
    (dict(rope_dim=8.0), "`rope_dim` is 8.0"),
    (dict(theta=0.5), "`theta` is 0.5"),
    (dict(scaling=dict(rope_type="longrope")), "'longrope'"),
    (dict(scaling=dict(rope_type="yarn", factor=2.0)), "'original_max_position_embeddings'"),
    (dict(theta=1e4, scaling=dict(LLAMA3, rope_theta=5e5)), "`theta` is 10000.0"),
    (dict(scaling="llama3"), "`scaling` is 'llama3'"),
    (dict(scaling=dict(rope_type="linear", factor="much")), "`scaling['factor']` is 'much'"),
    (dict(scaling=dict(rope_type="linear", factor="2")), "`scaling['factor']` is '2'"),
    (dict(scaling=dict(rope_type="linear", factor=0.0)), "`scaling['factor']` is 0"),
    (dict(scaling=dict(YARN, beta_fast=-1)), "`scaling['beta_fast']` is -1"),
    (dict(scaling=dict(LLAMA3, high_freq_factor=1.0)), "`scaling['high_freq_factor']` is 1.0"),
    (dict(scaling=YARN, theta=1.0), "`theta` is 1.0"),
    (dict(head_dim=16), "`head_dim` is 16"),
    (dict(scaling=dict(rope_type="proportional")), "`head_dim` is None"),
    (dict(scaling=dict(rope_type="proportional"), head_dim=6), "`head_dim` is 6"),
    (dict(scaling=dict(rope_type="proportional"), head_dim=16.0), "`head_dim` is 16.0"),
), ids=str)
def test_what_cannot_be_is_an_error(arguments, says):
    with pytest.raises(ValueError, match="rope_table: ") as caught:
        rope_table(**{"max_positions": 16, "rope_dim": 8, **arguments})
    assert says in str(caught.value)
