"""What runs where, and why: the one place that chooses between the reference and a kernel."""

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import get_args

import jax

from . import checks, ffi
from .types import Implementation

# The kernel builds that each platform can launch, best first. Every other platform runs the reference.
LAUNCHERS = {"cpu": ("host", "metal"), "cuda": ("cuda",)}
IMPLEMENTATIONS = get_args(Implementation)
VARIABLE = "JAX_FUSEDNORM_IMPLEMENTATION"
METAL_VARIABLE = "JAX_FUSEDNORM_METAL_MIN_BYTES"


def _initial():
    value = os.environ.get(VARIABLE) or "auto"
    if value in IMPLEMENTATIONS:
        return value
    warnings.warn(f"jax_fusednorm: {VARIABLE}={value!r} is none of {', '.join(IMPLEMENTATIONS)}; using 'auto'.", stacklevel=2)
    return "auto"


def _metal_min_bytes():
    """The fewest bytes that a call must move for the Apple GPU to run it under "auto".

    A GPU that moves twice what the CPU does, 150 GB/s, gains as much as its round trip costs, 210 us at most in published measurements,
    on 2 * 150 GB/s * 210 us = 63 MB.
    """
    value = os.environ.get(METAL_VARIABLE) or 2**26
    try:
        return float(value)
    except ValueError:
        warnings.warn(f"jax_fusednorm: {METAL_VARIABLE}={value!r} is no number of bytes; using {2**26}.", stacklevel=2)
        return 2.0**26


METAL_MIN_BYTES = _metal_min_bytes()


def on_apple_silicon():
    return sys.platform == "darwin" and os.uname().machine == "arm64"


# A JAX user context is part of jit's cache key: a function traced under another default is traced again.
_default = jax.make_user_context(_initial())


def implementation(name: Implementation) -> AbstractContextManager[None]:
    """`with implementation("jnp"):` sets what ops called inside run, where they are not told by their own `implementation=`.

    One of "auto" (a kernel where one is available, else jnp), "jnp" (the pure-jnp form), "kernel" (any kernel, else an
    error), "host", "metal", "cuda" (that kernel, else an error). The default of the process is the environment variable
    JAX_FUSEDNORM_IMPLEMENTATION as it was at import, else "auto".
    """
    return _default(checks.option("implementation", "name", name, IMPLEMENTATIONS))


def requested(op, value):
    """The `implementation=` of a call, or the default in force."""
    return _default.value if value is None else checks.option(op, "implementation", value, IMPLEMENTATIONS)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one op runs on one platform. `runs` is "jnp", a kernel build, or None where the call is refused."""

    runs: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.runs or 'error'}: {self.why}"


def uncovered(avals):
    """Why no kernel takes these operands, or None."""
    for aval in avals:
        if jax.numpy.issubdtype(aval.dtype, jax.numpy.floating) and aval.dtype.name not in checks.STORAGE:
            return f"there is no {aval.dtype} kernel"
        if any(isinstance(n, int) and n >= 2**31 for n in (*aval.shape, math.prod(aval.shape[:-1]))):
            return f"shape {list(aval.shape)} needs more than 31 bits to count its rows or columns"


def bytes_of(avals):
    """What arrays of these avals hold, axes whose size is a symbol left out."""
    return sum(aval.dtype.itemsize * math.prod(n for n in aval.shape if isinstance(n, int)) for aval in avals)


def launchers_for(platform, requested, moved=math.inf):
    """The kernel builds that a call which moves so many bytes may run there, best first."""
    known = LAUNCHERS.get(platform, ())
    if requested not in ("auto", "kernel"):
        return (requested,) if requested in known else ()
    if platform == "cpu" and on_apple_silicon() and moved >= METAL_MIN_BYTES:
        return known[::-1]
    return known if requested == "kernel" else known[:1]


def may_use_kernels(requested):
    """Whether a call may be lowered to a kernel at all. False for "auto" where the process's own platform has none."""
    if requested == "auto":
        own = jax.default_backend()
        return any(ffi.library(launcher).usable for launcher in launchers_for("cuda" if own == "gpu" else own, requested))
    return requested != "jnp"


