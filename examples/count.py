"""What a decoded token costs the examples' models, with the fused ops and with jnp: kernels, Metal dispatches, time.

    python examples/count.py [--models gemma3 gemma4 nemotron_h qwen3 mamba2 mla] [--repeats 200]

A step of one token is compiled for this machine's default platform under both, and the instructions of its compiled HLO that do work are
counted: each is one kernel on a GPU, one task on a CPU. The ops are its custom calls. Where a Metal driver's stand-in is named by
JAX_FUSEDNORM_METAL_DRIVER, the step also runs under "metal", and the stand-in counts the dispatches. Both steps are timed in turn, and
the medians printed. bfloat16, one sequence, the sizes of the examples.

Needs: jax_fusednorm, flax, torch, transformers, tqdm. Nothing is downloaded.
"""

import argparse
import ctypes
import os
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import transformers
from flax import nnx
from tqdm import tqdm

import gemma
import huggingface
import mamba2
import mla
import nemotron_h
import serve_qwen3
import jax_fusednorm

CONTEXT, DTYPE = 64, jnp.dtype("bfloat16")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # instructions that are no work
OURS = 'custom_call_target="jax_fusednorm_'


def language_model(theirs, ours):
    def step(implementation):
        model = ours(theirs, dtype=DTYPE, implementation=implementation)
        return model, jnp.ones((1, 1), jnp.int32), model.empty_cache(1, CONTEXT), CONTEXT // 2
    return step


def mixer(theirs):
    def step(implementation):
        model = mamba2.Mixer(theirs, dtype=DTYPE, implementation=implementation)
        return model, jnp.ones((1, 1, mamba2.WIDTH), DTYPE), model.empty_cache(1)
    return step


def latent_attention(theirs, rotary):
    def step(implementation):
        model = mla.Attention(theirs, rotary.inv_freq, dtype=DTYPE, implementation=implementation)
        return model, jnp.ones((1, 1, mla.WIDTH), DTYPE), model.empty_cache(1, CONTEXT), CONTEXT // 2
    return step


def paged_language_model(theirs):
    def step(implementation):
        model = serve_qwen3.Qwen3(theirs, dtype=DTYPE, implementation=implementation)
        pages = serve_qwen3.empty_pages(CONTEXT // serve_qwen3.PAGE, theirs.config, DTYPE)
        cache = jax_fusednorm.PagedKVCache(pages, jnp.arange(len(pages))[None], jnp.array([CONTEXT // 2]))
        return model, jnp.ones(1, jnp.int32), cache, jnp.arange(2)
    return step


# What makes, for an implementation, a model and the arguments of one step of it.
MODELS = {
    "gemma3": lambda: language_model(gemma.theirs_of("gemma3", 4), gemma.Gemma),
    "gemma4": lambda: language_model(gemma.theirs_of("gemma4", 4), gemma.Gemma),
    "nemotron_h": lambda: language_model(nemotron_h.theirs_of("M-M*-"), nemotron_h.NemotronH),
    "qwen3": lambda: paged_language_model(serve_qwen3.qwen3(**serve_qwen3.SMALL, num_hidden_layers=4)),
    "mamba2": lambda: mixer(mamba2.zamba2()[1]),
    "mla": lambda: latent_attention(*mla.deepseek()[1:]),
}


def compiled(step, implementation):
    """A compiled step, and its arguments."""
    model, *arguments = step(implementation)
    definition, state = nnx.split(model)
    run = jax.jit(lambda state, *arguments: nnx.merge(definition, state)(*arguments))
    return run.lower(state, *arguments).compile(), (state, *arguments)


def kernels(program):
    """(instructions that do work, custom calls of ours) of the entry computation of a compiled program."""
    entry = program.as_text().split("ENTRY ")[1].split("\n}")[0]
    lines = [line for line in entry.splitlines() if " = " in line]
    opcodes = [re.search(r" = .*? ([a-z][a-z\d-]*)\(", line)[1] for line in lines]
    return sum(opcode not in FREE for opcode in opcodes), sum(OURS in line for line in lines)


def dispatches(step):
    """How many kernels the stand-in for Metal's driver ran for a step, or None without one."""
    if "JAX_FUSEDNORM_METAL_DRIVER" not in os.environ:
        return None
    driver = ctypes.CDLL(os.environ["JAX_FUSEDNORM_METAL_DRIVER"])
    driver.standin_dispatched.restype = ctypes.c_void_p
    program, arguments = compiled(step, "metal")
    driver.standin_reset()
    jax.block_until_ready(program(*arguments))
    return next(n for n in range(10**6) if not driver.standin_dispatched(n))


def median_ms(programs, repeats):
    """Of each (program, arguments), run in turn so that whatever else the machine does slows all alike."""
    times = [[] for _ in programs]
    for _ in range(repeats):
        for (program, arguments), taken in zip(programs, times):
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            taken.append(time.perf_counter() - start)
    return [1e3 * statistics.median(taken) for taken in times]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()

    rows = []
    for name in tqdm(arguments.models, desc="compiling and running", unit="model"):
        step = MODELS[name]()
        plain, fused = (compiled(step, implementation) for implementation in ("jnp", "kernel"))
        rows.append((name, kernels(plain[0])[0], *kernels(fused[0]), dispatches(step), *median_ms((plain, fused), arguments.repeats)))

    print(f"\non {jax.default_backend()}; a replaced kernel is one of jnp's that the ops' own took the place of")
    print("| model | kernels, jnp | with the ops | the ops' own, of these | replaced | Metal dispatches | ms, jnp | ms, ops |")
    print("|---|---|---|---|---|---|---|---|")
    for name, before, after, own, ran, *ms in rows:
        print(f"| {name} | {before} | {after} | {own} | {before - after + own} | {'' if ran is None else ran} | {ms[0]:.2f} | {ms[1]:.2f} |")
    return 0 if all(0 < own <= ran for _, _, _, own, ran, *_ in rows if ran is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
