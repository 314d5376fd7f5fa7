"""Time our ops against plain JAX, torch and MLX, side by side in one process.

    python benchmarks/run.py [--op add_rms_norm|rms_norm|gated_group_rms_norm|head_rms_norm_rope|qk_rms_norm_rope
                             |qk_rms_norm_rope_paged|all] [--cases decode,prefill] [--dtypes bfloat16,float32,float16] [--backward] [--platform cpu|cuda]
                             [--implementation auto|kernel|host|...] [--torch-compile] [--quick] [--json FILE] [--check]

Shapes are those of tests/cases.py, each in every dtype asked for, the scale in that dtype too. In every round each
contestant runs once, in rotated order after a short pause, so drift of the machine meets all alike; a figure is the median
over the rounds with half the interquartile range as its spread. Two ways of timing:

  one call      one jitted call (eager in torch and MLX) and the wait for its result: what a user sees, dispatch included.
                Large results and temporaries are memory mapped afresh, and its page faults can outweigh the arithmetic.
  in a program  what one more op costs inside one jitted program, where memory is reused: (long chain of dependent ops -
                short chain) / difference in length. Between two ops stands a custom call that does nothing (0.1 us,
                counted), which XLA cannot fuse across, as it cannot across a model's matmuls. Torch and MLX: the same
                chain, small cases only.

Large cases do not fit the last-level cache. Small ones are cache-resident here, as the activations of a decode step are.
The baseline is the faster of our own jnp lowering and the textbook formula, both under jit. --backward times forward and
backward together: the outputs, and the gradients of x, residual and scale for given cotangents (prefill cases only).

Bytes of ours: one read of each activation and cotangent and one write of each result, per element of the dtype's size.
add_rms_norm: 2 reads + 2 writes; its backward reads x, residual and two cotangents and writes the one gradient that both
share: 9 in all. rms_norm: 1 + 1; its backward reads x and a cotangent and writes one gradient: 5 in all. gated_group_rms_norm: 2 + 1;
its backward reads y, the gate and a cotangent and writes two gradients: 8 in all. head_rms_norm_rope: as rms_norm.
qk_rms_norm_rope and qk_rms_norm_rope_paged: the same of q and of k, of a quarter of its heads: 2.5, and 6.25 with the backward; pages are donated, and written in place. Scales,
positions and tables: not counted.

At the end each claim is judged by its worst shape: PASS, FAIL, or NOISY where a spread is above 30 %.

Needs: jax_fusednorm, rich, C and C++ compilers. torch and mlx take part when they can be imported.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import pathlib
import platform
import sys

import jax
import jaxlib
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jax_fusednorm
from jax_fusednorm.cli.timing import PAUSE, measure, summary

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]
import cases  # noqa: E402
import gpu  # noqa: E402
import native  # noqa: E402
import peers  # noqa: E402

CASES = {"gated_group_rms_norm": {"decode": cases.GATED_DECODE, "prefill": cases.GATED_PREFILL},
         "head_rms_norm_rope": {"decode": cases.HEADS_DECODE, "prefill": cases.HEADS_PREFILL},
         "qk_rms_norm_rope": {"decode": cases.HEADS_DECODE, "prefill": cases.HEADS_PREFILL},
         "qk_rms_norm_rope_paged": {"decode": cases.PAGED_DECODE, "prefill": cases.PAGED_PREFILL}}
NORMS = {"decode": cases.DECODE, "prefill": cases.PREFILL}
QUICK = ((1, 1024), (1, 8192), (16, 1024), (16, 8192), (2048, 4096), (1, 7680), (16, 7680), (2048, 7680),
         *((tokens, 32, 128) for tokens in (1, 8, 16, 2048)))
# Large prefill cases: at least so many times faster than the baseline, by (op, backward) and dtype; and at least this share of the triad.
FASTER = {("add_rms_norm", False): {"bfloat16": 6, "float32": 4}, ("add_rms_norm", True): {"bfloat16": 4, "float32": 3},
          ("gated_group_rms_norm", False): {"bfloat16": 8}, ("gated_group_rms_norm", True): {"bfloat16": 4},
          ("head_rms_norm_rope", False): {"bfloat16": 10}, ("head_rms_norm_rope", True): {"bfloat16": 6},
          ("qk_rms_norm_rope_paged", False): {"bfloat16": 8}}
SHARE = {"add_rms_norm": 0.7, "gated_group_rms_norm": 0.45, "head_rms_norm_rope": 0.4, "qk_rms_norm_rope_paged": 0.4}
CHAIN = {"decode": (10, 50), "prefill": (4, 8)}  # short and long
NOISE = 0.3  # a spread above this on either side says nothing about the ratio


def run_case(op, kind, case, arguments):
    """The records of one case: one for each contestant and way of timing."""
    short, long = CHAIN[kind]
    field = list(peers.contestants(op, case, backward=arguments.backward, lengths=(short, long),
                                   implementation=arguments.implementation, torch_compile=arguments.torch_compile))
    calls = {(c.name, "one call"): c.one for c in field}
    calls |= {(c.name, length): chain for c in field for length, chain in zip((short, long), c.chains)}
    times = measure(calls, arguments.rounds[kind])
    samples = {key: t for key, t in times.items() if key[1] == "one call"}
    for name in [name for name, way in times if way == long]:
        samples[name, "in a program"] = (times[name, long] - times[name, short]) / (long - short)
    moved = peers.OPS[op].moved[arguments.backward] * jax.numpy.dtype(case.dtype).itemsize * math.prod(case.shape)
    for (name, way), sample in samples.items():
        yield dict(op=op, kind=kind, case=case.name, shape=list(case.shape), dtype=case.dtype, backward=arguments.backward,
                   way=way, contestant=name, bytes=moved, **summary(sample))


def compare(records, triad):
    """One row for each case and way: every contestant's figure, ours in GB/s and % of triad, and baseline / ours."""
    rows = {}
    for r in records:
        key = (r["op"], r["dtype"], r["kind"], r["way"], r["case"])
        row = rows.setdefault(key, {"bytes": r["bytes"], "shape": r["shape"], "all": {}})
        row["all"][r["contestant"]] = r
    for row in rows.values():
        ours = row["all"][peers.OURS]["median_s"]
        candidates = [row["all"][name] for name in (peers.OUR_JNP, peers.PLAIN)]
        baseline = min(candidates, key=lambda r: np.nan_to_num(r["median_s"], nan=np.inf))
        row["ratio"] = baseline["median_s"] / ours
        row["noisy"] = not max(baseline["spread"], row["all"][peers.OURS]["spread"]) <= NOISE  # NaN too
        row["rate"] = 1e-9 * row["bytes"] / ours
        row["large"] = row["bytes"] >= native.cache_bytes()
        row["share"] = row["rate"] / triad if triad and row["large"] else None
    return rows


