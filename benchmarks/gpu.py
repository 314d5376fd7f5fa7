"""`run.py --platform cuda`: device times on an NVIDIA GPU, beside XLA's fusions, a copy, and of add_rms_norm other libraries' kernels.

A figure is the sum of the durations of one call's kernels and copies, as CUPTI reports them to jax.profiler, the same way for JAX and
for torch; the median of the calls. Gaps between kernels and the time to launch them are left out. Calls go round several sets of
operands and results that are together larger than the GPU's cache (decode shapes: 64 sets, which still fit). The peers get the very
arrays that JAX gets, and are left out, with a word, where they do not import; their results are compared with ours.

  copy          cudaMemcpy, device to device: half of the op's bytes read, half written
  xla           the textbook formula under jit: XLA's own fusions
  ours storage  ours with sum_rounding="storage": the derivative is taken at the stored sum, which is all that the backward pass reads

add_rms_norm reads 2 arrays and writes 2; with its backward pass 9 in all (the backward pass reads both operands and two cotangents, and
writes the one gradient that both operands share). Ours storage, QuACK and Liger read the sum there instead of the operands: 8. What the
other ops move is said in run.py.

Needs: jax with a GPU, rich. torch, quack-kernels and liger-kernel take part when they can be imported.
"""

import collections
import functools
import gc
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import cases
import jax_fusednorm
import peers

PAUSE, GAP = 0.04, 2e7  # seconds of silence between two contestants, and the nanoseconds that tell it from a late launch
CALLS, ROUNDS = 20, 3   # a round: every contestant, `CALLS` times each
CACHE = 60e6
LAYERS = 40


def with_gradients(form, of):
    def both(*arrays):
        count = of.activations + 1  # and the scale; tables have no gradient
        operands, tables, cotangents = arrays[:count], arrays[count:-of.results], list(arrays[-of.results:])
        out, pull = jax.vjp(lambda *operands: form(*operands, *tables), *operands)
        # what lies between the two passes of a model needs the results, and makes the cotangents
        out, cotangents = jax.lax.optimization_barrier((out, cotangents))
        gradient, *others = pull(cotangents)
        return *out, gradient, *(others if of.all_gradients else others[-1:])
    return both


def jax_contestants(op, case, backward, implementation):
    of = peers.OPS[op]
    forms = {"ours": of.ours(case, implementation), "our jnp": of.ours(case, "jnp"), "xla": of.plain(case)}
    if op == "add_rms_norm" and backward:
        forms["ours storage"] = lambda *args: list(jax_fusednorm.add_rms_norm(
            *args, epsilon=peers.EPSILON, sum_rounding="storage", implementation=implementation))
    for name, form in forms.items():
        f = with_gradients(form, of) if backward else form
        yield name, peers.jitted(f, of.in_place)


def torch_contestants(backward):
    """(name, function of torch tensors) of every peer that can be imported."""
    import torch

    def quack():
        from quack.rmsnorm import rmsnorm
        return lambda x, residual, scale: rmsnorm(x, scale, residual=residual, eps=peers.EPSILON, prenorm=True)

    def liger():
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        return lambda x, residual, scale: LigerFusedAddRMSNormFunction.apply(x, residual, scale, peers.EPSILON, 0.0, "gemma", False)

    for name, load in (("quack", quack), ("liger", liger)):
        try:
            op = load()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue

        def forward(*operands, op=op):
            with torch.no_grad():
                return op(*operands)

        def both(x, residual, scale, *cotangents, op=op):
            operands = [a.detach().requires_grad_() for a in (x, residual, scale)]
            results = op(*operands)
            gradient, _, scale_gradient = torch.autograd.grad(results, operands, cotangents)
            return *results, gradient, scale_gradient

        yield name, both if backward else forward


