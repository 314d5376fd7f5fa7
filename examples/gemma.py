"""Gemma 3 and Gemma 4 language models in Flax nnx on the fused ops, against Hugging Face's with the same weights.

    python examples/gemma.py [--variants gemma3 gemma4] [--dtypes float32 bfloat16] [--implementation auto] [--seed 0]

In a Gemma block the output of attention, and of the MLP, is normed and then added to the residual stream: one op, RMSNormAdd. Queries and
keys are normed and rotated by one more, QKNormRope, which finds them and the values in one product. Gemma 3 multiplies by 1 + w and stretches
the angles of its global layers by 8. Gemma 4 multiplies by w, norms its values without one, and its global layers have wider heads, a quarter
of whose channels rotate ("proportional"), and no values of their own: they are the keys before their norm. Ours reads a prompt, then decodes
greedily; logits, tokens and the gradients of a training step are compared with what Hugging Face's PyTorch code makes of the same input. The
script prints a table of the differences, and exits with 1 if one is too large.

Needs: jax_fusednorm, flax, torch, transformers, tqdm. Nothing is downloaded.
"""

import sys

import jax
import jax.numpy as jnp
import transformers
from flax import nnx

import huggingface
import jax_fusednorm
from attention import attend, empty_cache, store
from huggingface import array, given, linear
from jax_fusednorm.flax.nnx import QKNormRope, RMSNorm, RMSNormAdd

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD, WINDOW = 512, 256, 4, 2, 64, 16
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 1e-1), "gradients": (2e-5, 1e-3)}


