"""Times every op as models call it: each implementation this machine has, jnp, and a copy of as many bytes.

One jitted call and the wait for its result, dispatch and the memory of new results included, for a copy too. Bytes: the operands once and
the results once.
"""

import functools
import json
import math

import jax
import numpy as np

from jax_fusednorm.core import lowering, selfcheck

from . import calls, info, status, timing
from .report import Report, progress

COPY = "copy"
NOISE = 0.3  # a spread above this is marked


def contestants(call, tokens, dtype, implementations):
    """({name: function that waits for its result}, the bytes that the op moves, the operations that XLA counts in its jnp form)"""
    rng = np.random.default_rng(0)
    operands = jax.device_put(call.operands(lambda *shape: selfcheck.draw(rng, shape, dtype), tokens, call.model))
    options = call.options(call.model)[0]
    plain = functools.partial(call.op, implementation="jnp", **options)
    moved = lowering.bytes_of(jax.tree.leaves((operands, jax.eval_shape(plain, *operands))))
    copied = jax.device_put(np.ones(moved // 8, np.float32))

    def waiting(f, *arrays):
        compiled = jax.jit(f)
        return lambda: jax.block_until_ready(compiled(*arrays))

    found = {i: waiting(functools.partial(call.op, implementation=i, **options), *operands) for i in implementations}
    lowered = jax.jit(plain).lower(*operands)
    counted = lowered.cost_analysis() or lowered.compile().cost_analysis()  # on a GPU the compiled program alone is counted
    return {**found, COPY: waiting(lambda a: a.copy(), copied)}, moved, counted["flops"]


def run(arguments):
    """The record of every contestant of every call."""
    # a stand-in for Metal's driver is no GPU
    own = [k for k in calls.kernels() if k != "metal" or lowering.on_apple_silicon()]
    implementations = arguments.implementations or [*own, "jnp"]
    todo = [(call, tokens) for call in calls.chosen(arguments.ops) for tokens in arguments.tokens]
    records = []
    with progress(len(todo)) as step:
        for call, tokens in todo:
            step(f"{call.name}, {tokens} tokens")
            fields, moved, flops = contestants(call, tokens, arguments.dtype, implementations)
            for name, times in timing.measure(fields, arguments.rounds).items():
                records.append(dict(op=call.name, tokens=tokens, models=call.models, width=call.model, dtype=arguments.dtype, contestant=name,
                                    bytes=moved, flops=flops, **timing.summary(times)))
    return records


def grouped(records):
    """{(op, tokens): {contestant: record}}"""
    groups = {}
    for r in records:
        groups.setdefault((r["op"], r["tokens"]), {})[r["contestant"]] = r
    return groups


def rows_of(groups):
    for (op, tokens), found in groups.items():
        best = min((r["median_s"] for name, r in found.items() if name not in ("jnp", COPY)), default=math.nan)
        figures = [f"{1e6 * r['median_s']:.{1 if r['median_s'] < 1e-4 else 0}f}{'?' if r['spread'] > NOISE else ''}" for r in found.values()]
        moved = next(iter(found.values()))["bytes"]
        rate = [f"{1e-9 * moved / best:.3g}", *(f"{found[name]['median_s'] / best:.2f}x" if name in found else "" for name in ("jnp", COPY))]
        yield [f"{op}, {tokens}", f"{moved / 1e6:.3g}", *figures, *([""] * 3 if math.isnan(best) else rate)]


def break_even(groups):
    """The fewest bytes from which on metal was faster than host in every call; None where it was not in the largest."""
    both = sorted((found["metal"]["bytes"], found["metal"]["median_s"] < found["host"]["median_s"])
                  for found in groups.values() if {"metal", "host"} <= set(found))
    least = None
    for moved, faster in reversed(both):
        if not faster:
            break
        least = moved
    return least


def peak():
    """Operations a second of a float32 matrix product."""
    n = 1024
    square = jax.device_put(np.ones((n, n), np.float32))
    product = jax.jit(lambda a: a @ a)
    [times] = timing.measure({"product": lambda: jax.block_until_ready(product(square))}, 5).values()
    return 2 * n**3 / times.min()


def draw(records, title, path):
    """Operations a second over operations a byte: under a copy's rate and a matrix product's. Large: the calls with the most tokens."""
    from matplotlib.figure import Figure

    most = max(r["tokens"] for r in records)
    rate = max(r["bytes"] / r["median_s"] for r in records if r["contestant"] == COPY and r["tokens"] == most)
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    found = [r for r in records if r["contestant"] != COPY]
    x = np.geomspace(0.5 * min(r["flops"] / r["bytes"] for r in found), 2 * max(r["flops"] / r["bytes"] for r in found), 200)
    axes.plot(x, 1e-9 * np.minimum(rate * x, peak()), "k--", label=f"copy of {most} tokens' bytes, {1e-9 * rate:.3g} GB/s; matrix product")
    names, ops = (list(dict.fromkeys(r[field] for r in found)) for field in ("contestant", "op"))
    for r in found:
        axes.plot(r["flops"] / r["bytes"], 1e-9 * r["flops"] / r["median_s"], "osD^vPX*<>"[ops.index(r["op"]) % 10],
                  color=f"C{names.index(r['contestant'])}", markersize=9 if r["tokens"] == most else 4)
    for index, name in enumerate(names):
        axes.plot([], [], "s", color=f"C{index}", label=name)
    for index, op in enumerate(ops):
        axes.plot([], [], "osD^vPX*<>"[index % 10], color="gray", label=op)
    axes.set(xscale="log", yscale="log", title=title, ylabel="10^9 operations a second",
             xlabel="operations a byte (XLA's count of the jnp form)")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def main(arguments):
    calls.refuse_what_cannot_run(arguments.implementations)
    report = Report()
    about = list(info.describe())
    for line in about:
        report.line(line)
    records = run(arguments)
    groups = grouped(records)
    names = list(next(iter(groups.values())))
    report.table(f"us a call, {arguments.dtype} (?: half the interquartile range is above {100 * NOISE:.0f} %)",
                 ["op, tokens", "MB", *names, "GB/s", "jnp / best", "copy / best"], list(rows_of(groups)))
    if (least := break_even(groups)) is not None:
        report.line(f"metal is faster than host from {least} bytes on; {lowering.METAL_VARIABLE}={least} lets auto know "
                    f"(now: {lowering.METAL_MIN_BYTES:.0f})")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "records": records}, indent=1), encoding="utf-8")
        report.line(f"written to {arguments.json}")
    if arguments.plot:
        try:
            draw(records, about[0], arguments.plot)
        except ImportError:
            report.line("no plot: matplotlib is not installed (`pip install matplotlib`)")
            return status.CANNOT
        report.line(f"drawn to {arguments.plot}")
    return status.RIGHT