def traced(work):
    """(start, duration) in nanoseconds of every kernel and copy that `work` causes, in order; and how often each CUDA launch was called."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    events, launches = [], collections.Counter()
    for plane in planes:
        for line in plane.lines:
            if "/device:GPU:0" in plane.name and line.name.startswith("Stream"):
                events += [(e.start_ns, e.duration_ns) for e in line.events]
            elif "/device" not in plane.name:
                launches.update(e.name for e in line.events if e.name.startswith("cu") and "Launch" in e.name)
    return np.array(sorted(events)), launches


def separated(events):
    """The events between two silences."""
    ends = np.maximum.accumulate(events.sum(1))
    return np.split(events, 1 + np.flatnonzero(events[1:, 0] - ends[:-1] > GAP))


def measure(contestants):
    """{name: (us of one call, kernels of one call)}; contestants: {name: (function, wait, its sets of operands)}."""
    order, times, kernels = list(contestants), collections.defaultdict(list), {}

    def block(name):
        call, wait, sets = contestants[name]
        kept = collections.deque(maxlen=len(sets))  # so that results, too, lie elsewhere each time
        for i in range(CALLS):
            kept.append(call(*sets[i % len(sets)]))
        wait(kept[-1])

    turns = [name for r in range(ROUNDS) for name in order[r % len(order):] + order[:r % len(order)]]

    def work():
        for name in turns:
            gc.collect()
            time.sleep(PAUSE)
            block(name)

    for name in order:
        block(name)  # compiles, and chooses
    blocks = separated(traced(work)[0])
    if len(blocks) != len(turns) or any(len(b) % CALLS for b in blocks):
        raise RuntimeError(f"the trace has {[len(b) for b in blocks]} kernels, which is not {CALLS} calls of each of {turns}")
    for name, b in zip(turns, blocks):
        times[name].append(b[:, 1].reshape(CALLS, -1).sum(1))
        kernels[name] = len(b) // CALLS
    return {name: (float(np.median(times[name])) / 1e3, kernels[name]) for name in order}


def agree(name, got, want):
    for g, w in zip(got, want):
        g, w = (np.asarray(a[:64].astype(jnp.float32)) for a in (g, w))
        off = np.linalg.norm(g - w) / np.linalg.norm(w)
        assert off < 1e-2, f"{name} is {off:.1e} off ours: it does not compute the same"


def run_case(op, case, backward, implementation):
    of = peers.OPS[op]
    moved = int(of.moved[backward] * jnp.dtype(case.dtype).itemsize * case.rows * case.width)
    count = int(min(64, max(2, -(-4 * CACHE // moved))))
    keys = jax.random.split(jax.random.key(0), count)
    shapes = [*peers.shapes(op, case), *peers.shapes(op, case)[:backward * of.results]]
    draw = jax.jit(lambda key: [jax.random.normal(k, shape, case.dtype) for k, shape in zip(jax.random.split(key, len(shapes)), shapes)])
    scale = 1 + 0.1 * jax.random.normal(jax.random.key(1), case.shape[-1:], case.dtype)
    drawn = [[[a] if i == of.in_place else a for i, a in enumerate(draw(key))] for key in keys]
    sets = [(*arrays[:of.activations], scale, *of.tables(case), *arrays[of.activations:]) for arrays in drawn]
    contestants = {name: (f, jax.block_until_ready, sets) for name, f in jax_contestants(op, case, backward, implementation)}
    copied = [(jax.random.normal(key, moved // 2 // 4),) for key in keys]
    contestants["copy"] = (jax.jit(lambda a: a.copy()), jax.block_until_ready, copied)
    jax.block_until_ready((sets, copied))
    want = jax.tree.map(jnp.copy, contestants["ours"][0](*sets[0]))
    if op == "add_rms_norm":
        try:
            import torch
        except ImportError as error:
            print(f"quack and liger are left out: {error}", file=sys.stderr)
        else:
            tensors = [tuple(torch.from_dlpack(a) for a in s) for s in sets]
            for name, f in torch_contestants(backward):
                agree(name, [jnp.from_dlpack(a.detach()) for a in f(*tensors[0])], want)
                contestants[name] = (f, lambda _: torch.cuda.synchronize(), tensors)
    agree("xla", contestants["xla"][0](*sets[0]), want)
    return measure(contestants)


def run_chain(rows, width, implementation):
    """(name, us a layer of a jitted chain on the device, CUDA launches of a run). An optimization barrier stands between two layers,
    where a model has a matmul: XLA would fuse its own layers with each other."""
    case = cases.Case("chain", (rows, width), "bfloat16", "bfloat16")
    x, residual = (jax.random.normal(jax.random.key(i), case.shape, case.dtype) for i in range(2))
    scales = 1 + 0.1 * jax.random.normal(jax.random.key(2), (LAYERS, width), case.dtype)
    runs, of = 10, peers.OPS["add_rms_norm"]
    for name, form in (("ours", of.ours(case, implementation)), ("xla", of.plain(case))):
        @jax.jit
        def chain(x, residual, scales, form=form):
            for scale in scales:
                x, residual = jax.lax.optimization_barrier(form(x, residual, scale))
            return x, residual

        def work():
            for _ in range(runs):
                time.sleep(PAUSE)
                jax.block_until_ready(chain(x, residual, scales))

        work()
        events, launches = traced(work)
        spans = [b.sum(1).max() - b[0, 0] for b in separated(events)]
        yield name, float(np.median(spans)) / 1e3 / LAYERS, {call: n / runs for call, n in launches.items()}


def table_of(op, backward, found):
    table = Table(title=f"{op}, bfloat16, forward{' + backward' if backward else ''}: us (kernels)", title_justify="left")
    columns = list(next(iter(found.values())))
    for name in ("shape", *columns, "% of copy", "xla / ours", "best peer / ours"):
        table.add_column(name, justify="right")
    for case, times in found.items():
        us = {name: time for name, (time, _) in times.items()}
        peers = [us[name] for name in ("quack", "liger") if name in us]
        table.add_row("x".join(map(str, case.shape)), *(f"{time:.1f} ({kernels})" for time, kernels in times.values()),
                      f"{100 * us['copy'] / us['ours']:.0f}", f"{min(us['xla'], us['our jnp']) / us['ours']:.2f}",
                      f"{min(peers) / us['ours']:.2f}" if peers else "")
    return table


def main(implementation, op):
    console = Console(width=None if sys.stdout.isatty() else 180)
    decision = jax_fusednorm.explain(jax_fusednorm.add_rms_norm, *[jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)] * 2)["cuda"]
    console.print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; ours: {decision}", highlight=False)
    for name, (forward, both) in cases.GPU_OPS.items():
        if op in (name, "all"):
            for backward, chosen in ((False, forward), (True, both)):
                if chosen:
                    console.print(table_of(name, backward, {case: run_case(name, case, backward, implementation) for case in chosen}))
    for case in cases.GPU_DECODE if op in ("add_rms_norm", "all") else ():
        for name, us, launches in run_chain(*case.shape, implementation):
            console.print(f"{LAYERS} layers in one program, {case.rows}x{case.width}, {name}: {us:.2f} us a layer; a run calls {launches}", highlight=False)
