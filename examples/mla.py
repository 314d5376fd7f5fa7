"""Multi-head latent attention in Flax nnx whose two down-projections are one fused op, against Hugging Face's with the same weights.

    python examples/mla.py [--dtypes float32 bfloat16] [--implementation auto] [--seed 0]

DeepSeek's attention projects a token down to a latent of its queries, a latent of its keys and values, and a key of its position.
Here that is one matrix, and one op: it multiplies, and norms the queries' latent, which is the first columns of the product. At one
token a step the kernel reads the matrix once. The cache holds latents, and keys and values are never made of them: what would do so is
applied to the queries and to the attended latents. The weights are those of a randomly initialised DeepseekV3Attention. Ours reads a
prompt, then single tokens; each output, and the gradients, are compared with what Hugging Face's PyTorch code makes of the same input. The
script prints a table of the differences, and exits with 1 if one is too large.

Needs: jax_fusednorm, flax, torch, transformers, tqdm. Nothing is downloaded.
"""

import sys

import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import huggingface
import jax_fusednorm
from huggingface import BATCH, array
from jax_fusednorm.flax.nnx import MatmulPartialRMSNorm

WIDTH, HEADS, QUERY_RANK, RANK, NOPE, ROPE, VALUE = 256, 8, 96, 64, 32, 16, 32
EPSILON = 1e-6
# In bfloat16 the two round in other places: Hugging Face makes keys and values of the latents, and rounds the angles' cosines and sines.
LIMITS = {"float32": (5e-6, 5e-5), "bfloat16": (1e-2, 8e-2), "gradients": (1e-5, 1e-4)}


