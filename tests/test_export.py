"""jax.export: the reference for every platform with no check disabled, the kernels with EXPORT_CHECKS, and both called elsewhere."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fusednorm
from ops import ALL, assert_trees_close, every_op, loss

SHAPE = (6, 24)


def structs(tested, shape=SHAPE):
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in tested.arguments(shape))


def reloaded(exported):
    return jax.export.deserialize(exported.serialize(vjp_order=1))


@every_op
@pytest.mark.parametrize("value", ("auto", "jnp"))
def test_the_reference_exports_for_every_platform_with_no_check_disabled(tested, value):
    f = tested.bound(value)
    exported = jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"))(*structs(tested))
    assert "custom_call @jax_fusednorm" not in exported.mlir_module()
    args = tested.arguments(SHAPE)
    again = reloaded(exported)
    assert_trees_close(tuple(again.call(*args)), tested.bound("jnp")(*args))
    argnums = tuple(range(len(args)))
    assert_trees_close(jax.grad(loss(lambda *a: tuple(again.call(*a))), argnums)(*args), jax.grad(loss(f), argnums)(*args))


@every_op
def test_a_symbolic_batch(tested, implementation):
    batch, = jax.export.symbolic_shape("batch")
    rows = [jax.ShapeDtypeStruct((batch, 3, 24), jnp.float32)] * tested.rows
    scale = jax.ShapeDtypeStruct((24,), jnp.float32)
    f = tested.bound(implementation)
    exported = reloaded(jax.export.export(jax.jit(f), disabled_checks=jax_fusednorm.EXPORT_CHECKS)(*rows, scale))
    for n in (1, 5, 100):
        args = tested.arguments((n, 3, 24))
        argnums = tuple(range(len(args)))
        assert_trees_close(tuple(exported.call(*args)), tested.bound("jnp")(*args))
        got = jax.grad(loss(lambda *a: tuple(exported.call(*a))), argnums)(*args)
        assert_trees_close(got, jax.grad(loss(tested.bound("jnp")), argnums)(*args))


@every_op
def test_a_kernel_exports_only_with_its_checks_disabled(tested, kernel):
    f = jax.jit(tested.bound(kernel))
    with pytest.raises(ValueError, match="jax_fusednorm_"):
        jax.export.export(f)(*structs(tested))
    exported = jax.export.export(f, disabled_checks=jax_fusednorm.EXPORT_CHECKS)(*structs(tested))
    assert "custom_call @jax_fusednorm" in exported.mlir_module()
    args = tested.arguments(SHAPE)
    assert_trees_close(tuple(reloaded(exported).call(*args)), tested.bound("jnp")(*args))


def test_a_kernel_for_a_platform_that_has_none_is_refused(kernel):
    f = jax.jit(ALL[0].bound(kernel))
    with pytest.raises(NotImplementedError, match=f"implementation='{kernel}' was asked for, but .* platform tpu"):
        jax.export.export(f, platforms=("tpu",), disabled_checks=jax_fusednorm.EXPORT_CHECKS)(*structs(ALL[0]))


def run(program, *arguments):
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False,
                          cwd=pathlib.Path(__file__).parent, env={**os.environ, "XLA_FLAGS": ""})


CALL = """
import sys, jax, jax.export, numpy as np
{imports}
data = np.load(sys.argv[2])
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
out = exported.call(*(data[n] for n in sorted(data.files)))
np.savez(sys.argv[3], *map(np.asarray, out))
"""


def test_an_artefact_is_called_in_a_fresh_process(kernel, tmp_path):
    tested, paths = ALL[1], [tmp_path / n for n in ("artefact", "arguments.npz", "results.npz")]
    args = tested.arguments(SHAPE)
    exported = jax.export.export(jax.jit(tested.bound(kernel)), disabled_checks=jax_fusednorm.EXPORT_CHECKS)(*args)
    paths[0].write_bytes(exported.serialize())
    np.savez(paths[1], *map(np.asarray, args))
    done = run(CALL.format(imports="import jax_fusednorm"), *paths)
    assert done.returncode == 0, done.stderr
    results = np.load(paths[2])
    assert_trees_close(tuple(results[n] for n in sorted(results.files)), jax.tree.map(np.asarray, tested.bound("jnp")(*args)))
    # where the package was not imported, XLA names the handler it misses, and the name says whose it is
    done = run(CALL.format(imports=""), *paths)
    assert done.returncode != 0 and f"jax_fusednorm_{kernel}_add_rms_norm_v" in done.stderr
