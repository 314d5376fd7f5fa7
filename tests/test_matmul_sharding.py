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


def check(implementation, mesh, x, cut, weight_cut=P(), transposed=False, backward=False):
    """What the compiled program holds, and that it is right. transposed: the weight and its cut, for transpose_b=False."""
    def program(implementation):
        f = functools.partial(matmul_partial_rms_norm, transpose_b=not transposed, implementation=implementation)
        return jax.grad(loss(f), (0, 1, 2)) if backward else f

    weight = WEIGHT.T if transposed else WEIGHT
    weight_cut = P(*[*weight_cut, None, None][1::-1]) if transposed else weight_cut
    want = jax.tree.map(np.asarray, jax.jit(program("jnp"))(x, weight, SCALE))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, cut), (weight, weight_cut), (SCALE, P()))]
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


# how x [b, s, k] and the weight [n, k] are cut, and whether that is over the width, k, and over the outputs, n
CUT = (((None, None, "s"), (None, "s"), 1, 0), (("b",), (None, "s"), 1, 0), (("b", None, "s"), (), 1, 0), (("b",), ("s",), 0, 1),
       ((), ("s", "b"), 1, 1), ((), (("b", "s"),), 0, 1), ((), (None, ("b", "s")), 1, 0))


@pytest.mark.parametrize("x_cut, weight_cut, k, n", CUT)
def test_a_cut_width_or_outputs_run_the_reference_under_auto_meshes(one_kernel, x_cut, weight_cut, k, n):
    """Products are summed over the width's parts and gathered from the outputs' parts: the weight stays where it is."""
    for transposed in (False, True):
        _, found = check(one_kernel, mesh_of(AUTO), FEW, P(*x_cut), P(*weight_cut), transposed)
        assert found == {"kernels": 0, "all-gather": n, "all-reduce": k, "other": 0}
    _, found = check(one_kernel, mesh_of(AUTO), FEW, P(*x_cut), P(*weight_cut), backward=True)
    assert found["kernels"] == 0


def test_a_weight_that_is_cut_as_the_rows_are_is_gathered(one_kernel):
    """As fully sharded training has it."""
    _, found = check(one_kernel, mesh_of(AUTO), FEW, P("b"), P("b"))
    assert found == {"kernels": 1, "all-gather": 1, "all-reduce": 0, "other": 0}


@pytest.mark.parametrize("weight", (draw(4, (45, 16)), draw(5, (48, 15))), ids=("outputs", "width"))
def test_parts_that_do_not_divide_are_right(one_kernel, weight):
    """What pads them is any number, here a one."""
    mesh = mesh_of(AUTO)

    def f(x, weight, implementation, *specs):
        x, weight = (jax.lax.with_sharding_constraint(jax.numpy.cos(a), NamedSharding(mesh, spec)) for a, spec in zip((x, weight), specs))
        return matmul_partial_rms_norm(x, weight, SCALE, implementation=implementation)

    x = FEW[..., :weight.shape[1]]
    with jax.set_mesh(mesh):
        got, want = (jax.jit(lambda *a, more=more: f(*a, *more), out_shardings=NamedSharding(mesh, P()))(x, weight)
                     for more in ((one_kernel, P(None, None, "s"), P("b", "s")), ("jnp", P(), P())))
    assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_cut, weight_cut", ((P("b"), P("s")), (P("b"), P(None, "s")), (P("b", None, "s"), P())))
def test_a_cut_width_or_outputs_run_the_reference_under_explicit_meshes(one_kernel, x_cut, weight_cut):
    _, found = check(one_kernel, mesh_of(EXPLICIT), FEW, x_cut, weight_cut)
    assert found["kernels"] == 0
