"""Time matmul_partial_rms_norm against matrix products alone, and the kernel that multiplies against XLA's product before the norm.

    python benchmarks/matmul.py [--shape N K NORMED] [--rows 1,4,12] [--dtypes bfloat16,float32] [--rounds 25] [--check] [--platform cpu|cuda]

A turn is eight jitted calls in a row, each waited for, as tokens follow one another; round by round in rotated order. A figure is a
call's time, the median over the rounds. The weights rotate, so that none is in the cache when it is wanted. Ours with few rows ("one
kernel") and with many ("XLA and a norm") are both timed for every number of rows: where they cross is what FEW_ROWS in
jax_fusednorm/ops/matmul_partial_rms_norm.py says. The others multiply, and norm nothing: XLA's lax.dot_general in both layouts of the
weight, x @ weight.T, and torch's linear where torch can be imported.

--platform cuda: microseconds on the device, as gpu.py counts them, and in brackets the kernels of a call; "ours" is what FEW_ROWS chooses.

At the end, on a CPU for one row: the claims, PASS or FAIL, with how many times longer the fastest of the others takes, the median over the
rounds, and where that median lies with 95 %. "No slower" fails if all of that range is below 1.
"""

import argparse
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jax_fusednorm
import run  # before gpu, which needs the path that it makes
import gpu
import native

few_rows = sys.modules["jax_fusednorm.ops.matmul_partial_rms_norm"].FEW_ROWS
LAYOUTS = {"[N, K]": True, "[K, N]": False}
CALLS = 8  # of a turn


def ratio_of(theirs, ours):
    """How many times longer theirs take: the median over the rounds, and the range that the median of others drawn from them has with 95 %."""
    ratios = theirs / ours
    drawn = np.random.default_rng(0).choice(ratios, (1000, len(ratios)))
    return np.median(ratios), *np.percentile(np.median(drawn, axis=1), (2.5, 97.5))


def turn_of(call, all_operands):
    """A function of nothing: call(*the next operands), CALLS times."""
    following = itertools.cycle(all_operands)

    def turn():
        for _ in range(CALLS):
            jax.block_until_ready(call(*next(following)))
    return turn


def ours(operands, transpose_b, most):
    """The op, jitted and compiled with `most` as the most rows of the kernel that multiplies."""
    jitted = jax.jit(functools.partial(jax_fusednorm.matmul_partial_rms_norm, transpose_b=transpose_b))
    before = dict(few_rows)
    few_rows.update(dict.fromkeys(few_rows, ((most, most),) * 2))
    try:
        jitted(*operands)  # compiles
    finally:
        few_rows.update(before)
    return jitted


