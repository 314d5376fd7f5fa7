"""The Metal launcher where Metal wraps none of XLA's memory, or some of it: every op works on copies in buffers that are kept, and is right."""

import functools

import jax
import numpy as np
import pytest

import cases
import oracle
from jax_fusednorm import add_rms_norm, rms_norm
from jax_fusednorm.cli import calls, selftest
from jax_fusednorm.core import selfcheck
from ops import ALL, assert_trees_close, loss
from plain import draw

pytestmark = pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
MADE = "sent newBufferWithLength:options:"


@pytest.fixture
def metal(standin):
    yield standin
    assert standin.settled() == []


@pytest.mark.parametrize("how", ("nil wrapper", "short wrapper"))
def test_memory_that_metal_does_not_wrap_is_copied(metal, how):
    metal.misbehave(how)

    def check():
        for tested in ALL:
            args = tested.arguments((5, 300))
            f, plainly = tested.bound("metal"), tested.plain
            argnums = tuple(range(len(args)))
            assert_trees_close(jax.jit(lambda *a: (f(*a), jax.grad(loss(f), argnums)(*a)))(*args),
                               jax.jit(lambda *a: (plainly(*a), jax.grad(loss(plainly), argnums)(*a)))(*args))
        # what is absent is bound to another operand's or result's memory
        x = draw(2, (5, 300))
        oracle.assert_close(rms_norm(x, implementation="metal"), oracle.rms_norm(x), "float32")
        normed = add_rms_norm(x, x, return_sum=False, implementation="metal")
        oracle.assert_close(normed, oracle.add_rms_norm(x, x)[0], "float32")

    check()
    copies = metal.count("sent contents")
    assert copies > 0
    check()
    # the second time, the buffers of the first are used again
    metal.reset()
    metal.misbehave(how)
    check()
    assert metal.count("sent contents") > 0 and metal.count(MADE) == 0


@pytest.mark.parametrize("call", calls.CALLS, ids=lambda call: call.name)
def test_every_op_on_copies(metal, call):
    """Those too that update an array in place, of which a kernel writes a part."""
    metal.misbehave("nil wrapper")
    rng = np.random.default_rng(0)
    operands = call.operands(lambda *shape: selfcheck.draw(rng, shape, "float32"), 5, call.small)
    out = jax.eval_shape(functools.partial(call.op, implementation="jnp", **call.options(call.small)[0]), *operands)
    cotangents = [selfcheck.draw(rng, leaf.shape, "float32") for leaf in jax.tree.leaves(out)]
    f = jax.jit(functools.partial(selftest.results_and_gradients, call, call.small), static_argnums=0)
    want = f("jnp", operands, cotangents)
    for again in (False, True):
        made = metal.count(MADE)
        for got, wanted in zip(f("metal", operands, cotangents), want, strict=True):
            assert selfcheck.difference(got, wanted, 1e-4) is None
        assert not again or metal.count(MADE) == made  # the buffers that there are
    assert metal.count("sent contents") >= 3 * metal.count("sent commit") > 0
