"""How JAX's tools look into an op: debug_nans and debug_infs, checkify, and Taylor series (jet). Each finds what it would in jnp code."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.experimental.jet import jet, jet_rules

try:  # there is no public way to give a primitive a rule of checkify's
    from jax._src.checkify import error_checks as _checkify_rules
except ImportError:  # pragma: no cover
    _checkify_rules = {}  # its checks then see nothing inside the ops


def register(primitive, reference):
    """checkify and jet see the reference. Where checkify is asked for none of the errors that it finds by itself, the op stays as it is."""
    _checkify_rules[primitive] = functools.partial(_checked, primitive, reference)
    jet_rules[primitive] = functools.partial(_series, reference)


def _checked(primitive, reference, *args, **params):
    """checkify's own rule for jax.jit, on the jitted reference. args: what checkify hands on, of which the last is the set of the errors
    asked for, and the operands."""
    first = 1 + next(i for i, a in enumerate(args) if isinstance(a, frozenset))
    *handed_on, error, enabled = args[:first]
    operands = args[first:]
    if not enabled & checkify.automatic_checks:
        return error, primitive.bind(*operands, **params)
    traced = jax.make_jaxpr(jax.jit(functools.partial(reference, **params)))(*map(jax.typeof, operands))
    [call] = traced.eqns
    return _checkify_rules[call.primitive](*handed_on, error, enabled, *operands, **call.params)


def _series(reference, primals, series, **params):
    return jet(lambda *operands: tuple(reference(*operands, **params)), primals, series, factorial_scaled=False)


def refuse_nans(name, run):
    """run(), whose results are looked at as jax.debug_nans and jax.debug_infs ask for.

    A jitted call looks itself, and where it finds something runs its function again without jit, which for a primitive would be that call.
    """
    looked_for = [(what, found) for what, found, on in (("nan", jnp.isnan, jax.config.jax_debug_nans), ("inf", jnp.isinf, jax.config.jax_debug_infs)) if on]
    if not looked_for:
        return run()
    with jax.debug_nans(False), jax.debug_infs(False):
        out = run()
        for what, found in looked_for:
            if any(jnp.issubdtype(o.dtype, jnp.inexact) and found(o).any() for o in out):
                raise FloatingPointError(f"invalid value ({what}) encountered in {name}")
    return out