def contestants(shape, rows, dtype):
    outputs, width, normed = shape
    rng = np.random.default_rng(0)
    x, scale = jnp.asarray(rng.standard_normal((rows, width)), dtype), jnp.ones(normed, dtype)
    count = -(-2 * native.cache_bytes() // (outputs * width * x.dtype.itemsize)) + 1
    of_n_and_k = [jnp.asarray(rng.standard_normal((outputs, width), np.float32), dtype) for _ in range(count)]
    weights = {"[N, K]": of_n_and_k, "[K, N]": [jnp.array(w.T) for w in of_n_and_k]}
    for layout, transpose_b in LAYOUTS.items():
        operands = [(x, w, scale) for w in weights[layout]]
        product = jax.jit(lambda x, w, _, axis=int(transpose_b): jax.lax.dot_general(x, w, (((1,), (axis,)), ((), ()))))
        for name, most in (("one kernel", 2**31), ("XLA and a norm", -1)):
            yield f"{name} {layout}", turn_of(ours(operands[0], transpose_b, most), operands)
        yield f"dot_general {layout}", turn_of(product, operands)
    yield "x @ weight.T", turn_of(jax.jit(lambda x, w: x @ w.T), [(x, w) for w in of_n_and_k])
    try:
        import torch
    except ImportError:
        return
    of_torch = [torch.from_numpy(np.array(a, np.float32)).to(getattr(torch, dtype)) for a in (x, *of_n_and_k)]
    yield "torch", turn_of(torch.nn.functional.linear, [(of_torch[0], w) for w in of_torch[1:]])


def on_gpu(shape, rows, dtype):
    """{contestant: (us on the device, kernels)}"""
    outputs, width, normed = shape
    keys = jax.random.split(jax.random.key(0), 1 + int(2 * gpu.CACHE // (outputs * width * jnp.dtype(dtype).itemsize)) + 1)
    x, scale = jax.random.normal(keys[0], (rows, width), dtype), jnp.ones(normed, dtype)
    found = {}
    for layout, transpose_b in LAYOUTS.items():
        operands = [(x, jax.random.normal(key, (outputs, width) if transpose_b else (width, outputs), dtype), scale) for key in keys[1:]]
        op = functools.partial(jax_fusednorm.matmul_partial_rms_norm, transpose_b=transpose_b)
        forms = {"ours": jax.jit(op), "our jnp": jax.jit(functools.partial(op, implementation="jnp")),
                 "one kernel": ours(operands[0], transpose_b, 2**31), "XLA and a norm": ours(operands[0], transpose_b, -1)}
        measured = gpu.measure({name: (form, jax.block_until_ready, operands) for name, form in forms.items()})
        found |= {f"{name} {layout}": of for name, of in measured.items()}
    return found


def main_on_gpu(arguments, console):
    for dtype in arguments.dtypes.split(","):
        found = {rows: on_gpu(arguments.shape, rows, dtype) for rows in map(int, arguments.rows.split(","))}
        table = Table("rows", *next(iter(found.values())), title=f"{dtype} {list(arguments.shape)}: microseconds (kernels)")
        for rows, of in found.items():
            table.add_row(str(rows), *(f"{us:.1f} ({kernels})" for us, kernels in of.values()))
        console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=3, type=int, default=(2112, 7168, 1536), metavar=("N", "K", "NORMED"), help="DeepSeek-V3's by default")
    parser.add_argument("--rows", default="1,4,8,12,16,32")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every claim holds")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    if arguments.platform == "cuda":
        return main_on_gpu(arguments, console)
    triad, claims, rates = native.Triad(), [], {}
    for dtype in arguments.dtypes.split(","):
        table = Table("rows", title=f"{dtype} {list(arguments.shape)}: milliseconds, and GB/s of weight")
        for rows in map(int, arguments.rows.split(",")):
            triad.run(run.PAUSE)
            rounds = run.measure(dict(contestants(arguments.shape, rows, dtype)), arguments.rounds)
            times = {name: np.median(t) / CALLS for name, t in rounds.items()}
            moved = arguments.shape[0] * arguments.shape[1] * jnp.dtype(dtype).itemsize
            if len(table.columns) == 1:
                for name in times:
                    table.add_column(name)
            table.add_row(str(rows), *(f"{1e3 * t:.2f}\n{moved / t / 1e9:.1f}" for t in times.values()))
            if rows == 1:
                fused, other = (min((name for name in times if name.startswith("one kernel") == mine), key=times.get) for mine in (True, False))
                ratio, low, high = ratio_of(rounds[other], rounds[fused])
                text, holds = ("at least 1.3x faster than", ratio >= 1.3) if dtype == "bfloat16" else ("no slower than", high >= 1)
                claims.append((f"{dtype}: {text} the fastest of the others", f"{ratio:.2f}x ({low:.2f} to {high:.2f})", holds))
                rates[dtype] = moved / times[fused] / 1e9
        console.print(table)
    console.print(f"triad {triad.best:.1f} GB/s, the best of {len(triad.rates)} (median {np.median(triad.rates or [np.nan]):.1f})", highlight=False)
    if "bfloat16" in rates and triad.best:
        share = rates["bfloat16"] / triad.best
        claims.append(("bfloat16: at least 60 % of triad", f"{100 * share:.0f} %", share >= 0.6))
    for text, value, holds in claims:
        console.print(f"{'PASS' if holds else 'FAIL'}  {text}: {value}", highlight=False)
    return int(arguments.check and not all(holds for *_, holds in claims))


if __name__ == "__main__":
    sys.exit(main())
