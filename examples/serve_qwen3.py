"""Serve a Qwen3 in Flax nnx with continuous batching and a paged cache of keys and values, against Hugging Face's with the same weights.

    python examples/serve_qwen3.py [--batch 4] [--new-tokens 32] [--implementation auto] [--time]

Each layer multiplies its tokens by one matrix, and one op finds the queries, keys and values in the product: it norms and rotates the
queries and keys, and stores keys and values in the pages of their sequences. Several prompts of different lengths are read in one call;
then each call adds a token to every sequence. A sequence that ends leaves its slot and its pages to one that waits. The pages are donated
to every call, so none is copied. The weights are those of a randomly initialised Qwen3ForCausalLM. In float32 the tokens must be those
that Hugging Face's `generate` makes of each prompt by itself, and a training step's gradients, for which the layers run without a cache,
those of its model; in every dtype the logits must be close to those that its model finds for the same tokens. The script prints all that,
with the tokens per second, and exits with 1 if they are not. --time: what a step takes with kernels and with jnp, for layers of the size
of Qwen3-0.6B's.

Needs: jax_fusednorm, flax, torch, transformers, tqdm. Nothing is downloaded.
"""

import argparse
import collections
import dataclasses
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from tqdm import tqdm

import attention
import huggingface
import jax_fusednorm
from huggingface import array, cast, differences, given, linear, randomise
from jax_fusednorm.flax.nnx import AddRMSNorm, RMSNorm

VOCABULARY, PAGE, LONGEST_PROMPT, PREFILL = 512, 8, 32, 64  # PREFILL: the tokens of one call that reads prompts
ENDS = list(range(8))  # any of these tokens ends a sequence
# Of the logits' differences. In bfloat16 the two round in other places: Hugging Face rounds the angles' cosines and sines, and the products.
TOLERANCE = {"float32": (5e-6, 5e-5), "bfloat16": (2.5e-2, 1.5e-1)}
GRADIENTS = (2e-5, 1e-3)


def attend(q, cache, layer, offsets, longest):
    """What each token finds in its sequence, from the first to itself. q: [T, H, D]; no sequence has more than `longest` of the tokens."""
    later, (first, last), (heads, width) = jnp.arange(longest), (offsets[:-1], offsets[1:]), cache.pages.shape[-2:]
    # gathered head by head, [B, Hkv, S, D], which the products take as they are
    page, row, head = cache.page_table[:, None, :, None], jnp.arange(PAGE), jnp.arange(heads)[:, None, None]
    k, v = (cache.pages[page, i, layer, row, head].reshape(len(first), heads, -1, width) for i in range(2))
    by_sequence = q[first[:, None] + later].reshape(len(first), longest, heads, -1, width)  # what follows a sequence's own is not read back
    scores = jnp.einsum("btgrd,bgsd->bgrts", by_sequence, k, preferred_element_type=jnp.float32) * width**-0.5
    seen = jnp.arange(k.shape[2]) <= (cache.lengths[:, None] + later)[..., None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1).astype(q.dtype)
    attended = jnp.einsum("bgrts,bgsd->btgrd", weights, v).reshape(len(first), longest, -1, width)
    tokens = jnp.arange(len(q))
    sequence = jnp.sum(last <= tokens[:, None], axis=1)
    return attended[sequence, tokens - first[sequence]]


