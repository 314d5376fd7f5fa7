"""Every argument of the head ops that cannot be: which error, and that it says what came and what was wanted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fusednorm import head_rms_norm_rope, qk_rms_norm_rope
from test_errors import fails

X, SCALE, POSITIONS, TABLE = jnp.ones((2, 3, 8)), jnp.ones(8), jnp.arange(2), jnp.ones((5, 8))

WRONG = {
    "x of rank two": ((X[0], SCALE, POSITIONS), {}, ("`x`", "[3, 8]", "[..., T, H, D]")),
    "x of integers": ((X.astype("int32"), SCALE, POSITIONS), {}, ("`x`", "int32")),
    "a scale of another length": ((X, SCALE[:7], POSITIONS), {}, ("`scale`", "[7]", "[8]")),
    "positions of floats": ((X, SCALE, POSITIONS * 1.0), {}, ("`positions`", "float32", "integers")),
    "positions of another shape": ((X, SCALE, jnp.arange(3)), {}, ("`positions`", "[3]", "[2]")),
    "too many positions": ((X, SCALE, jnp.zeros((1, 2), int)), {}, ("`positions`", "[1, 2]", "[2]")),
    "no positions": ((X, SCALE, None), {}, ("`positions`", "None", "rope_dim")),
    "an odd rope_dim": ((X, SCALE, POSITIONS), dict(rope_dim=3), ("`rope_dim`", "3", "8")),
    "a large rope_dim": ((X, SCALE, POSITIONS), dict(rope_dim=10), ("`rope_dim`", "10", "8")),
    "an odd head": ((X[..., :7], None, POSITIONS), {}, ("`rope_dim`", "7")),
    "a small theta": ((X, SCALE, POSITIONS), dict(theta=0.0), ("`theta`", "0.0")),
    "a theta in letters": ((X, SCALE, POSITIONS), dict(theta="1e4"), ("`theta`", "'1e4'")),
    "no theta": ((X, SCALE, POSITIONS), dict(theta=None, freqs_cis=TABLE), ("`theta`", "None")),
    "an array for a style": ((X, SCALE, POSITIONS), dict(style=np.arange(2)), ("`style`", "array", "'interleaved'")),
    "a style": ((X, SCALE, POSITIONS), dict(style="gptj"), ("`style`", "'gptj'", "'interleaved'")),
    "a placement": ((X, SCALE, POSITIONS), dict(placement="middle"), ("`placement`", "'middle'")),
    "a proportional suffix": ((X, SCALE, POSITIONS), dict(style="proportional", placement="suffix"), ("`placement`", "'suffix'")),
    "an odd proportional head": ((X[..., :7], None, POSITIONS), dict(style="proportional", rope_dim=2), ("`style`", "7")),
    "factors of another length": ((X, SCALE, POSITIONS), dict(freq_factors=jnp.ones(3)), ("`freq_factors`", "[3]", "[4]")),
    "factors of integers": ((X, SCALE, POSITIONS), dict(freq_factors=[1, 2, 3, 4]), ("`freq_factors`", "int32", "floats")),
    "factors that are no numbers": ((X, SCALE, POSITIONS), dict(freq_factors=[None] * 4), ("`freq_factors`", "list")),
    "factors of zero": ((X, SCALE, POSITIONS), dict(freq_factors=np.zeros(4, np.float32)), ("`freq_factors`", "0.0", "positive")),
    "a table of rank one": ((X, SCALE, POSITIONS), dict(freqs_cis=TABLE[0]), ("`freqs_cis`", "[8]", "rope_table")),
    "a wide table": ((X, SCALE, POSITIONS), dict(freqs_cis=jnp.ones((5, 10))), ("`freqs_cis.shape[1]`", "10", "8")),
    "a table and theta": ((X, SCALE, POSITIONS), dict(freqs_cis=TABLE, theta=1e6), ("`theta`", "freqs_cis")),
    "a table and another rope_dim": ((X, SCALE, POSITIONS), dict(freqs_cis=TABLE, rope_dim=4), ("`rope_dim`", "freqs_cis")),
    "a table and factors": ((X, SCALE, POSITIONS), dict(freqs_cis=TABLE, freq_factors=jnp.ones(4)), ("`freq_factors`", "freqs_cis")),
    "no rounding in x's dtype": ((X, SCALE, POSITIONS), dict(multiply_before_cast=False, round_before_rope=False), ("`round_before_rope`", "False")),
    "an offset without a scale": ((X, None, POSITIONS), dict(scale_offset=1.0), ("`scale_offset`", "1.0")),
    "copies that are no pairs": ((X, SCALE, POSITIONS), dict(copies=("bfloat16",)), ("`copies`", "head_major")),
    "a copy's dtype": ((X, SCALE, POSITIONS), dict(copies=(("int8", "head_major"),)), ("`copies' dtype`", "'int8'")),
    "a copy's layout": ((X, SCALE, POSITIONS), dict(copies=(("float32", "rows"),)), ("`copies' layout`", "'rows'")),
}


@pytest.mark.parametrize("what", WRONG)
def test_head_rms_norm_rope(what):
    args, options, says = WRONG[what]
    fails(head_rms_norm_rope, *args, says=says, **options)


@pytest.mark.parametrize("k, says", (
    (X.astype("bfloat16"), ("`k`", "bfloat16", "float32")), (X[..., :4], ("`k`", "(2, 3, 4)", "(2, 3, 8)")),
    (X[:1], ("`k`", "(1, 3, 8)", "(2, 3, 8)")), (X[0], ("`k`", "[3, 8]"))), ids=("dtype", "width", "tokens", "rank"))
def test_keys_unlike_the_queries(k, says):
    fails(qk_rms_norm_rope, X, k, SCALE, SCALE, POSITIONS, says=says)


def test_scales_of_another_length():
    fails(qk_rms_norm_rope, X, X, SCALE, SCALE[:3], POSITIONS, says=("`k_scale`", "[3]", "[8]"))
    fails(qk_rms_norm_rope, X, X, None, None, POSITIONS, scale_offset=1.0, says=("`scale_offset`",))


def test_a_position_of_more_than_64_bits():
    with pytest.raises(ValueError, match="head_rms_norm_rope: `positions` is a int"):
        head_rms_norm_rope(X, SCALE, 2**70)


@pytest.mark.parametrize("options", ({}, dict(freqs_cis=TABLE)), ids=("turns", "a table"))
def test_theta_must_be_static(options):
    with pytest.raises(ValueError, match="head_rms_norm_rope: `theta` is a traced value"):
        jax.jit(lambda theta: head_rms_norm_rope(X, SCALE, POSITIONS, theta=theta, **options))(1e4)


def test_factors_may_be_a_list_of_traced_numbers():
    got = jax.jit(lambda f: head_rms_norm_rope(X, SCALE, POSITIONS, freq_factors=[f, 2.0, 3.0, 4.0]))(1.0)
    np.testing.assert_allclose(got, head_rms_norm_rope(X, SCALE, POSITIONS, freq_factors=np.array([1.0, 2.0, 3.0, 4.0])), rtol=1e-6, atol=1e-6)
