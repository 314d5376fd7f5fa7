"""A Nemotron-H language model in Flax nnx on the fused ops, against Hugging Face's with the same weights.

    python examples/nemotron_h.py [--layers "M-M*-"] [--dtypes float32 bfloat16] [--implementation auto] [--seed 0]

A stack of three kinds of layers: M, the Mamba-2 mixer of examples/mamba2.py, whose gated norm works in groups of channels; *, attention
without positions; and -, an MLP with squared ReLU. Before each stands a norm, and what the layer returns is added to the residual
stream: the addition and the norm before the next layer are one op, AddRMSNorm. Ours reads a prompt, then decodes greedily; logits, tokens
and the gradients of a training step are compared with what Hugging Face's PyTorch code makes of the same input. The script
prints a table of the differences, and exits with 1 if one is too large.

Needs: jax_fusednorm, flax, torch, transformers, tqdm. Nothing is downloaded.
"""

import sys

import jax
import jax.numpy as jnp
import transformers
from flax import nnx

import huggingface
import jax_fusednorm
import mamba2
from attention import attend, empty_cache, store
from huggingface import given, linear
from jax_fusednorm.flax.nnx import AddRMSNorm, RMSNorm

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD = 512, 256, 4, 2, 64
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 1e-1), "gradients": (2e-5, 1e-3)}
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


class Mixer(mamba2.Mixer):
    def empty_cache(self, batch, tokens):
        return super().empty_cache(batch)

    def __call__(self, x, cache, start):
        return super().__call__(x, cache)


class Attention(nnx.Module):
    def __init__(self, theirs, *, dtype, implementation):
        self.head_dim, self.scaling = theirs.head_dim, theirs.scaling
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            linear(p, dtype=dtype) for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj))

    def empty_cache(self, batch, tokens):
        return empty_cache(batch, tokens, self.k_proj.out_features // self.head_dim, self.head_dim, self.k_proj.dtype)

    def __call__(self, x, cache, start):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        cache = store(cache, k, v, start)
        return self.o_proj(attend(q, cache, start + jnp.arange(x.shape[1]), self.scaling)), cache


class MLP(nnx.Module):
    def __init__(self, theirs, *, dtype, implementation):
        self.up, self.down = linear(theirs.up_proj, dtype=dtype), linear(theirs.down_proj, dtype=dtype)

    def empty_cache(self, batch, tokens):
        return ()

    def __call__(self, x, cache, start):
        return self.down(jax.nn.relu(self.up(x)) ** 2), cache


LAYERS = {"linear_attention": Mixer, "full_attention": Attention, "mlp": MLP}


class NemotronH(nnx.Module):
    """A language model with the shapes, options and weights of a NemotronHForCausalLM."""

    def __init__(self, theirs, *, dtype, implementation):
        model, options = theirs.model, dict(dtype=dtype, implementation=implementation)

        def norm(module, of_theirs, **more):
            return module(len(of_theirs.weight), epsilon=of_theirs.variance_epsilon, scale_init=given(of_theirs.weight), param_dtype=dtype,
                          rngs=nnx.Rngs(0), **options, **more)

        first, *others = [block.norm for block in model.layers]
        self.embedding = nnx.Param(huggingface.array(model.embeddings.weight, dtype))
        self.first_norm = norm(RMSNorm, first)
        self.norms = nnx.List([norm(AddRMSNorm, of_theirs, sum_rounding="storage") for of_theirs in (*others, model.norm_f)])
        self.layers = nnx.List([LAYERS[block.block_type](block.mixer, **options) for block in model.layers])
        self.head = linear(theirs.lm_head, dtype=dtype)

    def empty_cache(self, batch, tokens):
        return [layer.empty_cache(batch, tokens) for layer in self.layers]

    def __call__(self, tokens, cache, start):
        """tokens: [batch, T], after the `start` that `cache` has seen. Returns their logits, and the cache after them."""
        stream, new_cache = self.embedding[...][tokens], []
        x = self.first_norm(stream)
        for layer, norm, of_layer in zip(self.layers, self.norms, cache):
            branch, of_layer = layer(x, of_layer, start)
            new_cache.append(of_layer)
            x, stream = norm(branch, stream)
        return self.head(x).astype(jnp.float32), new_cache


def theirs_of(layers):
    theirs = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, layers_block_type=[KINDS[kind] for kind in layers],
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=HEAD, mamba_num_heads=8, mamba_head_dim=64, n_groups=4,
        ssm_state_size=32, chunk_size=32, time_step_min=0.02, attn_implementation="eager"))
    huggingface.randomise(theirs, mamba2.RANGES | {"norm_f.weight": (0.5, 1.5)})
    return theirs


def compare(variant, dtype, arguments, progress):
    theirs = huggingface.cast(theirs_of(arguments.layers), dtype)

    def load(theirs):
        return NemotronH(theirs, dtype=jnp.dtype(dtype), implementation=arguments.implementation)

    return huggingface.compare_language_model(load, theirs, dtype, arguments, progress, LIMITS)


def main(arguments=None):
    parser = huggingface.parser(__doc__, ("nemotron_h",), prompt=80, steps=24)
    parser.add_argument("--layers", default="M-M*-", help="a letter of M*- for each")
    arguments = parser.parse_args(arguments)
    stream, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((huggingface.BATCH, 1, WIDTH), (WIDTH,)))
    return huggingface.run(compare, arguments, jax_fusednorm.add_rms_norm, stream, stream, scale, sum_rounding="storage")


if __name__ == "__main__":
    sys.exit(main())