def show(console, rows, backward):
    for group in dict.fromkeys(key[:4] for key in rows):
        op, dtype, kind, way = group
        members = {key[4]: row for key, row in rows.items() if key[:4] == group}
        unit, factor = ("us", 1e6) if kind == "decode" else ("ms", 1e3)
        direction = "forward + backward" if backward else "forward"
        table = Table(title=f"{op}, {dtype}, {kind}, {direction}: {way}, {unit}", title_justify="left")
        names = list(next(iter(members.values()))["all"])
        table.add_column("shape")
        for name in [*names, "GB/s", "% triad", "baseline / ours"]:
            table.add_column(name, justify="right")
        for row in members.values():
            cells = [f"{factor * row['all'][n]['median_s']:.4g} ±{100 * row['all'][n]['spread']:.0f}%" for n in names]
            share = f"{100 * row['share']:.0f}" if row["share"] else "in cache"
            table.add_row("x".join(map(str, row["shape"])), *cells, f"{row['rate']:.1f}", share, f"{row['ratio']:.2f}x")
        console.print(table)


def verdicts(rows, backward):
    """(claim, worst value, PASS, FAIL or NOISY) for what was measured. Prefill: only cases that the cache cannot hold."""
    found = []
    for op, dtype, kind, way in dict.fromkeys(key[:4] for key in rows):
        members = {key[4]: row for key, row in rows.items() if key[:4] == (op, dtype, kind, way)}
        floors = FASTER.get((op, backward), {})
        if kind == "prefill":
            members = {name: row for name, row in members.items() if row["large"]}
            if not floors or not members:
                continue
        noisy = [name for name, row in members.items() if row["noisy"]]
        judge = lambda holds: f"NOISY in {len(noisy)} of {len(members)}" if noisy else "PASS" if holds else "FAIL"
        name, worst = min(members.items(), key=lambda item: np.nan_to_num(item[1]["ratio"]))
        text, ratio = f"{op} {dtype} {kind}{' fwd+bwd' if backward else ''}, {way}", worst["ratio"]
        if kind == "decode":
            claim = f"{text}: at most 1.1x the baseline's time"
            found.append((claim, f"{1 / ratio:.2f}x ({name})", judge(ratio >= 1 / 1.1)))
        elif dtype in floors:
            claim = f"{text}: at least {floors[dtype]}x faster than the baseline"
            found.append((claim, f"{ratio:.2f}x ({name})", judge(ratio >= floors[dtype])))
        if kind == "prefill" and dtype == "bfloat16" and not backward and worst["share"]:
            name, worst = min(members.items(), key=lambda item: np.nan_to_num(item[1]["share"]))
            share = worst["share"]
            found.append((f"{text}: at least {100 * SHARE[op]:.0f} % of triad", f"{100 * share:.0f} % ({name})", judge(share >= SHARE[op])))
    return found


