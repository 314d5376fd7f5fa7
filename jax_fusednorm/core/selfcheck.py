"""Whether a kernel can be trusted on the machine at hand, found out while a call is lowered, when the reference can still take its place.

For launchers whose kernels meet their hardware first on a user's machine. A Metal kernel runs once on small operands, and is compared with
the reference; a CUDA kernel is compiled and loaded for the devices there are. What is checked is what an op declares anyway: its
reference, its kernel, and the axes of its operands, so an op needs nothing more.
"""

import concurrent.futures
import dataclasses
import os
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from . import ffi
from .sharding import dims_of, is_row

LAUNCHERS = ("metal", "cuda")
# Seconds that the first run of a kernel may take; 0: none is run to be checked. The Metal launcher reads it too.
VARIABLE = "JAX_FUSEDNORM_SELF_CHECK"


def _enabled():
    value = os.environ.get(VARIABLE) or "10"
    try:
        return float(value) != 0
    except ValueError:
        warnings.warn(f"jax_fusednorm: {VARIABLE}={value!r} is no number of seconds; each kernel is checked, as by default.", stacklevel=2)
        return True


ENABLED = _enabled()

_ROWS = 33  # in all: more than one threadgroup's, more than FEW_ROWS of matmul_partial_rms_norm, and no multiple of anything
_FEW = 5    # of any other axis that kernels only count

failures = []  # what was said of each

_lock, _starting = threading.Lock(), threading.Lock()
_found = {}
_started = {}  # what is under way, or done: a thread of its own sees none of the contexts in which the caller lowers
_threads = concurrent.futures.ThreadPoolExecutor(max(os.cpu_count() or 1, 2), "jax_fusednorm")


def failure(primitive, launcher, avals, params):
    """Why this launcher's kernel is not to be trusted with such a call, or None. One failure is one warning.

    A kernel is checked when it is first wanted for such dtypes, such an axis of reduction and such options.
    """
    if launcher not in LAUNCHERS or not (ENABLED or launcher == "cuda"):
        return None
    key, check = start(primitive, launcher, avals, params)
    with _lock:
        if key in _found:
            return _found[key]
        why = _found[key] = check.result()
    if why:
        operands = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in key[2])
        what = f"the {launcher} kernel of {primitive.name}"
        said = f"{what} cannot be had" if launcher == "cuda" else f"the self-check of {what} failed"
        failures.append(f"{said}, so calls like this one do without it. On operands {operands}: {why}")
        warnings.warn(f"jax_fusednorm: {failures[-1]}. Please report it, with the output of `python -m jax_fusednorm selftest`.", stacklevel=2)
    return why


def start(primitive, launcher, avals, params):
    """(what tells such calls from others, the future of why not), begun if nobody has: several kernels compile side by side."""
    params = {**params, "spec": dataclasses.replace(params["spec"], implementation="jnp")}
    shapes = _small(primitive, avals, params)
    key = (primitive, launcher, shapes, tuple(sorted(params.items())))
    with _starting:
        if key not in _started:
            _started[key] = _threads.submit(_prepare if launcher == "cuda" else _run, primitive, launcher, shapes, params)
    return key, _started[key]


def _small(primitive, avals, params):
    """((shape, dtype's name) of each operand): the call's own but for the number of rows, which changes no kernel."""
    operand_axes, _ = primitive.axes(params)
    counted, left = {}, _ROWS
    for axes, aval in zip(operand_axes, avals):
        for dim, size in zip(dims_of(axes, aval.ndim), aval.shape):
            if dim not in counted and is_row(axes) and dim not in (*primitive.whole, *primitive.uncut):
                most = left if is_row(dim) else _FEW
                counted[dim] = min(size, most) if isinstance(size, int) else most  # an exported size may be a symbol
                left = left // max(counted[dim], 1) if is_row(dim) else left
    def small(dim, size):
        return counted.get(dim, size if isinstance(size, int) else _FEW)

    return tuple((tuple(small(dim, size) for dim, size in zip(dims_of(axes, aval.ndim), aval.shape)), aval.dtype.name)
                 for axes, aval in zip(operand_axes, avals))


def draw(rng, shape, dtype):
    """An operand in which no element is small, so that a wrong one shows."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return rng.integers(0, 2**32 if dtype == jnp.uint32 else 4, shape).astype(dtype)
    return (rng.uniform(0.5, 2.0, shape) * rng.choice((-1.0, 1.0), shape)).astype(dtype)


def tolerance(arrays):
    """Of what is computed from them in float32, and rounded once or twice. Sums of rounded numbers inherit the coarsest rounding."""
    return max(1e-4, *(4 * float(jnp.finfo(a.dtype).eps) for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)))


def difference(got, want, allowed):
    """How `got` differs from `want` by more than is allowed, relative to the element and the mean; or None."""
    got, want = np.asarray(got), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return f"its shape is {list(got.shape)} where {list(want.shape)} was wanted"
    with np.errstate(all="ignore"):
        size = np.abs(want) + np.abs(want).sum() / max(want.size, 1)
        off = np.abs(got.astype(np.float64) - want) / np.maximum(size, 1e-30)
    wrong = ~(off <= allowed)  # nan too
    if not wrong.any():
        return None
    worst = np.unravel_index(np.argmax(np.nan_to_num(off, nan=np.inf)), off.shape)
    return (f"{wrong.sum()} of {got.size} elements are off by more than {allowed:.1g}, the worst at {list(map(int, worst))}: "
            f"{float(got[worst]):.6g} where {want[worst]:.6g} was wanted")


def _run(primitive, launcher, shapes, params):
    try:
        rng, cpu = np.random.default_rng(0), jax.local_devices(backend="cpu")[0]
        operands = primitive.sample(rng, shapes) if primitive.sample else [draw(rng, *shape) for shape in shapes]
        with jax.disable_jit(False), jax.default_device(cpu):
            operands = jax.device_put(operands, cpu)
            got, want = (jax.device_get(jax.jit(f)(*operands)) for f in (
                lambda *o: _kernel(primitive, ffi.Call(launcher), o, params), lambda *o: primitive.reference(*o, **params)))
            differences = [difference(g, w, tolerance(operands)) for g, w in zip(got, want)]
    except Exception as error:  # whatever it is, the kernel is not to be trusted
        return f"{type(error).__name__}: {error}"
    return next((f"result {i}: {d}" for i, d in enumerate(differences) if d), None)


def _prepare(primitive, launcher, shapes, params):
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    try:
        jax.eval_shape(lambda *o: _kernel(primitive, ffi.Preparation(launcher), o, params), *operands)
    except ffi.Unprepared as error:
        return str(error)
    return None


def _kernel(primitive, call, operands, params):
    out = primitive.kernel(call, *operands, **params)
    return primitive.reference(*operands, **params) if out is NotImplemented else out
