"""Calls of head_rms_norm_rope and qk_rms_norm_rope: how heads are rotated, arguments, and many calls compiled at once against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np

import oracle
from jax_fusednorm import head_rms_norm_rope
from plain import draw, draw_scale

PLACES = (("neox", "prefix"), ("neox", "suffix"), ("interleaved", "prefix"), ("interleaved", "suffix"), ("proportional", "prefix"))


def run(implementation, calls, op=head_rms_norm_rope):
    """One compilation for many calls (args, options)."""
    options = [o for _, o in calls]
    return jax.jit(lambda args: [op(*a, implementation=implementation, **o) for a, o in zip(args, options)])([a for a, _ in calls])


def check(implementation, calls):
    for (args, options), got in zip(calls, run(implementation, calls)):
        want, size = oracle.head_rms_norm_rope(*args, **options)
        before = options.get("round_before_rope") or not options.get("multiply_before_cast", True)
        oracle.assert_rotated_close(got, want, size, args[0].dtype, rounded_before=before, what=f"{args[0].shape} {options}")


def arguments(width, dtype, *, tokens=3, heads=3, scale_dtype="float32", positions=None, lead=()):
    x = draw(1, (*lead, tokens, heads, width), dtype, spread=1.0)
    return x, draw_scale(2, width, scale_dtype), jnp.asarray(np.arange(tokens) * 37 + 5 if positions is None else positions)
