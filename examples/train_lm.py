"""Train a small byte-level language model twice, with the fused kernels and with the jnp lowering, and compare.

    python examples/train_lm.py [--steps 70] [--dtype bfloat16|float32] [--seed 0] [--output train_lm.png]

The text is the source code of the Python standard library on this machine. The model is a decoder-only transformer of
pre-norm blocks in which every residual addition is fused with the norm after it (AddRMSNorm), under jit, grad and remat.
Both runs start from the same weights and see the same batches, one step of each in turn so that whatever else the
machine does slows both alike. The script prints and plots both curves, times both, and exits with 1 if they disagree.

Needs: jax_fusednorm, flax, optax, tqdm, matplotlib.
"""

import argparse
import pathlib
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_fusednorm
from jax_fusednorm.flax.nnx import AddRMSNorm, RMSNorm

VOCABULARY, WIDTH, HEADS, BLOCKS, CONTEXT, BATCH = 256, 128, 4, 4, 128, 16
RUNS = ("auto", "jnp")
# From the same weights only the rounding of one forward and backward pass separates the runs, so the loss and every
# parameter's gradient must agree closely. Training amplifies any difference, however it came about: CURVE is about twice
# what two jnp runs part by (0.09 and 0.004 nats) when one weight of one of them starts with another last bit.
LOSS_TOLERANCE = {"bfloat16": 2e-3, "float32": 1e-5}
GRADIENT_TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-4}
CURVE_TOLERANCE = {"bfloat16": 0.2, "float32": 0.01}
HELD_OUT_LIMIT = {"bfloat16": 3.0, "float32": 3.0}


def rope(x):
    """Rotate each head's pairs (i, i + D/2) by position. x: [batch, T, heads, D]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """Attention and MLP. `branch` is what the previous layer computed and has not yet been added to the `stream`."""

    def __init__(self, *, dtype, implementation, rngs):
        norm = lambda: AddRMSNorm(WIDTH, dtype=dtype, implementation=implementation, rngs=rngs)
        linear = lambda n, m, **init: nnx.Linear(n, m, use_bias=False, dtype=dtype, rngs=rngs, **init)
        zero = {"kernel_init": nnx.initializers.zeros}  # a block starts as the identity, which trains faster
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH, **zero)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH, **zero)

    def __call__(self, branch, stream):
        x, stream = self.attention_norm(branch, stream)
        q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in jnp.split(self.qkv(x), 3, axis=-1))
        attended = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x, stream = self.mlp_norm(self.out(attended.reshape(x.shape)), stream)
        return self.down(jax.nn.gelu(self.up(x))), stream


class LanguageModel(nnx.Module):
    def __init__(self, *, dtype, implementation, rngs):
        small = nnx.initializers.normal(0.02)
        embed = lambda: nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, embedding_init=small, rngs=rngs)
        self.tokens, self.previous = embed(), embed()
        self.blocks = nnx.List([Block(dtype=dtype, implementation=implementation, rngs=rngs) for _ in range(BLOCKS)])
        self.final_norm = RMSNorm(WIDTH, dtype=dtype, implementation=implementation, rngs=rngs)

    def __call__(self, tokens):
        stream = self.tokens(tokens)
        # The first sum is of two embeddings: this byte's and the one before's.
        branch = self.previous(jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1])
        for block in self.blocks:
            # remat: the backward pass runs the block's norms again instead of keeping what they produced
            branch, stream = nnx.remat(lambda block, *xs: block(*xs))(block, branch, stream)
        return self.tokens.attend(self.final_norm(branch + stream)).astype(jnp.float32)


def loss_of(model, text):
    """Mean cross entropy of the next byte, in nats. text: [batch, CONTEXT + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()


evaluate = nnx.jit(loss_of)


@nnx.jit
def train_step(model, optimizer, text):
    loss, gradients = nnx.value_and_grad(loss_of)(model, text)
    optimizer.update(model, gradients)
    return loss, gradients


@nnx.jit
def next_logits(model, tokens, length):
    return model(tokens[None])[0, length - 1]


def read_text(limit=8_000_000):
    """The standard library's sources, every tenth file held out. Returns (training bytes, held-out bytes)."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib"}
    files = [f for f in sorted(library.rglob("*.py")) if not skipped & set(f.parts)]
    held_out, files = files[::10], sorted(library.glob("LICENSE*")) + [f for i, f in enumerate(files) if i % 10]
    join = lambda fs: np.frombuffer(b"\n".join(f.read_bytes() for f in fs)[:limit], np.uint8)
    return join(files), join(held_out)


def batches(text, rng, number, size=BATCH):
    starts = rng.integers(0, len(text) - CONTEXT - 1, (number, size, 1))
    return text[starts + np.arange(CONTEXT + 1)].astype(np.int32)


def sample(model, text, rng, count=120, temperature=0.6):
    """`text` and `count` more bytes, each drawn from what the model predicts after the last CONTEXT bytes."""
    for _ in range(count):
        window = np.frombuffer(text[-CONTEXT:].ljust(CONTEXT), np.uint8).astype(np.int32)
        logits = np.asarray(next_logits(model, window, min(len(text), CONTEXT))) / temperature
        text += bytes([int(np.argmax(logits + rng.gumbel(size=VOCABULARY)))])
    return text.decode("utf-8", "replace")


def norms_alone(dtype, implementation, repeats=20):
    """Median seconds for the step's norms by themselves: forward twice (remat) and backward, with nothing between them."""
    x = jnp.ones((BATCH, CONTEXT, WIDTH), dtype)
    scales = jnp.ones((2 * BLOCKS, WIDTH))

    @jax.checkpoint
    def pair(carry, scale):
        return jax_fusednorm.add_rms_norm(*carry, scale, implementation=implementation), None

    chain = lambda x, scales: sum(a.astype(jnp.float32).sum() for a in jax.lax.scan(pair, (x, x), scales)[0])
    run = jax.jit(jax.grad(chain, argnums=(0, 1)))
    jax.block_until_ready(run(x, scales))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(x, scales))
        times.append(time.perf_counter() - start)
    return np.median(times)


