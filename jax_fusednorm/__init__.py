"""Fused normalization ops for JAX: each one a primitive, with a pure-jnp lowering everywhere and a kernel where one can run."""

from .core import ffi as _ffi
from .core.lowering import Decision, explain, implementation, set_implementation
from .core.paged import PagedKVCache
from .core.rope import rope_table
from .ops.add_rms_norm import add_rms_norm
from .ops.gated_group_rms_norm import gated_group_rms_norm
from .ops.head_rms_norm_rope import head_rms_norm_rope
from .ops.matmul_partial_rms_norm import matmul_partial_rms_norm
from .ops.qk_rms_norm_rope import qk_rms_norm_rope
from .ops.qk_rms_norm_rope_paged import qk_rms_norm_rope_paged
from .ops.rms_norm import rms_norm
from .ops.rms_norm_add import rms_norm_add

__version__ = "0.1.0"
__all__ = ["add_rms_norm", "Decision", "EXPORT_CHECKS", "explain", "gated_group_rms_norm", "head_rms_norm_rope", "implementation",
           "matmul_partial_rms_norm", "PagedKVCache", "qk_rms_norm_rope", "qk_rms_norm_rope_paged", "rms_norm", "rms_norm_add", "rope_table",
           "set_implementation"]

# Loading is part of importing, so that an exported artefact finds its handlers.
# `jax.export.export(..., disabled_checks=EXPORT_CHECKS)` lets a program that holds the package's kernels be exported.
EXPORT_CHECKS = _ffi.load_all()