def choose(platforms, requested, ctx, moved, distrust):
    """The Decision for a call lowered for `platforms` that moves so many bytes, before its devices are looked at.

    distrust(launcher): why its kernel is not to be trusted with this call, or None.
    """
    def refused(why):
        return Decision("jnp" if requested in ("auto", "jnp") else None, why)

    if requested == "jnp":
        return Decision("jnp", "asked for by implementation='jnp'")
    launchers = launchers_for(platforms[0], requested, moved) if len(platforms) == 1 else ()
    if not launchers:
        kind = "" if requested in ("auto", "kernel") else f"{requested} "
        return refused(f"there are no {kind}kernels for platform {'/'.join(platforms)}")
    why_not = uncovered(ctx.avals_in)
    if why_not:
        return refused(why_not)
    if requested == "auto" and ctx.module_context.lowering_parameters.for_export:
        return Decision("jnp", "exported under implementation='auto'")
    notes = []
    if launchers != launchers_for(platforms[0], requested):
        notes.append(f"metal is for calls that move {METAL_MIN_BYTES:.3g} bytes ({METAL_VARIABLE}), and this one moves {moved:.3g}")
    for launcher in launchers:
        library = ffi.library(launcher)
        if library.usable and not may_use_kernels(requested):
            return refused(f"this process's default platform, {jax.default_backend()}, has no kernels")
        why_not = distrust(launcher) if library.usable else library.about
        if not why_not:
            return Decision(launcher, "; ".join([library.about, *notes]))
        notes.append(why_not)
    return refused("; ".join(notes))


_record = contextvars.ContextVar("jax_fusednorm_decisions", default=None)


def decide(name, platforms, requested, ctx, place, strict, **options):
    """(choose(), and what place(launcher) makes of it for the devices in `ctx`), recorded for explain().

    A call that no kernel can take is an error if it is `strict` and asked for one, else the reference runs. How the operands are
    cut over devices is never an error: there the reference is what XLA knows how to cut.
    """
    decision, placed = choose(platforms, requested, ctx, **options), None
    if decision.runs not in (None, "jnp"):
        placed = place(decision.runs)
        if placed.why:
            decision, placed = Decision("jnp", placed.why), None
    if decision.runs is None and not strict:
        decision = Decision("jnp", decision.why)
    if _record.get() is not None:
        _record.get().append(decision)
    elif decision.runs is None:
        raise NotImplementedError(
            f"{name}: implementation={requested!r} was asked for, but {decision.why}. "
            "Use implementation='auto' to run jnp there, or see `python -m jax_fusednorm info`.")
    return decision, placed


@contextlib.contextmanager
def _recording():
    decisions = []
    token = _record.set(decisions)
    try:
        yield decisions
    finally:
        _record.reset(token)


def explain(op: Callable[..., object], *args: object, platforms: tuple[str, ...] | list[str] = ("cpu", "cuda", "rocm", "tpu", "mps"),
            **kwargs: object) -> dict[str, Decision]:
    """What `op(*args, **kwargs)` would run on each platform, and why, without running it (a kernel for Apple GPUs is checked, on few rows).

    args: arrays or `jax.ShapeDtypeStruct`s. Returns {platform: Decision}; a Decision prints as "host: ..." or "jnp: ...".
    Forward only; a derivative takes the same way and runs the reference where it has no kernel.

    >>> print(explain(rms_norm, x, scale)["cpu"])
    """
    found = {}
    for platform in platforms:
        call = functools.partial(op, **kwargs)
        with _recording() as decisions:
            # a fresh function, so that no cached lowering answers in our place
            jax.jit(lambda *a: call(*a)).trace(*args).lower(lowering_platforms=(platform,))
        # the last: what an op runs may be another op
        found[platform] = decisions[-1] if decisions else Decision("jnp", "the call needs no kernel")
    return found
