"""Every CUDA kernel on small arrays, with no XLA beside it, for compute-sanitizer to watch.

    python tests/sanitize.py [compute-sanitizer --tool memcheck|racecheck|initcheck|synccheck --error-exitcode 1]

Lowers the ops and their derivatives for cuda, in every dtype, and has sanitize.cc make each custom call it finds there, once, on arrays
of their own: a byte beyond one is an error. (JAX itself ends with a segmentation fault under compute-sanitizer, more often than not.)
The widths take every step of metal_src/launch/shape.h, with idle threads and without. Needs a GPU, and nvcc for the program that makes the calls.
"""

import functools
import itertools
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp

import jax_fusednorm
import plain
from jax_fusednorm.core import cuda, ffi

ROOT = pathlib.Path(__file__).parent.parent
WIDTHS = (8, 512, 520, 1024, 1032, 2048, 2056, 4096, 4104, 6144, 8192, 8200, 16384, 16392, 7, 255, 257, 4097)
ROWS = 5  # the last block of narrow rows is not full
SEVERAL = ((265, 8192), (529, 4096))  # more rows than teams: each takes two or three


def check(rows, width, dtype):
    """The forward pass, tangent and cotangent of every op, with a scale and without."""
    x, residual, dx = (plain.draw(i, (rows, width), dtype) for i in range(3))
    for scale in (plain.draw_scale(3, width, dtype), plain.draw_scale(3, width, "float32"), None):
        if scale is not None:
            gated = functools.partial(jax_fusednorm.gated_group_rms_norm, group_size=width, implementation="cuda")
            for start, options in ((None, {}), (8, dict(norm_before_gate=True)), (1, dict(activation="sigmoid", rounding="float32"))):
                y, gate = (plain.draw(i, (rows, 2 * width + (0 if i < 5 or start is None else start)), dtype) for i in (4, 5))
                both = (y, gate, plain.draw_scale(6, 2 * width, scale.dtype))
                yield functools.partial(gated, gate_start=start, **options), both, both
        tail = () if scale is None else (scale,)
        for op in (jax_fusednorm.rms_norm, jax_fusednorm.add_rms_norm, jax_fusednorm.rms_norm_add):
            activations = (x,) if op is jax_fusednorm.rms_norm else (x, residual)
            yield functools.partial(op, implementation="cuda"), (*activations, *tail), (*(dx,) * len(activations), *tail)


