"""What runs where, and why: the one place that chooses between the reference and a kernel."""

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable
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


_process_default = _initial()
# A JAX user context is part of jit's cache key: a function traced under another default is traced again. None: the process's own.
_default = jax.make_user_context(None)


def implementation(name: Implementation) -> AbstractContextManager[None]:
    """`with implementation("jnp"):` sets what ops called inside run, where they are not told by their own `implementation=`.

    One of "auto" (a kernel where one is available, else jnp), "jnp" (the pure-jnp form), "kernel" (any kernel, else an
    error), "host", "metal", "cuda" (that kernel, else an error). The default of the process is the environment variable
    JAX_FUSEDNORM_IMPLEMENTATION as it was at import, else "auto"; `set_implementation` changes it.
    """
    return _Chosen(checks.option("implementation", "name", name, IMPLEMENTATIONS))


class _Chosen:
    """A block in which an implementation is the default. One that is never entered says so: `implementation("jnp")` alone does nothing."""

    def __init__(self, name):
        self._name, self._context = name, None

    def __enter__(self):
        self._context = _default(None if self._name == _process_default else self._name)  # else jit would trace again for nothing
        self._context.__enter__()

    def __exit__(self, *raised):
        return self._context.__exit__(*raised)

    def __del__(self):
        if self._context is None:
            warnings.warn(f"jax_fusednorm: implementation({self._name!r}) did nothing: write `with implementation({self._name!r}):`, or "
                          f"set_implementation({self._name!r}) for the whole process.", RuntimeWarning, stacklevel=2)


def set_implementation(name: Implementation) -> None:
    """Set what ops run in this process, where neither their own `implementation=` nor a `with implementation(...):` says otherwise.

    name: as in `implementation`. It takes the place of the environment variable JAX_FUSEDNORM_IMPLEMENTATION. Functions that are jitted
    already are traced and compiled again (`jax.clear_caches`), so call it at a program's start.
    """
    global _process_default
    name = checks.option("set_implementation", "name", name, IMPLEMENTATIONS)
    if name != _process_default:
        _process_default = name
        jax.clear_caches()


def requested(op, value):
    """The `implementation=` of a call, or the default in force."""
    return _default.value or _process_default if value is None else checks.option(op, "implementation", value, IMPLEMENTATIONS)


def canonical(platform):
    """The name under which kernels are known and programs lowered, of a platform as jax.default_backend() calls it."""
    if platform != "gpu":
        return platform
    own = jax.devices()[0].client.platform_version if jax.default_backend() == "gpu" else ""
    return "rocm" if "rocm" in own.lower() else "cuda"


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


def too_long(launcher, library, ctx):
    """Why the launcher takes no arrays as long as these operands and results, or None."""
    most = max((bytes_of([aval]) for aval in (*ctx.avals_in, *ctx.avals_out)), default=0)
    if most > library.longest:
        return f"{launcher} takes arrays of up to {library.longest} bytes here, and one is of {most}"


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
        return any(ffi.library(launcher).usable for launcher in launchers_for(canonical(jax.default_backend()), requested))
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
        why_not = (too_long(launcher, library, ctx) or distrust(launcher)) if library.usable else library.about
        if not why_not:
            return Decision(launcher, "; ".join([library.about, *notes]))
        notes.append(why_not)
    return refused("; ".join(notes))


_record = contextvars.ContextVar("jax_fusednorm_decisions", default=None)


class _Record(list):
    """The Decisions of one lowering; `asked`: the platforms whose partitioners have yet to say whether the kernels stay."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def later(self, at, why):
        self[at] = Decision("jnp", why)


def decide(name, platforms, requested, ctx, place, strict, **options):
    """(choose(), and what place(launcher, report) makes of it for the devices in `ctx`), recorded for explain().

    A call that no kernel can take is an error if it is `strict` and asked for one, else the reference runs. How the operands are
    cut over devices is never an error: there the reference is what XLA knows how to cut.
    """
    decision, placed = choose(platforms, requested, ctx, **options), None
    record = _record.get()
    if decision.runs not in (None, "jnp"):
        report = (lambda why: None) if record is None else functools.partial(record.later, len(record))
        placed = place(decision.runs, report)
        if placed.why:
            decision, placed = Decision("jnp", placed.why), None
    if decision.runs is None and not strict:
        decision = Decision("jnp", decision.why)
    if record is not None:
        record.append(decision)
        record.asked.update([placed.asked] if placed and placed.asked else ())
    elif decision.runs is None:
        raise NotImplementedError(
            f"{name}: implementation={requested!r} was asked for, but {decision.why}. "
            "Use implementation='auto' to run jnp there, or see `python -m jax_fusednorm info`.")
    return decision, placed


@contextlib.contextmanager
def _recording():
    decisions = _Record()
    token = _record.set(decisions)
    try:
        yield decisions
    finally:
        _record.reset(token)


def explain(op: Callable[..., object], *args: object, platforms: str | Iterable[str] = ("cpu", "gpu", "cuda", "rocm", "tpu", "mps"),
            **kwargs: object) -> dict[str, Decision]:
    """What `op(*args, **kwargs)` would run on each platform, and why, without running it (a kernel for Apple GPUs is checked, on few rows).

    args: arrays or `jax.ShapeDtypeStruct`s. platforms: names, or one name; "gpu" is this process's own kind of GPU, else cuda.
    Returns {platform: Decision}; a Decision prints as "host: ..." or "jnp: ...".
    Forward only; a derivative takes the same way and runs the reference where it has no kernel.

    >>> print(explain(rms_norm, x, scale)[jax.default_backend()])
    """
    names = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    found = {}
    for platform in map(canonical, names):
        if platform in found:
            continue
        call = functools.partial(op, **kwargs)
        with _recording() as decisions:
            # a fresh function, so that no cached lowering answers in our place
            lowered = jax.jit(lambda *a: call(*a)).trace(*args).lower(lowering_platforms=(platform,))
            last = len(decisions) - 1  # what an op runs may be another op
            if platform in decisions.asked:
                lowered.compile()
        found[platform] = decisions[last] if decisions else Decision("jnp", "the call needs no kernel")
    return {name: found[canonical(name)] for name in names}
