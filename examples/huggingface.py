"""What the examples share: Hugging Face's weights and gradients as ours, and the comparison of the two.

The models are small and randomly initialised, on the CPU; nothing is downloaded. An example gives `run` a function
compare(variant, dtype, arguments, progress) that yields Rows; `run` prints them as a table.
"""

import argparse
import copy
import itertools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from tqdm import tqdm

import jax_fusednorm

BATCH = 2
DTYPES = ("float32", "bfloat16")


# ---- their weights ----


def array(weight, dtype=jnp.float32):
    """A torch tensor as a JAX array."""
    return jnp.asarray(weight.detach().float().numpy(), dtype)


def given(weight):
    """The initializer that gives a weight of Hugging Face's."""
    return lambda key, shape, dtype: array(weight, dtype)


def linear(*theirs, dtype):
    """The torch.nn.Linear layers of one input as one nnx.Linear, their outputs side by side."""
    weight, has_bias = torch.cat([layer.weight for layer in theirs]), theirs[0].bias is not None
    bias = torch.cat([layer.bias for layer in theirs]) if has_bias else None
    return nnx.Linear(*weight.T.shape, use_bias=has_bias, dtype=dtype, param_dtype=dtype, kernel_init=given(weight.T), bias_init=given(bias),
                      rngs=nnx.Rngs(0))


@torch.no_grad()
def randomise(theirs, ranges):
    """Weights that let a mistake show: ones and zeros hide that one is dropped or misplaced, small projections that a token attends to
    the wrong others. ranges: {the end of a name: (low, high)}; what has more than one axis and is not named gets outputs of size one."""
    for name, weight in itertools.chain(theirs.named_parameters(), theirs.named_buffers()):
        for limits in (limits for end, limits in ranges.items() if name.endswith(end)):
            weight.uniform_(*limits)
            break
        else:
            if weight.ndim > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)


def cast(theirs, dtype):
    """`theirs` in another dtype, for inference. Its rotary frequencies stay in float32, as where a checkpoint is loaded."""
    frequencies = {name: buffer for name, buffer in theirs.named_buffers() if name.endswith("inv_freq")}
    theirs = theirs.to(getattr(torch, dtype)).eval()
    for name, buffer in frequencies.items():
        theirs.get_buffer(name).data = buffer
    return theirs


@torch.enable_grad()
def gradients_of(theirs, loss):
    """A copy of `theirs` with the gradient of loss(theirs) in place of every weight: loaded as weights are, they lie where ours do."""
    gradients = torch.autograd.grad(loss(theirs), list(theirs.parameters()))
    found = copy.deepcopy(theirs)
    for weight, gradient in zip(found.parameters(), gradients, strict=True):
        weight.data = gradient
    return found


# ---- the comparison ----


class Row(NamedTuple):
    part: str
    found: tuple  # the difference, and the largest, or one count
    limits: tuple  # what each may be at most


