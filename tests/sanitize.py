"""Every CUDA kernel on small arrays, for compute-sanitizer to watch: memcheck, racecheck.

    export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_ALLOCATOR=platform
    export XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py [bfloat16] [float16] [float32]

racecheck takes long over XLA's own kernels: `--kernel-name kernel_substring=entry` watches ours alone. Without these flags of XLA,
compute-sanitizer itself may end with a segmentation fault while JAX starts. The allocator gives every array memory of its own, so that
a byte beyond it is an error. The widths take every step of metal_src/launch/shape.h, with idle threads and without.
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp

import jax_fusednorm
import plain

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


def main():
    few_rows = sys.modules["jax_fusednorm.ops.matmul_partial_rms_norm"].FEW_ROWS
    few_rows["cuda"] = few_rows["metal"]  # else the kernels that multiply would not run
    assert jax.default_backend() == "gpu", jax.default_backend()
    shapes = [(ROWS, width) for width in WIDTHS] + list(SEVERAL)
    for (rows, width), dtype in itertools.product(shapes, sys.argv[1:] or ("bfloat16", "float16", "float32")):
        calls = [*check(rows, width, dtype), *projections(rows, width, dtype)]

        @jax.jit
        def everything(operands):
            return [(jax.jvp(f, args, tangents), jax.vjp(f, *args)[1](f(*args)))
                    for (f, *_), (args, tangents) in zip(calls, operands)]

        jax.block_until_ready(everything([(args, tangents) for _, args, tangents in calls]))
        print(f"rows of {width}, {dtype}", flush=True)
    for dtype in sys.argv[1:] or ("bfloat16", "float16", "float32"):
        for width in (2, 30, 64, 80, 96, 128, 160, 256, 512, 576):
            jax.block_until_ready(jax.jit(lambda: [*heads(width, dtype), *paged(width, dtype)])())
            print(f"heads of {width}, {dtype}", flush=True)
    print("every kernel ran")


if __name__ == "__main__":
    main()