def machine(implementation):
    """What ran where, for the head of the report and the JSON file."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    x = jax.ShapeDtypeStruct((16, 4096), "bfloat16")
    chosen = jax_fusednorm.explain(jax_fusednorm.add_rms_norm, x, x, implementation=implementation)[jax.default_backend()]
    return {"cpu": f"{model}, {os.cpu_count()} cores, last-level cache {native.cache_bytes() / 2**20:.0f} MiB",
            "python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__,
            "jax_fusednorm": jax_fusednorm.__version__, "backend": jax.default_backend(), "ours": str(chosen),
            "torch": peers.version("torch") or "left out (not importable)",
            "mlx": peers.version("mlx.core") or "left out (not importable)"}


def selected(arguments):
    """Every (op, kind, case) asked for; cases.py names some shapes once for each dtype."""
    for op in peers.OPS if arguments.op == "all" else (arguments.op,):
        if arguments.backward and len(peers.OPS[op].moved) == 1:
            continue
        shapes_of = CASES.get(op, NORMS)
        for dtype in arguments.dtypes.split(","):
            for kind in arguments.cases.split(","):
                shapes = dict.fromkeys(case.shape for case in shapes_of[kind])
                if arguments.quick:
                    shapes = [shape for shape in shapes if shape in QUICK]
                for shape in shapes if kind == "prefill" or not arguments.backward else ():
                    yield op, kind, cases.Case("x".join(map(str, shape)), shape, dtype, dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=(*peers.OPS, "all"), default="add_rms_norm")
    parser.add_argument("--cases", default="decode,prefill")
    parser.add_argument("--dtypes", default="bfloat16,float32,float16")
    parser.add_argument("--backward", action="store_true", help="forward and backward together, prefill cases only")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu", help="cuda: device times on an NVIDIA GPU, see gpu.py; "
                        "of the other options only --op and --implementation count there")
    parser.add_argument("--implementation", default="auto", help="of ours")
    parser.add_argument("--torch-compile", action="store_true", help="add torch.compile of the formula")
    parser.add_argument("--quick", action="store_true", help="a few shapes, fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every claim holds")
    arguments = parser.parse_args()
    if arguments.platform == "cuda":
        return gpu.main(arguments.implementation, arguments.op)
    arguments.rounds = {"decode": 9, "prefill": 7} if arguments.quick else {"decode": 25, "prefill": 11}

    console = Console(width=None if sys.stdout.isatty() else 180)
    about, triad, records, load = machine(arguments.implementation), native.Triad(), [], os.getloadavg()[0]
    triad.run(PAUSE)
    gc.disable()
    todo = list(selected(arguments))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for op, kind, case in progress.track(todo, description="timing"):
            records += run_case(op, kind, case, arguments)
            gc.collect()
            triad.run(PAUSE)

    about["triad"] = "left out (no C compiler with OpenMP)" if not triad.rates else (
        f"{triad.best:.1f} GB/s, {triad.threads} threads, the best of {len(triad.rates)} in this run "
        f"(first {triad.rates[0]:.1f}, median {np.median(triad.rates):.1f}, last {triad.rates[-1]:.1f})")
    about["load"] = f"{load:.1f} before, {os.getloadavg()[0]:.1f} after (this run itself adds up to {os.cpu_count()})"
    about["wall"] = "between the ops of a program" if native.wall() else "left out: XLA may fuse across the ops of a program"
    for name, value in about.items():
        console.print(f"{name:>14}  {value}", highlight=False)
    rows = compare(records, triad.best)
    show(console, rows, arguments.backward)
    claims = verdicts(rows, arguments.backward)
    for text, value, verdict in claims:
        style = {"PASS": "green", "FAIL": "red"}.get(verdict, "yellow")
        console.print(f"{verdict}  {text}: {value}", highlight=False, style=style)
    if arguments.json:
        report = {"machine": about, "triad_gb_s": triad.rates, "records": records}
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1))
    return int(arguments.check and any(verdict != "PASS" for *_, verdict in claims))


if __name__ == "__main__":
    sys.exit(main())