def rotate(x, positions, frequencies):
    """Each pair (2p, 2p + 1) of the last axis, turned by its token's angle. x: [batch, T, ..., 2 pairs], positions: [T]."""
    angles = (positions[:, None] * frequencies).reshape(len(positions), *[1] * (x.ndim - 3), -1)
    a, b = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape).astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head latent attention with the shapes, options and weights of a DeepseekV3Attention."""

    def __init__(self, theirs, frequencies, *, dtype, implementation):
        def weight(parameter):
            return array(parameter, dtype)

        self.down = MatmulPartialRMSNorm(WIDTH, QUERY_RANK + RANK + ROPE, QUERY_RANK, epsilon=EPSILON, multiply_before_cast=False,
                                         param_dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0))
        self.down.kernel[...] = jnp.concatenate([weight(theirs.q_a_proj.weight), weight(theirs.kv_a_proj_with_mqa.weight)]).T
        self.down.scale[...] = weight(theirs.q_a_layernorm.weight)
        self.latent_scale = nnx.Param(weight(theirs.kv_a_layernorm.weight))
        self.query_up = nnx.Param(weight(theirs.q_b_proj.weight).reshape(HEADS, NOPE + ROPE, QUERY_RANK))
        up = weight(theirs.kv_b_proj.weight).reshape(HEADS, NOPE + VALUE, RANK)
        self.key_up, self.value_up = nnx.Param(up[:, :NOPE]), nnx.Param(up[:, NOPE:])
        self.out = nnx.Param(weight(theirs.o_proj.weight).reshape(WIDTH, HEADS, VALUE))
        self.scaling, self.dtype, self.implementation = theirs.scaling, dtype, implementation
        self.frequencies = nnx.Variable(jnp.asarray(frequencies.numpy()))

    def empty_cache(self, batch, tokens):
        """Before the first token: no latents, and no keys of a position."""
        return jnp.zeros((batch, tokens, RANK), self.dtype), jnp.zeros((batch, tokens, ROPE), self.dtype)

    def __call__(self, tokens, cache, start):
        """tokens: [batch, T, width], after the `start` tokens that `cache` has seen. Returns their outputs, and the cache after them."""
        positions, (latents, keys) = start + jnp.arange(tokens.shape[1]), cache
        queries, compressed = self.down(tokens)
        latent, key = jnp.split(compressed, [RANK], axis=-1)
        latent = jax_fusednorm.rms_norm(latent, self.latent_scale[...], epsilon=EPSILON, multiply_before_cast=False,
                                        implementation=self.implementation)
        latents = jax.lax.dynamic_update_slice(latents, latent, (0, start, 0))
        keys = jax.lax.dynamic_update_slice(keys, rotate(key, positions, self.frequencies[...]), (0, start, 0))

        nope, rope = jnp.split(jnp.einsum("btr,hdr->bthd", queries, self.query_up[...]), [NOPE], axis=-1)
        rope = rotate(rope, positions, self.frequencies[...])
        scores = jnp.einsum("bthd,hdr,bsr->bhts", nope, self.key_up[...], latents) + jnp.einsum("bthd,bsd->bhts", rope, keys)
        seen = jnp.arange(latents.shape[1]) <= positions[:, None]
        weights = jax.nn.softmax(jnp.where(seen, self.scaling * scores.astype(jnp.float32), -jnp.inf), axis=-1).astype(self.dtype)
        attended = jnp.einsum("bhts,bsr,hdr->bthd", weights, latents, self.value_up[...])
        return jnp.einsum("bthd,whd->btw", attended, self.out[...]), (latents, keys)


apply = nnx.jit(Attention.__call__)


def deepseek():
    config = transformers.DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=QUERY_RANK, kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, num_hidden_layers=1, attn_implementation="eager")
    theirs = DeepseekV3Attention(config, layer_idx=0)
    huggingface.randomise(theirs, {"layernorm.weight": (0.5, 1.5)})
    return config, theirs, DeepseekV3RotaryEmbedding(config)


@torch.no_grad()
def compare(variant, dtype, arguments, progress):
    config, theirs, rotary = deepseek()
    theirs = huggingface.cast(theirs, dtype)
    count = arguments.prompt + arguments.steps
    tokens = torch.randn(BATCH, count, WIDTH).to(getattr(torch, dtype))

    def load(theirs):
        return Attention(theirs, rotary.inv_freq, dtype=jnp.dtype(dtype), implementation=arguments.implementation)

    def attended(theirs, start, end, cache=None):
        positions = torch.arange(start, end)
        mask = torch.where(torch.arange(end) <= positions[:, None], 0.0, -torch.inf).to(tokens.dtype)
        return theirs(tokens[:, start:end], rotary(tokens, positions[None]), mask[None, None], cache)[0]

    ours, their_cache = load(theirs), transformers.DynamicCache(config=config)
    cache, got, want = ours.empty_cache(BATCH, count), [], []
    for start, end in huggingface.pieces(arguments):
        output, cache = apply(ours, array(tokens[:, start:end], dtype), cache, start)
        got.append(output)
        want.append(attended(theirs, start, end, their_cache).double().numpy())
        progress.update()
    yield from huggingface.compare_outputs(got, want, LIMITS[dtype])
    if huggingface.has_gradients(dtype, arguments):
        x = array(tokens[:, : arguments.prompt])
        yield huggingface.compare_gradients(
            load, theirs, lambda ours: jnp.sum(ours(x, ours.empty_cache(*x.shape[:2]), 0)[0] ** 2),
            lambda theirs: attended(theirs, 0, arguments.prompt).square().sum(), LIMITS["gradients"])
        progress.update()


def main(arguments=None):
    arguments = huggingface.parser(__doc__, ("deepseek",), prompt=60, steps=32).parse_args(arguments)
    shapes = (BATCH, 1, WIDTH), (WIDTH, QUERY_RANK + RANK + ROPE), (QUERY_RANK,)
    return huggingface.run(compare, arguments, jax_fusednorm.matmul_partial_rms_norm,
                           *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), transpose_b=False)


if __name__ == "__main__":
    sys.exit(main())
