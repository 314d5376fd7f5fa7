"""Fused normalization ops for JAX: each one a primitive, with a pure-jnp lowering everywhere and a kernel where one can run."""

from .core import ffi as _ffi
from .core.lowering import explain, implementation
from .ops.add_rms_norm import add_rms_norm
from .ops.rms_norm import rms_norm

__version__ = "0.1.0"
__all__ = ["add_rms_norm", "explain", "implementation", "rms_norm"]

_ffi.load_all()  # at import, so that an exported artefact or a cached executable finds its handlers