def heads(width, dtype):
    """Both head ops in every style, with copies, from theta and from a table that ends; heads and tokens that fill no simdgroup."""
    x, k = plain.draw(1, (5, 3, width), dtype), plain.draw(2, (5, 1, width), dtype)
    positions, table = jnp.asarray([0, -1, 7, 100, 3]), plain.draw(3, (8, width // 4 * 2), "float32")
    for style, placement in (("neox", "prefix"), ("neox", "suffix"), ("interleaved", "prefix"), ("proportional", "prefix")):
        options = dict(style=style, placement=placement, implementation="cuda")
        for scale in (plain.draw_scale(4, width, dtype), plain.draw_scale(4, width, "float32"), None):
            copies = tuple(itertools.product(("bfloat16", "float32"), ("token_major", "head_major")))
            yield jax_fusednorm.head_rms_norm_rope(x, scale, positions, copies=copies, **options)
            yield jax_fusednorm.head_rms_norm_rope(x, scale, positions, freqs_cis=table, multiply_before_cast=False, **options)
            yield jax_fusednorm.qk_rms_norm_rope(x, k, scale, scale, positions, round_before_rope=True, **options)


def paged(width, dtype):
    """qk_rms_norm_rope_paged in every form, with a token of no sequence, pages and positions that are none."""
    q, k, v = (plain.draw(i, (9, heads, width), dtype) for i, heads in enumerate((3, 1, 1)))
    packed = jnp.concatenate([a.reshape(9, -1) for a in (q, k, v)], axis=1)
    cache = jax_fusednorm.PagedKVCache(plain.draw(4, (5, 2, 2, 3, 1, width), dtype), jnp.asarray([[4, 0, 9], [-1, 2, 1]]), jnp.asarray([2, 3]))
    scale, table = plain.draw_scale(5, width, dtype), plain.draw(6, (7, width // 4 * 2), "float32")
    columns = dict(num_heads=3, k_start=3 * width, v_start=4 * width)
    for style, placement in (("neox", "prefix"), ("interleaved", "suffix")):
        for tokens, form in ((q, {}), (q, dict(k=k)), (q, dict(k=k, v=v)), (packed, columns)):
            yield jax_fusednorm.qk_rms_norm_rope_paged(tokens, cache, scale, scale, table, jnp.asarray([0, 6, 8]), layer=1, style=style,
                                                       placement=placement, implementation="cuda", **form)


def projections(rows, width, dtype):
    """The same of matmul_partial_rms_norm: sums of this width, and this many outputs."""
    for transpose_b, of_x, normed in ((True, width, 24), (False, 40, max(width - 8, 1))):
        args = plain.draw(4, (rows, of_x), dtype), plain.draw(5, (40, width), dtype), plain.draw_scale(6, normed, dtype)
        yield functools.partial(jax_fusednorm.matmul_partial_rms_norm, transpose_b=transpose_b, implementation="cuda"), args, args


def programs():
    """Jitted functions and their operands."""
    shapes = [(ROWS, width) for width in WIDTHS] + list(SEVERAL)
    for dtype in ("bfloat16", "float16", "float32"):
        for rows, width in shapes:
            ops, *operands = zip(*check(rows, width, dtype), *projections(rows, width, dtype))
            yield jax.jit(lambda all_args, all_tangents, ops=ops: [(jax.jvp(f, args, tangents), jax.vjp(f, *args)[1](f(*args)))
                                                                   for f, args, tangents in zip(ops, all_args, all_tangents)]), operands
        for width in (2, 30, 64, 80, 96, 128, 160, 256, 512, 576):
            yield jax.jit(lambda width=width, dtype=dtype: [*heads(width, dtype), *paged(width, dtype)]), ()


def custom_calls(operation):
    """The custom calls of our kernels in an operation of a lowered program, one line of sanitize.cc's each."""
    for region in operation.regions:
        for inner in (op for block in region for op in block):
            yield from custom_calls(inner.operation)
    name = str(operation.attributes["call_target_name"]).strip('"') if operation.name == "stablehlo.custom_call" else ""
    if not name.startswith("jax_fusednorm_cuda"):
        return
    aliases = {int(result or 0): operand for result, operand in
               re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", str(operation.attributes.get("output_operand_aliases")))}
    words = [name]
    for kind, values in (("in", operation.operands), ("out", operation.results)):
        for i, value in enumerate(values):
            array = value.type
            words.append(":".join((kind, str(array.element_type), "x".join(map(str, array.shape)), aliases.get(i, "") if kind == "out" else "")))
    for attribute in operation.attributes["mhlo.backend_config"]:
        value = attribute.attr
        words.append(f"attr:{attribute.name}:{getattr(value, 'type', 'i1')}:{str(value).split(' : ')[0]}")
    yield " ".join(words)


def main():
    few_rows = sys.modules["jax_fusednorm.ops.matmul_partial_rms_norm"].FEW_ROWS
    few_rows["cuda"] = few_rows["metal"]  # else the kernels that multiply would not run
    with tempfile.TemporaryDirectory() as folder:
        program, calls = pathlib.Path(folder, "sanitize"), pathlib.Path(folder, "calls")
        source = pathlib.Path(__file__).with_suffix(".cc")
        subprocess.run(["nvcc", "-std=c++17", "-O2", f"-I{jax.ffi.include_dir()}", f"-I{ROOT / 'metal_src'}", source, "-o", program], check=True)
        lines = {}  # a set that keeps its order
        for f, operands in programs():
            lines |= dict.fromkeys(custom_calls(f.trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo").operation))
        calls.write_text("\n".join(lines))
        done = subprocess.run([*sys.argv[1:], program, ffi.library("cuda").handle._name, calls, "\n".join(cuda.nvrtc_paths()),
                               cuda.cache_folder()], check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
