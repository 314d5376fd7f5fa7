"""A call of every op, small or as models make it: what `info` explains, `selftest` compares and `bench` times."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_fusednorm
from jax_fusednorm.core import ffi, lowering


@dataclasses.dataclass(frozen=True)
class Call:
    """op(*operands(a, tokens, width), **options(width)[0]): a(*shape) makes an array of the call's dtype; operands are pytrees of arrays.

    options: several sets of them; all are tested, and the first is timed. small, model: two widths.
    """

    op: Callable
    operands: Callable
    small: int
    model: int
    models: str
    options: Callable = lambda width: ({},)
    differentiable: bool = True

    @property
    def name(self):
        return self.op.__name__


_LLAMA = dict(multiply_before_cast=False)
_GEMMA = dict(scale_offset=1.0)


def _positions(tokens):
    return np.arange(tokens, dtype=np.int32)


def _paged(a, tokens, width):
    """One sequence, whose keys lie in their pages."""
    pages = -(-tokens // 16)
    cache = jax_fusednorm.PagedKVCache(a(pages, 2, 1, 16, 8, width), np.arange(pages, dtype=np.int32)[None], np.zeros(1, np.int32))
    table = np.asarray(jax_fusednorm.rope_table(tokens, width))
    return a(tokens, 32, width), cache, a(width), a(width), table, np.array([0, tokens], np.int32)


def _gated(width):
    group = width // 8
    return dict(group_size=group), dict(group_size=group, norm_before_gate=True, activation="sigmoid", rounding="float32")


def _rotated(width):
    return {}, dict(style="interleaved", placement="suffix", rope_dim=width // 2, **_LLAMA)


CALLS = (
    Call(jax_fusednorm.rms_norm, lambda a, t, n: (a(t, n), a(n)), 264, 4096, "Llama 3", lambda n: ({}, _GEMMA, _LLAMA)),
    Call(jax_fusednorm.add_rms_norm, lambda a, t, n: (a(t, n), a(t, n), a(n)), 264, 4096, "Llama 3",
         lambda n: ({}, _GEMMA, dict(sum_rounding="storage", **_LLAMA))),
    Call(jax_fusednorm.rms_norm_add, lambda a, t, n: (a(t, n), a(t, n), a(n)), 264, 3840, "Gemma 3",
         lambda n: (_GEMMA, dict(norm_rounding="storage", **_LLAMA))),
    Call(jax_fusednorm.gated_group_rms_norm, lambda a, t, n: (a(t, n), a(t, n), a(n)), 264, 7680, "Nemotron-H", _gated),
    Call(jax_fusednorm.matmul_partial_rms_norm, lambda a, t, n: (a(t, n), a(n * 33 // 112, n), a(n * 3 // 14)), 448, 7168, "DeepSeek-V3"),
    Call(jax_fusednorm.head_rms_norm_rope, lambda a, t, n: (a(t, 32, n), a(n), _positions(t)), 64, 128, "Qwen3", _rotated),
    Call(jax_fusednorm.qk_rms_norm_rope, lambda a, t, n: (a(t, 32, n), a(t, 8, n), a(n), a(n), _positions(t)), 64, 128, "Qwen3", _rotated),
    Call(jax_fusednorm.qk_rms_norm_rope_paged, _paged, 64, 128, "Qwen3", lambda n: (dict(layer=0), dict(layer=0, style="interleaved", **_LLAMA)),
         differentiable=False),
)


def chosen(names):
    """The calls of these ops; all where none is named."""
    known = {call.name: call for call in CALLS}
    return [known[name] for name in names or known]


def shapes(call, tokens, width, dtype):
    """The operands as jax.ShapeDtypeStructs."""
    made = call.operands(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), tokens, width)
    return jax.tree.map(lambda o: jax.ShapeDtypeStruct(o.shape, o.dtype), made)


def platform():
    """The name under which kernels are known of where JAX runs by default."""
    return lowering.canonical(jax.default_backend())


def kernels():
    """The kernel builds that can run here."""
    return [launcher for launcher in lowering.LAUNCHERS.get(platform(), ()) if ffi.library(launcher).usable]


def refuse_what_cannot_run(implementations):
    """NotImplementedError for an implementation that was asked for by name and has no kernel here."""
    able = kernels()
    for name in implementations or ():
        if name in ("auto", "jnp", *able) or (name == "kernel" and able):
            continue
        kind = "" if name == "kernel" else f"{name} "
        why = f"there are no {kind}kernels for platform {platform()}"
        if name in lowering.LAUNCHERS.get(platform(), ()):
            why = ffi.library(name).about
        raise NotImplementedError(f"implementation={name!r} was asked for, but {why}. See `jax-fusednorm info`.")
