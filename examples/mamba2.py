"""A Mamba-2 mixer in Flax nnx whose gated norm is the fused op, against Hugging Face's mixers with the same weights.

    python examples/mamba2.py [--variants zamba2 mamba2] [--dtypes float32 bfloat16] [--implementation auto] [--seed 0]

The gate is the first slice of what the input projection returns. The norm reads it there, so no slice is copied, and the
gating, the norm of each group of channels and the scale are one pass over memory. The weights are those of a randomly
initialised mixer of Zamba2 (a norm of four groups) and of Mamba-2 (one group). Ours reads a prompt with the chunked scan,
then single tokens with the state carried on; each output, and the gradients, are compared with what Hugging Face's PyTorch
code makes of the same input. The script prints a table of the differences, and exits with 1 if one is too large.

Needs: jax_fusednorm, flax, torch, transformers, tqdm. Nothing is downloaded.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer

import huggingface
import jax_fusednorm
from huggingface import BATCH, array, given, linear
from jax_fusednorm.flax.nnx import GatedGroupRMSNorm

WIDTH, HEADS, STATE, CHUNK = 256, 8, 64, 64
INNER = 2 * WIDTH
# In bfloat16 each side is 0.4 to 0.6 percent from Hugging Face in float32 with the same weights.
LIMITS = {"float32": (5e-6, 5e-5), "bfloat16": (1e-2, 5e-2), "gradients": (1e-5, 1e-3)}
# Of the weights that start as constants, for huggingface.randomise.
RANGES = {"norm.weight": (0.5, 1.5), "D": (0.5, 1.5), "A_log": (0.0, 2.5), "dt_bias": (-5.0, -1.0)}


def segment_sums(a):
    """For each l, and each s <= l, the sum of a[s + 1 : l + 1]; -inf for s > l. a: [..., L]. Returns [..., L, L].

    Each sum is made of its own terms: the difference of two running sums loses the digits that those have in common.
    """
    l, s = np.indices((a.shape[-1],) * 2)
    return jnp.where(s <= l, jnp.cumsum(jnp.where(s < l, a[..., :, None], 0), axis=-2), -jnp.inf)


def scan_chunk(state, chunk):
    """The state after the L tokens of one chunk, and their outputs: one masked product for what they take from each other, and
    what they take from `state`.

    state: [b, g, r, p, n], for the n states of the p channels of the r-th head of group g.
    chunk: x [b, L, g, r, p], log_decay and dt [b, L, g, r], B and C [b, L, g, n].
    """
    x, log_decay, dt, B, C = chunk
    decay = jnp.exp(segment_sums(jnp.moveaxis(log_decay, 1, -1)))  # [b, g, r, l, s], from token s to token l
    since_start = jnp.exp(jnp.cumsum(log_decay, axis=1))
    x = x * dt[..., None]
    y = jnp.einsum("blgn,bsgn,bgrls,bsgrp->blgrp", C, B, decay, x)
    y += jnp.einsum("blgn,bgrpn,blgr->blgrp", C, state, since_start)
    added = jnp.einsum("bsgn,bgrs,bsgrp->bgrpn", B, decay[..., -1, :], x)
    return state * since_start[:, -1, ..., None, None] + added, y


def scan_tokens(state, *sequence):
    """scan_chunk over sequences of any length, CHUNK tokens at a time."""
    length = sequence[0].shape[1]

    def cut(a):  # [b, T, ...] into [chunks, b, CHUNK, ...]; tokens of zeros fill the last: they decay nothing and add nothing
        a = jnp.pad(a, [(0, 0), (0, -length % CHUNK)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(a.shape[0], -1, CHUNK, *a.shape[2:]), 1, 0)

    state, y = jax.lax.scan(scan_chunk, state, tuple(map(cut, sequence)))
    y = jnp.moveaxis(y, 0, 1)
    return state, y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length]


def scan_one_token(state, *sequence):
    """The recurrence itself, for sequences of one token."""
    x, log_decay, dt, B, C = (a[:, 0] for a in sequence)
    state = state * jnp.exp(log_decay)[..., None, None] + jnp.einsum("bgn,bgrp->bgrpn", B, x * dt[..., None])
    return state, jnp.einsum("bgn,bgrpn->bgrp", C, state)[:, None]


class Mixer(nnx.Module):
    """A Mamba-2 mixer with the shapes, options and weights of one of Hugging Face's. The scan is in float32 under every dtype."""

    def __init__(self, theirs, *, dtype, implementation):
        self.groups, self.dt_limit, self.dtype = theirs.n_groups, theirs.time_step_limit, dtype
        self.heads, self.head_dim, self.states = theirs.num_heads, theirs.head_dim, theirs.ssm_state_size
        self.inner = theirs.intermediate_size
        self.in_proj, self.out_proj = linear(theirs.in_proj, dtype=dtype), linear(theirs.out_proj, dtype=dtype)
        weights = theirs.conv1d.weight[:, 0].T, theirs.conv1d.bias, theirs.dt_bias, theirs.A_log, theirs.D
        self.conv_kernel, self.conv_bias, self.dt_bias, self.A_log, self.D = (nnx.Param(array(weight)) for weight in weights)
        self.norm = GatedGroupRMSNorm(self.inner, group_size=theirs.norm.group_size, epsilon=theirs.norm.variance_epsilon, gate_start=0,
                                      scale_init=given(theirs.norm.weight), dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0))

    def empty_cache(self, batch):
        """Before the first token: the last inputs of the convolution, and the state of the recurrence."""
        taps, channels = self.conv_kernel.shape
        state = jnp.zeros((batch, self.groups, self.heads // self.groups, self.head_dim, self.states))
        return jnp.zeros((batch, taps - 1, channels), self.dtype), state

    def __call__(self, tokens, cache):
        """tokens: [batch, T, width], after those that `cache` has seen. Returns their outputs, and the cache after them."""
        (batch, length, _), (last_inputs, state) = tokens.shape, cache
        by_group = lambda a: a.reshape(batch, length, self.groups, -1)
        projected = self.in_proj(tokens)  # gate, x, B, C, dt

        inputs = jnp.concatenate([last_inputs, projected[..., self.inner : -self.heads]], axis=1)
        taps = len(self.conv_kernel[...])
        convolved = sum(inputs[:, i : i + length] * self.conv_kernel[i] for i in range(taps)) + self.conv_bias[...]
        x, B, C = map(by_group, jnp.split(jax.nn.silu(convolved), [self.inner, self.inner + self.groups * self.states], axis=-1))
        x = x.reshape(batch, length, *state.shape[1:4])

        dt = jax.nn.softplus(projected[..., -self.heads:] + self.dt_bias[...])
        if length > 1:  # Hugging Face limits the time steps of a prompt, and not those of single tokens
            dt = jnp.clip(dt, *self.dt_limit)
        scan = scan_tokens if length > 1 else scan_one_token
        state, y = scan(state, x, by_group(-jnp.exp(self.A_log[...]) * dt), by_group(dt), B, C)
        y += x * self.D[...].reshape(*x.shape[2:4], 1)

        y = self.norm(y.reshape(batch, length, self.inner), projected)
        return self.out_proj(y), (inputs[:, -(taps - 1):], state)


apply = nnx.jit(Mixer.__call__)


def zamba2():
    config = transformers.Zamba2Config(
        hidden_size=WIDTH, n_mamba_heads=HEADS, mamba_ngroups=4, mamba_d_state=STATE, chunk_size=CHUNK, time_step_min=0.02,
        num_hidden_layers=1, layers_block_type=["linear_attention"])
    return config, Zamba2MambaMixer(config, layer_idx=0)


def mamba2():
    config = transformers.Mamba2Config(
        hidden_size=WIDTH, num_heads=HEADS, head_dim=INNER // HEADS, n_groups=1, state_size=STATE, chunk_size=CHUNK,
        time_step_limit=(0.02, 0.1), use_bias=True, num_hidden_layers=1)
    return config, Mamba2Mixer(config, layer_idx=0)


MIXERS = {"zamba2": zamba2, "mamba2": mamba2}


@torch.no_grad()
def compare(mixer, dtype, arguments, progress):
    config, theirs = MIXERS[mixer]()
    huggingface.randomise(theirs, RANGES)
    theirs = huggingface.cast(theirs, dtype)
    tokens = torch.randn(BATCH, arguments.prompt + arguments.steps, WIDTH).to(getattr(torch, dtype))

    def load(theirs):
        return Mixer(theirs, dtype=jnp.dtype(dtype), implementation=arguments.implementation)

    ours, their_cache = load(theirs), transformers.DynamicCache(config=config)
    cache, got, want = ours.empty_cache(BATCH), [], []
    for start, end in huggingface.pieces(arguments):
        output, cache = apply(ours, array(tokens[:, start:end], dtype), cache)
        got.append(output)
        want.append(theirs(tokens[:, start:end], their_cache).double().numpy())
        progress.update()
    yield from huggingface.compare_outputs(got, want, LIMITS[dtype])
    if huggingface.has_gradients(dtype, arguments):
        prompt = tokens[:, : arguments.prompt]
        yield huggingface.compare_gradients(
            load, theirs, lambda ours: jnp.sum(ours(array(prompt), ours.empty_cache(BATCH))[0] ** 2), lambda theirs: theirs(prompt).square().sum(),
            LIMITS["gradients"])
        progress.update()


def main(arguments=None):
    arguments = huggingface.parser(__doc__, MIXERS, prompt=200, steps=32).parse_args(arguments)
    y, scale = jax.ShapeDtypeStruct((BATCH, 1, INNER), jnp.bfloat16), jax.ShapeDtypeStruct((INNER,), jnp.float32)
    return huggingface.run(compare, arguments, jax_fusednorm.gated_group_rms_norm, y, y, scale, gate_start=0)


if __name__ == "__main__":
    sys.exit(main())