class Block(nnx.Module):
    """A decoder layer. Its last norm is of the sum that it leaves, and so the next layer's first."""

    def __init__(self, theirs, next_norm, layer, *, dtype, implementation):
        of_tokens, mlp = theirs.self_attn, theirs.mlp
        self.layer, self.head_dim = layer, of_tokens.head_dim
        self.heads, self.kv_heads = (projection.out_features // self.head_dim for projection in (of_tokens.q_proj, of_tokens.k_proj))
        self.qkv = linear(of_tokens.q_proj, of_tokens.k_proj, of_tokens.v_proj, dtype=dtype)
        self.starts = self.heads * self.head_dim, (self.heads + self.kv_heads) * self.head_dim  # of keys and values in its outputs
        self.q_scale, self.k_scale = (nnx.Param(array(norm.weight, dtype)) for norm in (of_tokens.q_norm, of_tokens.k_norm))
        self.options = nnx.static(dict(epsilon=of_tokens.q_norm.variance_epsilon, multiply_before_cast=False, implementation=implementation))
        self.out, self.down = linear(of_tokens.o_proj, dtype=dtype), linear(mlp.down_proj, dtype=dtype)
        self.gate_up = linear(mlp.gate_proj, mlp.up_proj, dtype=dtype)
        self.mlp_norm, self.next_norm = (
            AddRMSNorm(len(norm.weight), sum_rounding="storage", scale_init=given(norm.weight), dtype=dtype, param_dtype=dtype,
                       rngs=nnx.Rngs(0), **self.options) for norm in (theirs.post_attention_layernorm, next_norm))

    def __call__(self, x, stream, cache, freqs_cis, offsets, longest):
        k_start, v_start = self.starts
        q, cache = jax_fusednorm.qk_rms_norm_rope_paged(
            self.qkv(x), cache, self.q_scale[...], self.k_scale[...], freqs_cis, offsets, layer=self.layer, num_heads=self.heads,
            k_start=k_start, v_start=v_start, style="neox", **self.options)
        attended = attend(q, cache, self.layer, offsets, longest)
        return *self.after_attention(attended.reshape(len(x), -1), stream), cache

    def without_cache(self, x, stream, freqs_cis):
        """The same for whole sequences, [batch, T, width], without a cache: the form that has derivatives."""
        positions = jnp.arange(x.shape[1])
        k_start, v_start = self.starts
        q, k, v = jax_fusednorm.qk_rms_norm_rope(
            self.qkv(x), None, self.q_scale[...], self.k_scale[...], positions, num_heads=self.heads, num_kv_heads=self.kv_heads, k_start=k_start,
            v_start=v_start, freqs_cis=freqs_cis, **self.options)
        return self.after_attention(attention.attend(q, (k, v), positions, self.head_dim**-0.5), stream)

    def after_attention(self, attended, stream):
        x, stream = self.mlp_norm(self.out(attended), stream)
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.next_norm(self.down(jax.nn.silu(gate) * up), stream)


class Qwen3(nnx.Module):
    """A Qwen3ForCausalLM's weights over a paged cache."""

    def __init__(self, theirs, *, dtype, implementation):
        config, model = theirs.config, theirs.model
        norms = [*(layer.input_layernorm for layer in model.layers), model.norm]
        block = functools.partial(Block, dtype=dtype, implementation=implementation)
        self.embedding = nnx.Embed(*model.embed_tokens.weight.shape, dtype=dtype, param_dtype=dtype,
                                   embedding_init=given(model.embed_tokens.weight), rngs=nnx.Rngs(0))
        self.first_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, multiply_before_cast=False, dtype=dtype, param_dtype=dtype,
                                  scale_init=given(norms[0].weight), implementation=implementation, rngs=nnx.Rngs(0))
        self.blocks = nnx.List([block(layer, next_norm, i) for i, (layer, next_norm) in enumerate(zip(model.layers, norms[1:]))])
        self.head = nnx.data(None if config.tie_word_embeddings else linear(theirs.lm_head, dtype=dtype))
        self.freqs_cis = nnx.Variable(jax_fusednorm.rope_table(config.max_position_embeddings, config.head_dim,
                                                               theta=config.rope_parameters["rope_theta"]))

    def __call__(self, tokens, cache, offsets, longest=1):
        """tokens: [T], those from offsets[b] to offsets[b + 1] of sequence b. Returns the logits after the last of each, and the cache."""
        stream = self.embedding(tokens)
        x = self.first_norm(stream)
        for block in self.blocks:
            x, stream, cache = block(x, stream, cache, self.freqs_cis[...], offsets, longest)
        x = x[offsets[1:] - 1]
        return (self.head or self.embedding.attend)(x), cache

    def without_cache(self, tokens):
        """The logits of whole sequences, [batch, T]."""
        stream = self.embedding(tokens)
        x = self.first_norm(stream)
        for block in self.blocks:
            x, stream = block.without_cache(x, stream, self.freqs_cis[...])
        return (self.head or self.embedding.attend)(x)


