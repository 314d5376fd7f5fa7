"""l2_norm against its formula: the kernel, and every transformation that came with the declaration."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_fusednorm.ops.l2_norm import l2_norm

KERNEL = os.environ.get("L2_NORM_ON", "host")
op = functools.partial(l2_norm, implementation=KERNEL)


def formula(x, epsilon=1e-6):
    wide = x.astype(jnp.float32)
    return (wide / jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def draw(*shape):
    return jax.random.normal(jax.random.key(0), shape)


def close(got, want, tolerance=2e-6):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (g, w)), rtol=tolerance, atol=tolerance), got, want)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 8e-3), ("float16", 1e-3)])
@pytest.mark.parametrize("width", [1, 3000])
def test_kernel(dtype, tolerance, width):
    x = draw(5, width).astype(dtype)
    close(op(x), formula(x), tolerance)


def test_transformations():
    def transformed(f):
        def loss(x):
            return jnp.sum(jnp.sin(f(x)))

        def results(x):
            step = jax.checkpoint(lambda carry, row: (f(carry + row), f(row)))
            return [jax.vmap(jax.vmap(f, in_axes=1), in_axes=2, out_axes=1)(x), jax.jvp(f, (x,), (x + 1,)), jax.grad(loss)(x),
                    jax.jvp(jax.grad(loss), (x,), (x + 1,)), jax.lax.scan(step, x[0], x)]
        return jax.jit(results)

    x = draw(3, 4, 20)
    close(transformed(op)(x), transformed(formula)(x), 2e-5)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("cut, calls", [("rows", 1), ("row", 0)])
def test_sharding(cut, calls):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(draw(4, 64), NamedSharding(mesh, PartitionSpec("i") if cut == "rows" else PartitionSpec(None, "i")))
    program = jax.jit(op).lower(x).compile()
    close(program(x), formula(x))
    assert program.as_text().count('custom_call_target="jax_fusednorm') == calls  # a cut row runs the reference
    assert "all-gather" not in program.as_text()
