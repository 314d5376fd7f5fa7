"""Every op and Flax module under each of JAX's strict modes, forward and gradient, eager, under jit and under vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fusednorm.cli.calls import CALLS

TRACING = {  # what these refuse, they refuse while a function is traced
    "rank promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
    "dtype promotion": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "enable_checks": functools.partial(jax.enable_checks, True),
    "check_tracer_leaks": functools.partial(jax.check_tracer_leaks, True),
}
RUNNING = {
    "debug_nans": functools.partial(jax.debug_nans, True),
    "debug_infs": functools.partial(jax.debug_infs, True),
    "transfer_guard": functools.partial(jax.transfer_guard, "disallow"),
}
TOKENS = 3


def ops(implementation, most=None):
    """(whether it has a gradient, the op with its options, operands on the device) of every op and `most` sets of its options."""
    for call in CALLS:
        rng = np.random.default_rng(0)
        operands = call.operands(lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16), TOKENS, call.small)
        for options in call.options(call.small)[:most]:
            yield call.differentiable, functools.partial(call.op, implementation=implementation, **options), jax.tree.map(jnp.asarray, operands)


def gradient(op, *operands):
    floats = tuple(i for i, o in enumerate(operands) if jnp.issubdtype(o.dtype, jnp.floating))
    return jax.grad(lambda *o: sum(jnp.sum(r.astype(jnp.float32)) for r in jax.tree.leaves(op(*o))), floats)(*operands)


def everything(made, operands):
    """Each op, its gradient, and both under vmap."""
    for (differentiable, op, _), o in zip(made, operands):
        yield op(*o)
        if differentiable:
            yield gradient(op, *o)
            batch = [jnp.stack([a, a]) for a in o]
            yield jax.vmap(op)(*batch), jax.vmap(functools.partial(gradient, op))(*batch)


@pytest.mark.parametrize("mode", TRACING)
def test_every_op_traces(one_kernel, mode):
    made = list(ops(one_kernel))
    with TRACING[mode]():
        jax.jit(lambda operands: list(everything(made, operands))).lower([o for *_, o in made])


@pytest.mark.parametrize("mode", RUNNING)
def test_every_op_runs(one_kernel, mode):
    made = list(ops(one_kernel, most=1))
    operands = [o for *_, o in made]
    with RUNNING[mode]():
        eager = [op(*o) for _, op, o in made]
        jitted = jax.jit(lambda operands: [op(*o) for (_, op, _), o in zip(made, operands)])(operands)
        jax.jit(lambda operands: [gradient(op, *o) for (some, op, _), o in zip(made, operands) if some])(operands)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted)):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


D = 16
ROWS, HEADS = ((2, 3, D),), ((2, 3, 4, D), (2, 3, 2, D))
MODULES = {  # positional arguments of the nnx module and of the linen module, shapes of the inputs
    "RMSNorm": ((D,), (), ROWS),
    "AddRMSNorm": ((D,), (), ROWS * 2),
    "RMSNormAdd": ((D,), (), ROWS * 2),
    "GatedGroupRMSNorm": ((D,), (D,), ROWS * 2),
    "MatmulPartialRMSNorm": ((D, 24, 8), (24, 8), ROWS),
    "QKNormRope": ((D,), (), HEADS),
}


@pytest.mark.parametrize("mode", TRACING)
@pytest.mark.parametrize("kind", ("nnx", "linen"))
def test_every_module_traces(one_kernel, kind, mode):
    flax = pytest.importorskip("flax")
    modules = pytest.importorskip(f"jax_fusednorm.flax.{kind}")
    assert set(MODULES) == set(modules.__all__)
    for name, (nnx_arguments, linen_arguments, shapes) in MODULES.items():
        inputs = [jnp.ones(shape) for shape in shapes] + [jnp.arange(3)] * (name == "QKNormRope")
        options = dict(dtype=jnp.float32, implementation=one_kernel)
        with TRACING[mode]():
            if kind == "nnx":
                graph, params = flax.nnx.split(getattr(modules, name)(*nnx_arguments, rngs=flax.nnx.Rngs(0), **options))
                apply = lambda params, *inputs, graph=graph: flax.nnx.merge(graph, params)(*inputs)  # noqa: E731
            else:
                made = getattr(modules, name)(*linen_arguments, **options)
                params, apply = made.init(jax.random.key(0), *inputs), made.apply
            jax.jit(jax.grad(lambda params, *inputs, apply=apply: sum(jnp.sum(r) for r in jax.tree.leaves(apply(params, *inputs))))).lower(
                params, *inputs)