@functools.partial(jax.jit, static_argnames="longest", donate_argnames="pages")
def step(model, pages, page_table, lengths, tokens, offsets, *, longest):
    """The most likely next token of each sequence, the logits, and the pages with the keys and values of `tokens`.

    model: what nnx.split makes of a Qwen3. nnx.jit would look for changes in the module and copy every weight, at every call.
    """
    logits, cache = nnx.merge(*model)(tokens, jax_fusednorm.PagedKVCache(pages, page_table, lengths), offsets, longest)
    return jnp.argmax(logits, axis=-1), logits, cache.pages


def empty_pages(count, config, dtype):
    return jnp.zeros((count, 2, config.num_hidden_layers, PAGE, config.num_key_value_heads, config.head_dim), dtype)


class PagePool:
    """Which pages of the cache no sequence has."""

    def __init__(self, count):
        self.free = list(range(count))

    def take(self, tokens):
        """Pages for so many tokens, or None while there are too few."""
        count = -(-tokens // PAGE)
        return [self.free.pop() for _ in range(count)] if count <= len(self.free) else None

    def give_back(self, pages):
        self.free += pages


@dataclasses.dataclass
class Sequence:
    prompt: list
    tokens: list = dataclasses.field(default_factory=list)
    logits: list = dataclasses.field(default_factory=list)
    pages: list = None


class Server:
    """Serves up to `batch` sequences at a time, each in a slot of its own, in three quarters of the pages that they could come to need."""

    def __init__(self, model, config, *, batch, new_tokens, dtype):
        most = -(-(LONGEST_PROMPT + new_tokens) // PAGE)
        count = max(most, batch * most * 3 // 4)
        self.model, self.new_tokens, self.nowhere = model, new_tokens, count  # nowhere: a page that does not exist
        self.pages, self.pool = empty_pages(count, config, dtype), PagePool(count)
        self.table, self.lengths = np.full((batch, most), self.nowhere, np.int32), np.zeros(batch, np.int32)
        self.slots = [None] * batch
        self.calls = {LONGEST_PROMPT: [], 1: []}  # of those that read prompts and of those that go on: tokens given, seconds

    def enter(self, waiting):
        """Gives idle slots to those who wait, as far as their pages and the tokens of one call allow. Returns {slot: prompt}."""
        entered, room = {}, PREFILL
        for slot in (slot for slot, sequence in enumerate(self.slots) if sequence is None):
            if not waiting or len(waiting[0].prompt) > room:
                break
            # All at once: sequences that took one page after another could find, together, that each lacks the last.
            pages = self.pool.take(len(waiting[0].prompt) + self.new_tokens)
            if pages is None:
                break
            self.slots[slot] = sequence = waiting.popleft()
            self.table[slot, : len(pages)], self.lengths[slot], sequence.pages = pages, 0, pages
            entered[slot], room = sequence.prompt, room - len(sequence.prompt)
        return entered

    def leave(self, slot):
        self.pool.give_back(self.slots[slot].pages)
        self.table[slot], self.slots[slot] = self.nowhere, None

    def call(self, read, count, longest):
        """Feeds the model the tokens of `read`, {slot: tokens}, in an array of `count`, and each sequence there its next token."""
        began = time.perf_counter()
        lengths = np.array([len(read.get(slot, ())) for slot in range(len(self.slots))], np.int32)
        offsets, tokens = np.append(0, np.cumsum(lengths)).astype(np.int32), np.zeros(count, np.int32)
        tokens[: offsets[-1]] = np.concatenate([read[slot] for slot in sorted(read)])
        following, logits, self.pages = step(self.model, self.pages, self.table, self.lengths, tokens, offsets, longest=longest)
        following, logits = np.asarray(following), np.asarray(logits, np.float32)
        self.lengths += lengths
        for slot in read:
            self.slots[slot].tokens.append(int(following[slot]))
            self.slots[slot].logits.append(logits[slot])
        self.calls[longest].append((len(read), time.perf_counter() - began))

    def serve(self, sequences, progress):
        waiting = collections.deque(sequences)
        while waiting or any(self.slots):
            if entered := self.enter(waiting):
                self.call(entered, PREFILL, LONGEST_PROMPT)
            else:
                self.call({slot: s.tokens[-1:] for slot, s in enumerate(self.slots) if s}, len(self.slots), 1)
            for slot, sequence in enumerate(self.slots):
                if sequence and (sequence.tokens[-1] in ENDS or len(sequence.tokens) == self.new_tokens):
                    self.leave(slot)
                    progress.update()


def qwen3(dtype="float32", **options):
    """A randomly initialised Qwen3ForCausalLM."""
    config = transformers.Qwen3Config(**options, eos_token_id=ENDS, pad_token_id=0)
    theirs = transformers.Qwen3ForCausalLM(config)
    randomise(theirs, {"norm.weight": (0.5, 1.5)})
    return cast(theirs, dtype)


SMALL = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
# Four of the layers of Qwen3-0.6B, and a part of its vocabulary.
LARGE = dict(vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
             max_position_embeddings=1024)


@torch.no_grad()
def compare(dtype, arguments, progress):
    """Serves the prompts. Prints how, and returns (what, found, limits) of each comparison."""
    torch.manual_seed(arguments.seed)
    theirs = qwen3(dtype, **SMALL, num_hidden_layers=arguments.layers, tie_word_embeddings=arguments.tied,
                   max_position_embeddings=LONGEST_PROMPT + arguments.new_tokens)

    def load(theirs):
        return Qwen3(theirs, dtype=jnp.dtype(dtype), implementation=arguments.implementation)

    ours = nnx.split(load(theirs))
    rng = np.random.default_rng(arguments.seed)
    sequences = [Sequence(rng.integers(len(ENDS), VOCABULARY, rng.integers(4, LONGEST_PROMPT + 1)).tolist()) for _ in range(arguments.prompts)]
    server = Server(ours, theirs.config, batch=arguments.batch, new_tokens=arguments.new_tokens, dtype=jnp.dtype(dtype))
    server.serve(sequences, progress)

    timed = [call for calls in server.calls.values() for call in calls[1:]]  # the first of a kind compiles
    rate = sum(tokens for tokens, _ in timed) / sum(seconds for _, seconds in timed) if timed else np.nan
    reads, steps = map(len, server.calls.values())
    progress.write(f"{dtype}: {sum(len(s.tokens) for s in sequences)} tokens for {len(sequences)} prompts, {reads} calls read these and {steps} "
                   f"went on; {sum(len(s.pages) for s in sequences)} pages found place in {len(server.pages)}; {rate:.0f} tokens/s")

    got = np.concatenate([s.logits for s in sequences])
    want = np.concatenate([theirs(torch.tensor([s.prompt + s.tokens[:-1]])).logits[0, len(s.prompt) - 1:].float() for s in sequences])
    yield "logits", differences(got, want), TOLERANCE[dtype]
    if dtype == "float32":
        generated = (theirs.generate(torch.tensor([s.prompt]), max_new_tokens=arguments.new_tokens, do_sample=False) for s in sequences)
        yield "sequences that differ", (sum(g[0].tolist() != s.prompt + s.tokens for g, s in zip(generated, sequences)),), (0,)
    if huggingface.has_gradients(dtype, arguments):
        tokens = torch.randint(len(ENDS), VOCABULARY, (2, LONGEST_PROMPT))
        yield huggingface.compare_training(load, theirs, Qwen3.without_cache, tokens, GRADIENTS)


def time_steps(dtype, arguments):
    """Prints the median time of a step that adds a token to each of 8 sequences of 250, with kernels and with jnp."""
    theirs = qwen3(**LARGE, num_hidden_layers=4, tie_word_embeddings=True)
    batch, length, rng = 8, 250, np.random.default_rng(arguments.seed)
    table = rng.permutation(batch * (length // PAGE + 1)).reshape(batch, -1).astype(np.int32)
    lengths, tokens, offsets = np.full(batch, length, np.int32), np.zeros(batch, np.int32), np.arange(batch + 1, dtype=np.int32)
    runs, times = (arguments.implementation, "jnp"), collections.defaultdict(list)
    model, pages = nnx.split(Qwen3(theirs, dtype=jnp.dtype(dtype), implementation=None)), empty_pages(table.size, theirs.config, dtype)
    for i in tqdm(range(30), desc=f"timing {dtype}", unit="step", mininterval=1):
        for run in runs[:: 1 if i % 2 else -1]:  # neither is always the one that goes first
            began = time.perf_counter()
            with jax_fusednorm.implementation(run):
                following, _, pages = step(model, pages, table, lengths, tokens, offsets, longest=1)
            following.block_until_ready()
            times[run].append(time.perf_counter() - began)
    ms = [1e3 * np.median(times[run][2:]) for run in runs]  # the first compile
    print(f"{dtype}: a step of 4 layers, {batch} sequences of {length} tokens: {runs[0]} {ms[0]:.1f} ms, jnp {ms[1]:.1f} ms, {ms[1] / ms[0]:.2f}x")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE), metavar="DTYPE")
    parser.add_argument("--implementation", default="auto", help="of the op and of the norms: auto, jnp, kernel, host, metal, cuda")
    parser.add_argument("--batch", type=int, default=4, help="how many sequences are served at a time")
    parser.add_argument("--prompts", type=int, default=12, help=f"of 4 to {LONGEST_PROMPT} tokens")
    parser.add_argument("--new-tokens", type=int, default=32, help="the most that a sequence gets")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tied", action="store_true", help="the embedding is the head, as in the small Qwen3 models")
    huggingface.add_gradients(parser)
    parser.add_argument("--time", action="store_true", help="time a step with kernels and with jnp, too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(arguments)
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # for work this small, threads wait for each other longer than they work

    heads, kv_heads, width = SMALL["num_attention_heads"], SMALL["num_key_value_heads"], SMALL["head_dim"]
    array_of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    cache = jax_fusednorm.PagedKVCache(array_of(1, 2, 1, PAGE, kv_heads, width), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    chosen = jax_fusednorm.explain(
        jax_fusednorm.qk_rms_norm_rope_paged, array_of(1, heads, width), cache, array_of(width), array_of(width), array_of(PAGE, width),
        np.arange(2), layer=0, implementation=arguments.implementation)
    print(f"the op under {arguments.implementation!r} on {jax.default_backend()}: {chosen[jax.default_backend()]}")

    rows = []
    exact_products = jax.default_matmul_precision("highest")  # else a GPU multiplies float32 in fewer digits
    total = len(arguments.dtypes) * arguments.prompts
    with exact_products, tqdm(total=total, desc="serving", unit="sequence", mininterval=1) as progress:
        for dtype in arguments.dtypes:
            rows += [(dtype, *row) for row in compare(dtype, arguments, progress)]
    for dtype in arguments.dtypes if arguments.time else ():
        time_steps(dtype, arguments)

    passed = []
    for dtype, what, found, limits in rows:
        passed.append(all(a <= b for a, b in zip(found, limits)))  # NaN fails too
        figures = ", ".join(f"{a:.2g} <= {b:.2g}" for a, b in zip(found, limits))
        print(f"{'PASS' if passed[-1] else 'FAIL'}  {dtype} {what}: {figures}")
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
