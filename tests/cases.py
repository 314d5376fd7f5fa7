"""Named shapes, shared by the tests and the benchmarks, and how many of them an implementation is tried on."""

import dataclasses
import math
import os


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: x of `shape` and `dtype`, a scale of `scale_dtype` and length `shape[-1]` (None: no scale)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    scale_dtype: str | None = "float32"
    rope_dim: int | None = None  # of a head's channels, how many turn (None: all)

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def __str__(self) -> str:
        return self.name


def _grid(prefix, row_counts, widths, dtype, scale_dtype):
    return tuple(Case(f"{prefix}_{rows}x{width}", (rows, width), dtype, scale_dtype)
                 for rows in row_counts for width in widths)


DTYPES = ("float32", "bfloat16", "float16")
SCALE_DTYPES = (*DTYPES, None)
# Each dtype with a scale of its own dtype, of another, and with none, but not each pair: for tests that compile long.
DTYPE_PAIRS = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", None),
               ("float16", "float16"), ("float16", "float32"))

# One token, and small batches of tokens, at the widths of today's models.
DECODE_WIDTHS = (1024, 2048, 4096, 5120, 7168, 8192)
DECODE = _grid("decode", (1, 4, 16), DECODE_WIDTHS, "bfloat16", "bfloat16")

# Whole prompts.
PREFILL = (
    *_grid("prefill", (512, 2048), (2048, 4096), "bfloat16", "bfloat16"),
    Case("prefill_2048x7168", (2048, 7168), "bfloat16", "bfloat16"),
    Case("prefill_8x512x4096", (8, 512, 4096), "bfloat16", "bfloat16"),
    Case("prefill_2048x4096_f16", (2048, 4096), "float16", "float16"),
    Case("prefill_2048x4096_f32", (2048, 4096), "float32", "float32"),
)

# The gated norm, in eight groups.
GATED_DECODE = _grid("gated_decode", (1, 4, 16), (4096, 7680), "bfloat16", "bfloat16")
GATED_PREFILL = _grid("gated_prefill", (2048,), (4096, 7680), "bfloat16", "bfloat16")

# Heads of queries: Qwen3's, and Gemma 3's wider ones.
HEADS_DECODE = tuple(Case(f"heads_decode_{t}x{h}x{d}", (t, h, d)) for t in (1, 4, 16) for h, d in ((32, 128), (16, 256)))
HEADS_PREFILL = tuple(Case(f"heads_prefill_2048x{h}x{d}", (2048, h, d)) for h, d in ((32, 128), (16, 256)))

# The paged cache: 32 heads of queries, 8 of keys.
PAGED_DECODE = tuple(Case(f"paged_decode_{t}x32x128", (t, 32, 128)) for t in (1, 8, 64))
PAGED_PREFILL = (Case("paged_prefill_2048x32x128", (2048, 32, 128)),)

# Larger than a GPU's cache; decode steps; and what the backward pass is timed on there.
GPU = tuple(Case(f"gpu_{rows}x{width}", (rows, width), "bfloat16", "bfloat16")
            for rows, width in ((32768, 1024), (16384, 2048), (8192, 4096), (8192, 5120), (8192, 7168), (8192, 8192), (4096, 16384)))
GPU_DECODE = _grid("gpu_decode", (1, 32), (4096, 7168), "bfloat16", "bfloat16")
GPU_BACKWARD = tuple(case for case in GPU if case.width in (2048, 4096, 8192))
GPU_GATED = (Case("gpu_gated_8192x7680", (8192, 7680)),)
GPU_HEADS = (Case("gpu_heads_8192x32x128", (8192, 32, 128)), Case("gpu_heads_8192x16x256", (8192, 16, 256), rope_dim=64))
GPU_QK = (Case("gpu_qk_8192x32x128", (8192, 32, 128)),)  # and 8 of keys
GPU_PAGED = tuple(Case(f"gpu_paged_{t}x32x128", (t, 32, 128)) for t in (8192, 128))
GPU_OPS = {"add_rms_norm": (GPU + GPU_DECODE, GPU_BACKWARD), "gated_group_rms_norm": (GPU_GATED, GPU_GATED), "head_rms_norm_rope": (GPU_HEADS, GPU_HEADS),
           "qk_rms_norm_rope": (GPU_QK, GPU_QK), "qk_rms_norm_rope_paged": (GPU_PAGED, ())}

# Hidden sizes: Gemma 3 and 4, Qwen3, Llama, DeepSeek.
MODEL_WIDTHS = (1024, 1152, 2048, 2560, 2816, 3840, 4096, 5120, 5376, 7168, 8192)
MODELS = tuple(Case(f"model_{width}", (3, width), "bfloat16", "bfloat16") for width in MODEL_WIDTHS)

# The gated norm of Mamba-2 mixers: (channels, group, columns of the fused projection that holds the gate, or None).
# Nemotron-H (its projection, and one of 8192 columns), Nemotron-3-Nano, Nemotron-H 8B and 4B, Nemotron-Nano-9B-v2; Codestral's whole row.
GATED_MODELS = ((7680, 960, 17504), (7680, 960, 8192), (4096, 512, None), (8192, 1024, None), (7168, 896, None), (10240, 1280, None),
                (8192, 8192, None))
GATED_GROUPS = (3, 100, 512, 520, 896, 960, 1024, 1280)
GATE_STARTS = (0, 1, 7, 40)

# The acceptance matrix.
WIDTHS = (1, 7, 55, 128, 255, 256, 257, 557, 2816, 4096, 5376, 7168, 8191, 16385, 32768)
ROWS = (0, 1, 2, 31, 33, 199)
SLOW_ROWS = (130, 4096)

# Where a kernel changes its way of working: vector tails, simdgroup and threadgroup sizes, registers.
TAIL_WIDTHS = tuple(range(1, 34))
EDGE_WIDTHS = tuple(edge + step for edge in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) for step in (-1, 0, 1))
HUGE_WIDTHS = (65536, 262144)

# Every batch of leading dimensions that a rank can bring.
LEADING = ((), (1,), (5,), (2, 3), (2, 1, 3), (0,), (3, 0), (1, 1, 1, 2))

# A stand-in for Metal's driver compiles each instantiation when it is first used, and runs it lane by lane.
STAND_IN = "JAX_FUSEDNORM_METAL_DRIVER" in os.environ


def some(implementation, sizes, part, parts):
    """All of `sizes`; one part of them for jnp, which compiles slowly and has no code of its own for any size, and for a stand-in."""
    return sizes[part % parts::parts] if implementation == "jnp" or implementation == "metal" and STAND_IN else sizes


def repeated(implementation, rows, runs):
    """(rows, runs) of a call that is large so that its threads meet, and is made again and again. A stand-in interleaves few as well."""
    return (rows // 50, runs // 20 + 2) if implementation == "metal" and STAND_IN else (rows, runs)
