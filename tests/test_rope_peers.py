"""The head ops against what people run today, in float32 at short positions: MLX's fast.rope, and Hugging Face's attention norms and
rotary embeddings. Only their own float32 angles lie between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fusednorm import head_rms_norm_rope, qk_rms_norm_rope, rope_table
from plain import draw, draw_scale

TOKENS = 300
TIGHT = dict(rtol=1e-4, atol=1e-4)  # TOKENS * 2^-24 radians, of values up to 4


@pytest.mark.parametrize("traditional", (False, True))
@pytest.mark.parametrize("width, dims, theta", ((64, 64, 1e4), (128, 128, 1e6), (128, 64, 1e4), (80, 20, 1e4)))
def test_mlx_fast_rope(implementation, traditional, width, dims, theta):
    mx = pytest.importorskip("mlx.core")
    x, scale = draw(1, (2, TOKENS, 3, width)), draw_scale(2, width, "float32")
    with mx.stream(mx.cpu):
        normed = mx.fast.rms_norm(mx.array(np.asarray(x)).transpose(0, 2, 1, 3), mx.array(np.asarray(scale)), 1e-6)
        want = np.asarray(mx.fast.rope(normed, dims, traditional=traditional, base=theta, scale=1.0, offset=5).transpose(0, 2, 1, 3))
    got = jax.jit(lambda x, s, p: head_rms_norm_rope(x, s, p, theta=theta, rope_dim=dims, style="interleaved" if traditional else "neox",
                                                     implementation=implementation))(x, scale, jnp.arange(TOKENS) + 5)
    np.testing.assert_allclose(got, want, **TIGHT)


def heads(torch):
    arrays = [draw(i, (1, TOKENS, h, 64)) for i, h in enumerate((4, 2))]
    return arrays, [torch.from_numpy(np.array(a)).transpose(1, 2) for a in arrays]


def compare(got, want):
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w.transpose(1, 2).numpy(), **TIGHT)


@pytest.mark.parametrize("family", ("qwen3", "gemma3"))
def test_hugging_face_attention_norms(implementation, family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    arrays, tensors = heads(torch)
    if family == "qwen3":
        from transformers.models.qwen3 import modeling_qwen3 as modeling
        config = transformers.Qwen3Config(head_dim=64, num_attention_heads=4, rope_parameters=dict(rope_type="default", rope_theta=1e6))
        norm, rotary, layer = modeling.Qwen3RMSNorm, modeling.Qwen3RotaryEmbedding(config), ()
        options = dict(theta=1e6)
    else:
        from transformers.models.gemma3 import modeling_gemma3 as modeling
        kinds = {kind: dict(rope_type="default", rope_theta=theta) for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))}
        config = transformers.Gemma3TextConfig(head_dim=64, num_attention_heads=4, rope_parameters=kinds)
        norm, rotary, layer = modeling.Gemma3RMSNorm, modeling.Gemma3RotaryEmbedding(config), ("full_attention",)
        options = dict(theta=1e6, scale_offset=1.0)
    norms = [norm(64, eps=1e-6) for _ in range(2)]
    scales = [draw_scale(7 + i, 64, "float32") - (family == "gemma3") for i in range(2)]
    with torch.no_grad():
        for module, scale in zip(norms, scales):
            module.weight.copy_(torch.from_numpy(np.array(scale)))
        cos, sin = rotary(tensors[0], torch.arange(TOKENS)[None], *layer)
        want = modeling.apply_rotary_pos_emb(*(n(t) for n, t in zip(norms, tensors)), cos, sin)
    compare(jax.jit(lambda q, k: qk_rms_norm_rope(q, k, *scales, jnp.arange(TOKENS), implementation=implementation, **options))(*arrays), want)


def test_hugging_face_llama_3_1(implementation):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama as modeling

    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    config = transformers.LlamaConfig(head_dim=64, num_attention_heads=4, max_position_embeddings=131072,
                                      rope_parameters=dict(scaling, rope_theta=5e5))
    arrays, tensors = heads(torch)
    with torch.no_grad():
        cos, sin = modeling.LlamaRotaryEmbedding(config)(tensors[0], torch.arange(TOKENS)[None])
        units = [t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) for t in tensors]
        want = modeling.apply_rotary_pos_emb(*units, cos, sin)
    table = rope_table(TOKENS, 64, theta=5e5, scaling=scaling)
    compare(jax.jit(lambda q, k: qk_rms_norm_rope(q, k, None, None, jnp.arange(TOKENS), freqs_cis=table,
                                                  implementation=implementation))(*arrays), want)
