"""gated_group_rms_norm on operands that are cut over devices: rows and whole groups keep the kernel. Rows of docs/sharding.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_fusednorm import gated_group_rms_norm
from ops import assert_trees_close
from plain import draw, draw_scale
from test_sharding import MESHES, compiled, mesh_of, run

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
SHAPE, GROUPS = (8, 2, 32), dict(group_size=8)
one_kind = pytest.mark.parametrize("types", (MESHES["auto"], MESHES["explicit"]), ids=("auto", "explicit"))
every_direction = pytest.mark.parametrize("direction", ("forward", "backward"))


def operands(width=32):
    return draw(1, SHAPE), draw(2, (*SHAPE[:-1], width)), draw_scale(3, 32, "float32")


def program(implementation, direction, options):
    f = functools.partial(gated_group_rms_norm, implementation=implementation, **options)
    return f if direction == "forward" else jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2))


def check(kernel, direction, types, args, specs, options):
    """What the compiled program holds. Its results are those of one device."""
    mesh = mesh_of(types)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs)]
        executable, found = compiled(program(kernel, direction, options), *placed)
        got = run(executable, placed)
    assert_trees_close(got, jax.tree.map(np.asarray, jax.jit(program("jnp", direction, options))(*args)), rtol=1e-5, atol=1e-5)
    return found


KERNELS = {"forward": 1, "backward": 2}


@every_direction
@one_kind
@pytest.mark.parametrize("gate_start", (None, 3))
def test_rows_keep_the_kernel(one_kernel, types, direction, gate_start):
    found = check(one_kernel, direction, types, operands(32 if gate_start is None else 50), (P("b", "s"), P("b", "s"), P()),
                  dict(GROUPS, gate_start=gate_start))
    assert found == {"kernels": KERNELS[direction], "all-gather": 0, "all-reduce": int(direction == "backward"), "other": 0}


@every_direction
@one_kind
def test_whole_groups_keep_the_kernel(one_kernel, types, direction):
    found = check(one_kernel, direction, types, operands(), (P("b", None, "s"), P("b", None, "s"), P("s")), GROUPS)
    # under Auto meshes the scale's gradient is given back whole
    gathers = int(direction == "backward" and types == MESHES["auto"])
    assert found == {"kernels": KERNELS[direction], "all-gather": gathers, "all-reduce": int(direction == "backward"), "other": 0}


@every_direction
@one_kind
def test_cut_groups_run_the_reference(one_kernel, types, direction):
    found = check(one_kernel, direction, types, operands(), (P("b", None, "s"), P("b", None, "s"), P("s")), {})
    assert found["kernels"] == 0
    if direction == "forward":
        assert found == {"kernels": 0, "all-gather": 0, "all-reduce": 1, "other": 0}


@every_direction
@one_kind
def test_a_gate_in_place_beside_cut_channels_runs_the_reference(one_kernel, types, direction):
    for columns in (P("b"), P("b", None, "s")):
        found = check(one_kernel, direction, types, operands(50), (P("b", None, "s"), columns, P("s")), dict(GROUPS, gate_start=3))
        assert found["kernels"] == 0
        if direction == "forward" and columns == P("b"):
            assert found == {"kernels": 0, "all-gather": 0, "all-reduce": 0, "other": 0}


def test_a_scale_cut_over_the_axis_of_the_rows_is_right(one_kernel):
    for rows in (P("b"), P("b", None, "s")):
        for direction in ("forward", "backward"):
            check(one_kernel, direction, MESHES["auto"], operands(), (rows, rows, P("b")), GROUPS)


@one_kind
def test_groups_under_shard_map_keep_the_kernel(kernel, types):
    mesh, args = mesh_of(types), operands()
    cut = P("b", None, "s")
    f = jax.shard_map(functools.partial(gated_group_rms_norm, implementation=kernel, **GROUPS), mesh=mesh, in_specs=(cut, cut, P("s")), out_specs=cut)
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, (cut, cut, P("s")))]
    executable, found = compiled(f, *placed)
    assert found == {"kernels": 1, "all-gather": 0, "all-reduce": 0, "other": 0}
    assert_trees_close(run(executable, placed), np.asarray(gated_group_rms_norm(*args, implementation="jnp", **GROUPS)), rtol=1e-5, atol=1e-5)
