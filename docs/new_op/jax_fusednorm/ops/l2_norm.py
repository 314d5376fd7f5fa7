"""L2 normalization over the last axis."""

import dataclasses

import jax

from ..core import checks, lowering
from ..core.numerics import compute_dtype, last_mean
from ..core.primitive import Op


def l2_norm(x, *, epsilon=1e-6, implementation=None):
    """The last axis divided by its length (the queries and keys of Gated DeltaNet, in Qwen3-Next).

    Equivalent to, with everything in float32 (float64 for float64 `x`)::

        (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)

    Args:
      x: [..., D] in float32, bfloat16 or float16.
      epsilon: static, finite, at least 0; added to the sum of squares.
      implementation: None for the default in force, or "auto", "jnp", "kernel", "host", "metal", "cuda".

    Returns:
      [..., D] in x's dtype.
    """
    op = "l2_norm"
    x = checks.activation(op, "x", x)
    spec = Spec(epsilon=checks.real(op, "epsilon", epsilon, at_least=0), width=x.shape[-1], implementation=lowering.requested(op, implementation))
    return L2_NORM.bind(x, spec=spec)[0]


@dataclasses.dataclass(frozen=True)
class Spec:
    epsilon: float
    width: int  # of the whole row: where it is cut over devices, each sees a part, and `mean` alone knows of the others
    implementation: str


def reference(x, *, spec, mean=last_mean):
    wide = x.astype(compute_dtype(x.dtype))
    return [(wide * jax.lax.rsqrt(spec.width * mean(wide * wide) + spec.epsilon)).astype(x.dtype)]


def kernel(call, x, *, spec):
    return call("l2_norm", [jax.ShapeDtypeStruct(x.shape, x.dtype)], x, epsilon=spec.epsilon)


L2_NORM = Op("l2_norm", reference, operands=("*d",), results=("*d",), kernel=kernel)