def differences(ours, theirs):
    """The difference's root mean square, and the largest difference, which could hide among many small ones; both in units of the root
    mean square of `theirs`."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    size = np.sqrt(np.mean(theirs**2))
    return np.sqrt(np.mean((ours - theirs) ** 2)) / size, np.abs(ours - theirs).max() / size


def compare_outputs(ours, theirs, limits):
    """The rows of a prompt's outputs, the first of the lists, and of the single tokens' after it."""
    yield Row("prompt", differences(ours[0], theirs[0]), limits)
    yield Row("steps", differences(np.stack(ours[1:]), np.stack(theirs[1:])), limits)


def compare_gradients(load, theirs, loss, their_loss, limits):
    """The row of the weight whose gradient differs most. load(theirs): ours; loss(ours) and their_loss(theirs) are the same number."""
    ours = jax.tree.leaves(nnx.jit(nnx.grad(loss))(load(theirs)))
    want = jax.tree.leaves(nnx.state(load(gradients_of(theirs, their_loss)), nnx.Param))
    worst = np.max(list(itertools.starmap(differences, zip(ours, want, strict=True))), axis=0)  # a NaN stays one
    return Row("gradients", tuple(worst), limits)


def compare_training(load, theirs, logits_of, tokens, limits):
    """The same of a language model's cross entropy. logits_of(ours, ids): [batch, T, vocabulary]; tokens: a torch tensor, [batch, T]."""
    ids = jnp.asarray(tokens.numpy())

    def loss(ours):
        likelihoods = jax.nn.log_softmax(logits_of(ours, ids[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(likelihoods, ids[:, 1:, None], axis=-1))

    def their_loss(theirs):
        return torch.nn.functional.cross_entropy(theirs(tokens[:, :-1]).logits.transpose(1, 2), tokens[:, 1:])

    return compare_gradients(load, theirs, loss, their_loss, limits)


def has_gradients(dtype, arguments):
    return arguments.gradients and dtype == "float32"


def pieces(arguments):
    """(start, end) of the prompt, and of each single token after it."""
    return itertools.pairwise([0, *range(arguments.prompt, arguments.prompt + arguments.steps + 1)])


@torch.no_grad()
def compare_language_model(load, theirs, dtype, arguments, progress, limits):
    """The rows of a language model: the logits of a prompt, and of the tokens that theirs decodes greedily after it. In float32 the tokens
    that ours decodes must be the same, and so must the gradients of the prompt's cross entropy.

    load(theirs): ours, with empty_cache(batch, tokens) and ours(tokens, cache, start) -> (logits, cache).
    """
    ours, exact = load(theirs), dtype == "float32"
    prompt = torch.randint(1, theirs.config.vocab_size, (BATCH, arguments.prompt))  # 0 is padding, which theirs would mask
    decoded = theirs.generate(prompt, do_sample=False, max_new_tokens=arguments.steps + 1, eos_token_id=None, output_logits=True,
                              return_dict_in_generate=True)
    tokens = decoded.sequences.numpy()
    want = [theirs(prompt).logits, *(logits[:, None] for logits in decoded.logits[1:])]

    cache, got, own = ours.empty_cache(BATCH, tokens.shape[1]), [], jnp.asarray(tokens[:, :arguments.prompt])
    for start, end in pieces(arguments):
        logits, cache = decode(ours, own if exact or not start else jnp.asarray(tokens[:, start:end]), cache, start)
        got.append(np.asarray(logits, np.float64))
        own = jnp.argmax(logits[:, -1:], axis=-1)
        progress.update()
    yield from compare_outputs(got, [logits.double().numpy() for logits in want], limits[dtype])
    if exact:
        wrong = np.stack([logits[:, -1].argmax(-1) for logits in got], axis=1) != tokens[:, arguments.prompt:]
        yield Row(f"{wrong.size} tokens, {len(np.unique(tokens[:, arguments.prompt:]))} different", (int(wrong.sum()),), (0,))
    if has_gradients(dtype, arguments):
        def logits_of(ours, ids):
            return ours(ids, ours.empty_cache(*ids.shape), 0)[0]

        yield compare_training(load, theirs, logits_of, prompt, limits["gradients"])
        progress.update()


decode = nnx.jit(lambda ours, tokens, cache, start: ours(tokens, cache, start))


# ---- the command line ----


def parser(doc, variants, *, prompt, steps):
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--variants", nargs="+", choices=variants, default=list(variants), metavar="VARIANT", help=", ".join(variants))
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="DTYPE", help=", ".join(DTYPES))
    made.add_argument("--implementation", default="auto", help="of the ops: auto, jnp, kernel, host, metal, cuda")
    made.add_argument("--prompt", type=int, default=prompt, help="tokens, at least 2")
    made.add_argument("--steps", type=int, default=steps, help="tokens after the prompt, one at a time")
    add_gradients(made)
    made.add_argument("--seed", type=int, default=0)
    return made


def add_gradients(parser):
    parser.add_argument("--gradients", action=argparse.BooleanOptionalAction, default=True, help="compare them too, in float32")


def run(compare, arguments, op, *operands, **options):
    """Compares every variant and dtype, and prints the table. Returns the exit status. op: what is said to run op(*operands, **options)."""
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()  # it warns that it runs its PyTorch code, which is what is wanted here
    torch.set_num_threads(1)  # for work this small, threads wait for each other longer than they work
    chosen = jax_fusednorm.explain(op, *operands, implementation=arguments.implementation, **options)
    print(f"{op.__name__} under {arguments.implementation!r} on {jax.default_backend()}: {chosen[jax.default_backend()]}")

    rows = []
    calls = len(arguments.variants) * sum(1 + arguments.steps + has_gradients(dtype, arguments) for dtype in arguments.dtypes)
    exact_products = jax.default_matmul_precision("highest")  # else a GPU multiplies float32 in fewer digits
    with exact_products, tqdm(total=calls, desc="ours and theirs", unit="call", mininterval=1) as progress:
        for variant, dtype in itertools.product(arguments.variants, arguments.dtypes):
            torch.manual_seed(arguments.seed)
            rows += [(variant, dtype, row) for row in compare(variant, dtype, arguments, progress)]

    print(f"\n{'':<46}{'difference':<20}largest difference")
    for variant, dtype, row in rows:
        figures = "".join(f"{f'{a:.1e} <= {b:.0e}' if b else f'{a} wrong':<20}" for a, b in zip(row.found, row.limits))
        print(f"{variant:<12}{dtype:<10}{row.part:<24}{figures:<40}{'PASS' if _passed(row) else 'FAIL'}")
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0 if all(_passed(row) for _, _, row in rows) else 1


def _passed(row):
    return all(a <= b for a, b in zip(row.found, row.limits, strict=True))  # NaN fails too