class Attention(nnx.Module):
    def __init__(self, theirs, *, dtype, **options):
        config, self.head_dim, self.scaling, self.window = theirs.config, theirs.head_dim, theirs.scaling, theirs.sliding_window
        # one product, of which the op finds queries, keys and values; without values of their own they are the keys' columns
        projections = [p for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj) if p is not None]
        self.qkv, self.o_proj = linear(*projections, dtype=dtype), linear(theirs.o_proj, dtype=dtype)
        heads, groups = (p.out_features // self.head_dim for p in projections[:2])
        self.columns = nnx.static(dict(num_heads=heads, num_kv_heads=groups, k_start=heads * self.head_dim,
                                       v_start=(heads + (groups if len(projections) == 3 else 0)) * self.head_dim))
        self.norms_values, self.epsilon, self.implementation = hasattr(theirs, "v_norm"), config.rms_norm_eps, options["implementation"]

        rope = config.rope_parameters[theirs.layer_type]
        style = "proportional" if rope["rope_type"] == "proportional" else "neox"
        rope_dim = int(self.head_dim * rope.get("partial_rotary_factor", 1))
        self.freq_factors = nnx.Variable(jnp.full(rope_dim // 2, rope.get("factor", 1.0)))
        self.norm_rope = QKNormRope(self.head_dim, theta=rope["rope_theta"], style=style, rope_dim=rope_dim, dtype=dtype, param_dtype=dtype,
                                    epsilon=self.epsilon, rngs=nnx.Rngs(0), **options)
        self.norm_rope.q_norm.scale[...] = array(theirs.q_norm.weight, dtype)
        self.norm_rope.k_norm.scale[...] = array(theirs.k_norm.weight, dtype)

    def empty_cache(self, batch, tokens):
        return empty_cache(batch, tokens, self.columns["num_kv_heads"], self.head_dim, self.qkv.dtype)

    def __call__(self, x, cache, start):
        positions = start + jnp.arange(x.shape[1])
        q, k, v = self.norm_rope(self.qkv(x), None, positions, freq_factors=self.freq_factors[...], **self.columns)
        if self.norms_values:
            v = jax_fusednorm.rms_norm(v, epsilon=self.epsilon, implementation=self.implementation)
        cache = store(cache, k, v, start)
        return self.o_proj(attend(q, cache, positions, self.scaling, self.window)), cache


class Block(nnx.Module):
    def __init__(self, theirs, *, dtype, **options):
        def norm(module, weight, **more):
            return module(len(weight), epsilon=theirs.config.rms_norm_eps, scale_init=given(weight), dtype=dtype, param_dtype=dtype,
                          rngs=nnx.Rngs(0), **options, **more)

        self.attention = Attention(theirs.self_attn, dtype=dtype, **options)
        self.gate, self.up, self.down = (linear(p, dtype=dtype) for p in (theirs.mlp.gate_proj, theirs.mlp.up_proj, theirs.mlp.down_proj))
        self.before_attention = norm(RMSNorm, theirs.input_layernorm.weight)
        self.after_attention = norm(RMSNormAdd, theirs.post_attention_layernorm.weight, norm_rounding="storage")
        self.before_mlp = norm(RMSNorm, theirs.pre_feedforward_layernorm.weight)
        self.after_mlp = norm(RMSNormAdd, theirs.post_feedforward_layernorm.weight, norm_rounding="storage")
        self.scalar = nnx.Variable(array(theirs.layer_scalar, dtype)) if hasattr(theirs, "layer_scalar") else None

    def __call__(self, stream, cache, start):
        attended, cache = self.attention(self.before_attention(stream), cache, start)
        stream = self.after_attention(attended, stream)
        x = self.before_mlp(stream)
        stream = self.after_mlp(self.down(jax.nn.gelu(self.gate(x)) * self.up(x)), stream)
        return stream if self.scalar is None else stream * self.scalar[...], cache


class Gemma(nnx.Module):
    """A language model with the shapes, options and weights of a Gemma3ForCausalLM or a Gemma4ForCausalLM."""

    def __init__(self, theirs, *, dtype, implementation):
        config = theirs.config
        options = dict(scale_offset=1.0 if config.model_type == "gemma3_text" else 0.0, implementation=implementation)
        self.embedding = nnx.Param(array(theirs.model.embed_tokens.weight, dtype))
        self.blocks = nnx.List([Block(layer, dtype=dtype, **options) for layer in theirs.model.layers])
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, scale_init=given(theirs.model.norm.weight), dtype=dtype,
                            param_dtype=dtype, rngs=nnx.Rngs(0), **options)
        self.softcap = config.final_logit_softcapping

    def empty_cache(self, batch, tokens):
        return [block.attention.empty_cache(batch, tokens) for block in self.blocks]

    def __call__(self, tokens, cache, start):
        """tokens: [batch, T], after the `start` that `cache` has seen. Returns their logits, and the cache after them."""
        embedding, new_cache = self.embedding[...], []
        stream = embedding[tokens] * jnp.asarray(embedding.shape[1] ** 0.5, embedding.dtype)
        for block, of_block in zip(self.blocks, cache):
            stream, of_block = block(stream, of_block, start)
            new_cache.append(of_block)
        logits = (self.norm(stream) @ embedding.T).astype(jnp.float32)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap), new_cache


def theirs_of(variant, layers):
    """Hugging Face's model: the last layer is global, those before it see WINDOW tokens."""
    common = dict(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        head_dim=HEAD, num_hidden_layers=layers, layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
        sliding_window=WINDOW, attn_implementation="eager")
    if variant == "gemma3":
        theirs = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(
            **common, query_pre_attn_scalar=HEAD, rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}))
    else:
        theirs = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(
            **common, global_head_dim=2 * HEAD, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
            final_logit_softcapping=30.0))
    ranges = {"norm.weight": (-0.5, 0.5)} if variant == "gemma3" else {
        "q_norm.weight": (0.05, 0.2), "norm.weight": (0.5, 1.5), "layer_scalar": (0.5, 1.5)}  # its scores are not divided by anything
    huggingface.randomise(theirs, ranges)
    theirs.model.embed_tokens.weight.data *= 0.1  # else the head, which shares it, would answer with the last token
    return theirs


def compare(variant, dtype, arguments, progress):
    theirs = huggingface.cast(theirs_of(variant, arguments.layers), dtype)

    def load(theirs):
        return Gemma(theirs, dtype=jnp.dtype(dtype), implementation=arguments.implementation)

    return huggingface.compare_language_model(load, theirs, dtype, arguments, progress, LIMITS)


def main(arguments=None):
    parser = huggingface.parser(__doc__, ("gemma3", "gemma4"), prompt=40, steps=24)
    parser.add_argument("--layers", type=int, default=3)
    arguments = parser.parse_args(arguments)
    stream, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((huggingface.BATCH, 1, WIDTH), (WIDTH,)))
    return huggingface.run(compare, arguments, jax_fusednorm.rms_norm_add, stream, stream, scale)


if __name__ == "__main__":
    sys.exit(main())
