"""The types of the public API. Each set of names is said here once, for type checkers and for the checks at trace time."""

from typing import Literal, TypeAlias

from jax.typing import DTypeLike

Implementation: TypeAlias = Literal["auto", "jnp", "kernel", "host", "metal", "cuda"]
Rounding: TypeAlias = Literal["float32", "storage"]
Activation: TypeAlias = Literal["silu", "sigmoid"]
Style: TypeAlias = Literal["neox", "interleaved", "proportional"]
PagedStyle: TypeAlias = Literal["neox", "interleaved"]
Placement: TypeAlias = Literal["prefix", "suffix"]
Layout: TypeAlias = Literal["token_major", "head_major"]
Copy: TypeAlias = tuple[DTypeLike, Layout]
