"""matmul_partial_rms_norm on operands cut over devices: docs/sharding.md, row by row."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_fusednorm import matmul_partial_rms_norm
from ops import assert_trees_close, loss
from plain import draw, draw_scale
from test_sharding import compiled, run

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXES = pytest.mark.parametrize("axis_type", (AUTO, EXPLICIT), ids=("auto", "explicit"))
WEIGHT, SCALE = draw(2, (48, 16)) / 4, draw_scale(3, 32, "float32")
FEW, MANY = draw(1, (8, 4, 16)), draw(1, (8, 40, 16))  # rows: on each device, too


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("b", "s"), axis_types=(axis_type,) * 2)


def check(implementation, mesh, x, cut, weight_cut=P(), backward=False):
    """What the compiled program holds, and that it is right."""
    def program(implementation):
        f = functools.partial(matmul_partial_rms_norm, implementation=implementation)
        return jax.grad(loss(f), (0, 1, 2)) if backward else f

    want = jax.tree.map(np.asarray, jax.jit(program("jnp"))(x, WEIGHT, SCALE))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, cut), (WEIGHT, weight_cut), (SCALE, P()))]
    with jax.set_mesh(mesh):
        executable, found = compiled(program(implementation), *placed)
        assert_trees_close(run(executable, placed), want, rtol=1e-4, atol=1e-4)
    return executable, found


@AXES
def test_rows_may_be_cut(one_kernel, axis_type):
    mesh = mesh_of(axis_type)
    for x, cut in ((FEW, P("b")), (FEW, P("b", "s")), (MANY, P("b", "s"))):
        executable, found = check(one_kernel, mesh, x, cut)
        assert found == {"kernels": 1, "all-gather": 0, "all-reduce": 0, "other": 0}, cut
        assert executable.output_shardings[0].is_equivalent_to(NamedSharding(mesh, cut), 3)
        _, found = check(one_kernel, mesh, x, cut, backward=True)
        assert found["kernels"] == 1 and found["all-gather"] == found["other"] == 0 and 1 <= found["all-reduce"] <= 2, cut


@pytest.mark.parametrize("x_cut, weight_cut", ((P(None, None, "s"), P(None, "s")), (P("b"), P("s")), (P("b", None, "s"), P())))
def test_a_cut_width_or_outputs_are_gathered_under_auto_meshes(one_kernel, x_cut, weight_cut):
    _, found = check(one_kernel, mesh_of(AUTO), FEW, x_cut, weight_cut)
    assert found == {"kernels": 1, "all-gather": ("s" in x_cut) + ("s" in weight_cut), "all-reduce": 0, "other": 0}


@pytest.mark.parametrize("x_cut, weight_cut", ((P("b"), P("s")), (P("b"), P(None, "s")), (P("b", None, "s"), P())))
def test_a_cut_width_or_outputs_run_the_reference_under_explicit_meshes(one_kernel, x_cut, weight_cut):
    _, found = check(one_kernel, mesh_of(EXPLICIT), FEW, x_cut, weight_cut)
    assert found["kernels"] == 0