def plot(path, losses, times):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, steps) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained")
    for run, style in zip(RUNS, ({"lw": 4, "alpha": 0.4}, {"lw": 1, "color": "black", "ls": "--"})):
        curves.plot(np.arange(1, len(losses[run]) + 1), losses[run], label=run, **style)
    curves.set(xlabel="step", ylabel="training loss, nats per byte", title="the two runs, same weights and batches")
    curves.legend()
    steps.boxplot([1e3 * np.array(times[run]) for run in RUNS], tick_labels=RUNS, showfliers=False)
    steps.set(ylabel="ms per step", title="time per step", ylim=(0, None))
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of activations, not parameters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="train_lm.png")
    arguments = parser.parse_args()
    dtype, began = jnp.dtype(arguments.dtype), time.perf_counter()

    training, held_out = read_text()
    rng = np.random.default_rng(arguments.seed)
    data, unseen = batches(training, rng, arguments.steps), batches(held_out, rng, 1, 4 * BATCH)[0]
    print(f"text: {len(training):,} bytes to train on, {len(held_out):,} held out")

    models, optimizers = {}, {}
    for run in RUNS:
        models[run] = LanguageModel(dtype=dtype, implementation=run, rngs=nnx.Rngs(arguments.seed))
        schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, arguments.steps // 10, arguments.steps, 3e-4)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))
        optimizers[run] = nnx.Optimizer(models[run], optimizer, wrt=nnx.Param)
    parameters = sum(p.size for p in jax.tree.leaves(nnx.state(models["auto"], nnx.Param)))
    activation = jax.ShapeDtypeStruct((BATCH, CONTEXT, WIDTH), dtype)
    scale = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    chosen = jax_fusednorm.explain(jax_fusednorm.add_rms_norm, activation, activation, scale)
    print(f"model: {parameters:,} parameters, {BLOCKS} blocks, width {WIDTH}, {dtype.name}; {BATCH} x {CONTEXT} bytes a step")
    print(f"'auto' on {jax.default_backend()}: {chosen[jax.default_backend()]}")

    losses, times = {run: [] for run in RUNS}, {run: [] for run in RUNS}
    progress = tqdm(data, desc="training both", unit="step", mininterval=1)
    for step, text in enumerate(progress):
        for run in RUNS[:: 1 if step % 2 else -1]:  # neither run is always the one that goes first
            start = time.perf_counter()
            losses[run].append(float(train_step(models[run], optimizers[run], text)[0]))
            times[run].append(time.perf_counter() - start)
        progress.set_postfix({run: f"{losses[run][-1]:.3f}" for run in RUNS}, refresh=False)
    times = {run: t[2:] for run, t in times.items()}  # the first steps compile

    print(f"\n{'step':>9} {'auto':>9} {'jnp':>9} {'difference':>11}")
    shown = sorted({*np.linspace(1, arguments.steps, 9, dtype=int).tolist()})
    for step in shown:
        a, b = (losses[run][step - 1] for run in RUNS)
        print(f"{step:>9} {a:9.4f} {b:9.4f} {a - b:+11.5f}")
    a, b = (float(evaluate(models[run], unseen)) for run in RUNS)
    print(f"{'held out':>9} {a:9.4f} {b:9.4f} {a - b:+11.5f}")

    step_ms = {run: 1e3 * np.median(times[run]) for run in RUNS}
    alone_ms = {run: 1e3 * norms_alone(dtype, run) for run in RUNS}
    print(f"\n{'median ms':<14}{'auto':>9}{'jnp':>9}")
    for what, ms in (("whole step", step_ms), ("its norms", alone_ms)):
        print(f"{what:<14}{ms['auto']:9.2f}{ms['jnp']:9.2f}   {ms['jnp'] / ms['auto']:.2f}x")
    share = 100 * alone_ms["jnp"] / step_ms["jnp"]
    print(f"The norms, run by themselves, take {share:.1f} % of a jnp step; the rest is the same work in both runs.")

    print("\n120 bytes by the 'auto' run, after `def get(self, name):`")
    text = sample(models["auto"], b"    def get(self, name):\n        ", rng)
    print(*("    | " + line for line in text.splitlines()), sep="\n")
    plot(arguments.output, losses, times)
    print(f"\nplot: {arguments.output}")

    nnx.update(models["jnp"], nnx.state(models["auto"], nnx.Param))
    (loss, gradients), (jnp_loss, jnp_gradients) = (train_step(models[run], optimizers[run], data[0]) for run in RUNS)
    apart = jax.tree.map(lambda x, y: float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)), gradients, jnp_gradients)
    difference = np.abs(np.array(losses["auto"]) - np.array(losses["jnp"]))
    checks = [
        ("one more step of both, from the 'auto' weights: loss differs by", abs(float(loss - jnp_loss)), LOSS_TOLERANCE),
        ("its gradients: relative difference, worst parameter", max(jax.tree.leaves(apart)), GRADIENT_TOLERANCE),
        ("loss of every step: largest difference", difference.max(), CURVE_TOLERANCE),
        ("held-out loss of the worse run, nats per byte (uniform guess: 5.5)", max(a, b), HELD_OUT_LIMIT),
    ]
    print()
    checks = [(what, value, limit[dtype.name]) for what, value, limit in checks]
    for what, value, limit in checks:
        print(f"{'PASS' if value <= limit else 'FAIL'}  {what}: {value:.2g} <= {limit:g}")  # NaN fails too
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0 if all(value <= limit for _, value, limit in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
