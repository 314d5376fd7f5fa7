"""Multi-head latent attention in Flax nnx whose two down-projections are one fused op, against Hugging Face's with the same weights.

    python examples/mla.py [--dtypes float32 bfloat16] [--implementation auto] [--seed 0]

DeepSeek's attention projects a token down to a latent of its queries, a latent of its keys and values, and a key of its position.
Here that is one matrix, and one op: it multiplies, and norms the queries' latent, which is the first columns of the product. At one
token a step the kernel reads the matrix once. The cache holds latents, and keys and values are never made of them: what would do so is
applied to the queries and to the attended latents. The weights are those of a randomly initialised DeepseekV3Attention. Ours reads a
prompt, then single tokens, and each output is compared with what Hugging Face's PyTorch code makes of the same input. The
script prints a table of the differences, and exits with 1 if one is too large.

Needs: jax_fusednorm, flax, torch, transformers, tqdm. Nothing is downloaded.
"""

import argparse
import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from tqdm import tqdm
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import jax_fusednorm
from jax_fusednorm.flax.nnx import MatmulPartialRMSNorm

BATCH, WIDTH, HEADS, QUERY_RANK, RANK, NOPE, ROPE, VALUE = 2, 256, 8, 96, 64, 32, 16, 32
EPSILON = 1e-6
# Of the difference's root mean square, and of the largest difference, which could hide among many small ones; both in units of
# the output's root mean square. In bfloat16 the two round in other places: Hugging Face makes keys and values of the latents, and
# rounds the angles' cosines and sines.
TOLERANCE = {"float32": (5e-6, 5e-5), "bfloat16": (1e-2, 8e-2)}


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
            return jnp.asarray(parameter.detach().float().numpy(), dtype)

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
    for norm in (theirs.q_a_layernorm, theirs.kv_a_layernorm):  # ones would not show that a scale is dropped or misplaced
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    for projection in (theirs.q_b_proj, theirs.kv_b_proj):  # and small weights not that a token attends to the wrong ones
        torch.nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
    return config, theirs, DeepseekV3RotaryEmbedding(config)


@torch.no_grad()
def compare(dtype, arguments, progress):
    """(part, difference, largest difference) for the prompt and for the single tokens after it, in units of TOLERANCE's."""
    torch.manual_seed(arguments.seed)
    config, theirs, rotary = deepseek()
    theirs = theirs.to(getattr(torch, dtype)).eval()
    ours = Attention(theirs, rotary.inv_freq, dtype=jnp.dtype(dtype), implementation=arguments.implementation)
    count = arguments.prompt + arguments.steps
    tokens = torch.randn(BATCH, count, WIDTH).to(getattr(torch, dtype))

    cache, their_cache = ours.empty_cache(BATCH, count), transformers.DynamicCache(config=config)
    got, want = [], []
    for start, end in itertools.pairwise([0, *range(arguments.prompt, count + 1)]):
        piece, positions = tokens[:, start:end], torch.arange(start, end)
        output, cache = apply(ours, jnp.asarray(piece.float().numpy(), dtype), cache, start)
        got.append(np.asarray(output, np.float64))
        mask = torch.where(torch.arange(end) <= positions[:, None], 0.0, -torch.inf).to(piece.dtype)
        want.append(theirs(piece, rotary(piece, positions[None]), mask[None, None], their_cache)[0].double().numpy())
        progress.update()
    for part, g, w in (("prompt", got[0], want[0]), ("steps", np.concatenate(got[1:]), np.concatenate(want[1:]))):
        size = np.sqrt(np.mean(w**2))
        yield part, np.sqrt(np.mean((g - w) ** 2)) / size, np.abs(g - w).max() / size


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE), metavar="DTYPE")
    parser.add_argument("--implementation", default="auto", help="of the op and of the other norm: auto, jnp, kernel, host, metal, cuda")
    parser.add_argument("--prompt", type=int, default=60, help="tokens")
    parser.add_argument("--steps", type=int, default=32, help="tokens after the prompt, one at a time")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(arguments)
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # for work this small, threads wait for each other longer than they work

    shapes = (BATCH, 1, WIDTH), (WIDTH, QUERY_RANK + RANK + ROPE), (QUERY_RANK,)
    chosen = jax_fusednorm.explain(jax_fusednorm.matmul_partial_rms_norm, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes),
                                   transpose_b=False, implementation=arguments.implementation)
    print(f"the op under {arguments.implementation!r} on {jax.default_backend()}: {chosen.get(jax.default_backend(), 'jnp')}")

    rows = []
    calls = len(arguments.dtypes) * (1 + arguments.steps)
    exact_products = jax.default_matmul_precision("highest")  # else a GPU multiplies float32 in fewer digits
    with exact_products, tqdm(total=calls, desc="ours and theirs", unit="call", mininterval=1) as progress:
        for dtype in arguments.dtypes:
            rows += [(dtype, *row) for row in compare(dtype, arguments, progress)]

    print(f"\n{'':<18}{'difference':<20}largest difference")
    passed = []
    for dtype, part, *found in rows:
        passed.append(all(a <= b for a, b in zip(found, TOLERANCE[dtype])))  # NaN fails too
        figures = "".join(f"{f'{a:.1e} <= {b:.0e}':<20}" for a, b in zip(found, TOLERANCE[dtype]))
        print(f"{dtype:<10}{part:<8}{figures}{'PASS' if passed[-1] else 'FAIL'}")
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
