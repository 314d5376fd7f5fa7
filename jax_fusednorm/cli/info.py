"""What is installed, what runs where, and why."""

import os
import platform

import jax

import jax_fusednorm
from jax_fusednorm.core import cuda, ffi, lowering, selfcheck

from . import calls

VARIABLES = (lowering.VARIABLE, lowering.METAL_VARIABLE, selfcheck.VARIABLE, ffi.HOST_LEVEL, "JAX_FUSEDNORM_METAL_DRIVER",
             cuda.CACHE_VARIABLE, "JAX_PLATFORMS")


def describe():
    """The lines that say it."""
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    yield (f"jax_fusednorm {jax_fusednorm.__version__}, Python {platform.python_version()}, jax {jax.__version__}, "
           f"jaxlib {jax.lib.__version__}, {system} {platform.machine()}")
    yield f"devices: {', '.join(f'{d.platform}:{d.id} {d.device_kind}' for d in jax.devices())}"
    yield f"default implementation: {lowering.requested('info', None)}"
    given = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    yield f"environment: {given or 'nothing of ' + ', '.join(VARIABLES)}"
    for launchers in lowering.LAUNCHERS.values():
        for launcher in launchers:
            library = ffi.library(launcher)
            yield f"{launcher}: {library.about}; kernels: {', '.join(sorted(library.targets)) or 'none'}"
    yield f"compiled CUDA kernels are kept in {cuda.cache_folder() or 'no folder'}"


def decisions(tokens=(1, 8192)):
    """{what runs here and why: the calls that do, in bfloat16, as "op (tokens, ...)"}"""
    here, found = calls.platform(), {}
    for call in calls.CALLS:
        for count in tokens:
            operands = calls.shapes(call, count, call.model, "bfloat16")
            decision = jax_fusednorm.explain(call.op, *operands, platforms=(here,), **call.options(call.model)[0])[here]
            found.setdefault(str(decision), {}).setdefault(call.name, []).append(str(count))
    return {decision: [f"{op} ({', '.join(counts)})" for op, counts in ops.items()] for decision, ops in found.items()}


def main(arguments):
    for line in describe():
        print(line)
    print(f"what runs on {calls.platform()}, in bfloat16, for (this many) tokens:")
    for decision, ops in decisions().items():
        print(f"  {decision}\n    {', '.join(ops)}")
    return 0
