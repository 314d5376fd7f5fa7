"""Compares every op, in every dtype and on every implementation this machine has, with the same op in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_fusednorm.core import selfcheck

from . import calls, info, status
from .report import Report, progress

TOKENS = 11


def _is_float(a):
    return jnp.issubdtype(a.dtype, jnp.floating)


def results_and_gradients(call, width, implementation, operands, cotangents):
    """All of them, under each of the call's sets of options. cotangents: of the results under one."""
    leaves, tree = jax.tree.flatten(operands)
    found = []
    for options in call.options(width):
        def of_floats(*floats, options=options):
            given = iter(floats)
            arrays = [next(given) if _is_float(a) else a for a in leaves]
            return jax.tree.leaves(call.op(*jax.tree.unflatten(tree, arrays), implementation=implementation, **options))

        floats = list(filter(_is_float, leaves))
        if call.differentiable:
            out, pull = jax.vjp(of_floats, *floats)
            found += [*out, *pull([c.astype(o.dtype) for c, o in zip(cotangents, out)])]
        else:
            found += of_floats(*floats)
    return found


def _where_float64_is_fast():
    """A CPU, where JAX was not told to leave it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def compare(call, dtype, implementations):
    """{implementation: None, or what is wrong with it}."""
    rng = np.random.default_rng(0)
    operands = call.operands(lambda *shape: selfcheck.draw(rng, shape, dtype), TOKENS, call.small)

    def run(implementation, arrays, bars):
        return jax.jit(lambda arrays, bars: results_and_gradients(call, call.small, implementation, arrays, bars))(arrays, bars)

    with jax.default_device(_where_float64_is_fast()), jax.enable_x64(True):
        wide = functools.partial(jax.tree.map, lambda a: a.astype(np.float64) if _is_float(a) else a)
        out = jax.eval_shape(functools.partial(call.op, implementation="jnp", **call.options(call.small)[0]), *wide(operands))
        cotangents = [selfcheck.draw(rng, leaf.shape, dtype) for leaf in jax.tree.leaves(out)]
        want = run("jnp", wide(operands), wide(cotangents))
    allowed = selfcheck.tolerance(jax.tree.leaves(operands))
    return {i: _failure(functools.partial(run, i, operands, cotangents), want, allowed) for i in implementations}


def _failure(run, want, allowed):
    """What is wrong with what run() returns, or None. A derivative whose kernel fails its self-check is right, by another implementation."""
    before = len(selfcheck.failures)
    try:
        differences = [selfcheck.difference(g, w, allowed) for g, w in zip(run(), want)]
    except Exception as error:  # whatever it is, it is what the report is for
        return f"{type(error).__name__}: {error}"
    wrong = [f"array {i} of {len(want)}: {d}" for i, d in enumerate(differences) if d]
    return next(iter([*wrong, *selfcheck.failures[before:]]), None)


def main(arguments):
    calls.refuse_what_cannot_run(arguments.implementations)
    report, failures, rows = Report(), [], []
    for line in info.describe():
        report.line(line)
    implementations = arguments.implementations or ["jnp", *calls.kernels()]
    chosen = calls.chosen(arguments.ops)
    with progress(len(chosen) * len(arguments.dtypes)) as step:
        for call in chosen:
            for dtype in arguments.dtypes:
                step(f"{call.name}, {dtype}")
                found = compare(call, dtype, implementations)
                rows.append([f"{call.name}, {dtype}", *("FAIL" if found[i] else "ok" for i in implementations)])
                failures += [f"{call.name}, {dtype}, {i}: {why}" for i, why in found.items() if why]
    report.table("selftest: results and gradients against float64", ["op, dtype", *implementations], rows)
    for failure in failures:
        report.line(failure, style="red")
    untested = not arguments.implementations and not calls.kernels()
    if failures:
        report.line(f"{len(failures)} of {len(rows) * len(implementations)} comparisons failed", style="bold red")
    elif untested:
        report.line("jnp is right; no kernel can run here, so that none was compared: the lines above say why", style="bold yellow")
    else:
        report.line("everything is right", style="bold green")
    arguments.report.write_text(report.text, encoding="utf-8")
    report.line(f"written to {arguments.report}" + (": please send it with a bug report" if failures else ""))
    if failures:
        return status.WRONG
    return status.UNTESTED if untested else status.RIGHT
