"""What the compiled program holds when operands are cut over devices: docs/sharding.md, row by row.

Every check compares the numbers with one device too.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_fusednorm
from ops import ALL, assert_trees_close, every_norm, every_op, loss

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPE = (8, 4, 16)
MESHES = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "auto-explicit": (AUTO, EXPLICIT), "explicit-auto": (EXPLICIT, AUTO)}
every_mesh = pytest.mark.parametrize("types", MESHES.values(), ids=MESHES)
every_direction = pytest.mark.parametrize("direction", ("forward", "tangent", "backward"))


def mesh_of(types, shape=(4, 2)):
    return jax.make_mesh(shape, ("b", "s"), axis_types=types)


def program(tested, implementation, direction):
    return of_direction(tested, tested.bound(implementation), direction)


def of_direction(tested, f, direction):
    if direction == "forward":
        return f
    if direction == "tangent":
        return lambda *args: jax.jvp(f, args, tuple(jnp.cos(a) for a in args))
    return jax.grad(loss(f), tuple(range(tested.rows + 1)))


def compiled(f, *args):
    """(the executable, how many of each thing it holds)."""
    executable = jax.jit(f).lower(*args).compile()
    text = executable.as_text()
    found = {name: len(re.findall(pattern, text)) for name, pattern in {
        "kernels": r'custom_call_target="jax_fusednorm', "all-gather": r" all-gather(?:-start)?\(",
        "all-reduce": r" all-reduce(?:-start)?\(", "other": r" (?:collective-permute|all-to-all|reduce-scatter)(?:-start)?\("}.items()}
    return executable, found


def expected(direction):
    """A kernel for each primitive, and one collective: the sum of the scale's gradient."""
    backward = direction == "backward"
    return {"kernels": 1 if direction == "forward" else 2, "all-gather": 0, "all-reduce": int(backward), "other": 0}


def place(mesh, args, rows, scale=P()):
    return [jax.device_put(a, NamedSharding(mesh, rows if a.ndim > 1 else scale)) for a in args]


def run(executable, placed):
    # all of it: reading an array waits for one of its replicas
    return jax.tree.map(np.asarray, jax.block_until_ready(executable(*placed)))


def check(tested, implementation, direction, args, placed, want_found):
    executable, found = compiled(program(tested, implementation, direction), *placed)
    if want_found is not None:
        assert found == want_found
    got = run(executable, placed)
    want = jax.tree.map(np.asarray, jax.jit(program(tested, "jnp", direction))(*args))
    assert_trees_close(got, want, rtol=1e-5, atol=1e-5)
    return executable


ROWS_CUT = (P("b"), P("b", "s"), P(("b", "s")), P(None, "b"))


@every_norm
@every_direction
@every_mesh
def test_rows_cut_over_any_mesh_keep_the_kernel(one_kernel, tested, direction, types):
    mesh, args = mesh_of(types), tested.arguments(SHAPE)
    with jax.set_mesh(mesh):
        for rows in ROWS_CUT:
            # one dimension over an Auto and an Explicit axis at once: XLA reshards around the call, as it does for jnp
            plain = not (rows == P(("b", "s")) and types == (AUTO, EXPLICIT))
            executable = check(tested, one_kernel, direction, args, place(mesh, args, rows),
                               expected(direction) if plain else None)
            if plain:
                assert jax.tree.leaves(executable.output_shardings)[0].is_equivalent_to(NamedSharding(mesh, rows), 3)


@every_norm
@every_direction
def test_an_auto_mesh_is_known_from_the_arguments_alone(kernel, tested, direction):
    mesh, args = mesh_of(MESHES["auto"]), tested.arguments(SHAPE)
    for context in (contextlib.nullcontext(), mesh):
        with context:
            check(tested, kernel, direction, args, place(mesh, args, P("b", "s")), expected(direction))


@every_norm
@every_direction
@every_mesh
def test_a_cut_reduced_axis_runs_the_reference(one_kernel, tested, direction, types):
    mesh, args = mesh_of(types), tested.arguments(SHAPE)
    with jax.set_mesh(mesh):
        placed = place(mesh, args, P("b", None, "s"), P("s") if types == MESHES["explicit"] else P())
        _, of_jnp = compiled(program(tested, "jnp", direction), *placed)
        executable = check(tested, one_kernel, direction, args, placed, None)
        _, found = compiled(program(tested, one_kernel, direction), *placed)
        assert found["kernels"] == 0
        if direction == "forward":
            assert found == of_jnp and found["all-gather"] == 0
            assert executable.output_shardings[0].is_equivalent_to(NamedSharding(mesh, P("b", None, "s")), 3)


@every_norm
def test_a_fully_sharded_scale_costs_its_own_gather(one_kernel, tested):
    mesh, args = mesh_of(MESHES["auto"]), tested.arguments(SHAPE)
    want = {**expected("forward"), "all-gather": 1}
    check(tested, one_kernel, "forward", args, place(mesh, args, P("b"), P("b")), want)
    check(tested, one_kernel, "backward", args, place(mesh, args, P("b"), P("b")), None)


@every_op
@every_direction
def test_rows_and_widths_that_do_not_divide_are_right(one_kernel, tested, direction):
    """What pads the last device's part is any number, here a one: no mean and no gradient may hold it."""
    mesh, args = mesh_of(MESHES["auto"]), tested.arguments((6, 4, 17))

    def cut(implementation, spec):
        f = program(tested, implementation, direction)
        return lambda *args: f(*(jax.lax.with_sharding_constraint(jnp.cos(a), NamedSharding(mesh, spec)) if a.ndim > 1 else a for a in args))

    for spec in (P("b"), P(None, None, "s")):
        with jax.set_mesh(mesh):
            got = jax.jit(cut(one_kernel, spec), out_shardings=NamedSharding(mesh, P()))(*args)
        assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, jax.jit(cut("jnp", P()))(*args)), rtol=1e-5, atol=1e-5)


@every_norm
@every_direction
@pytest.mark.parametrize("axis_type", (AUTO, EXPLICIT), ids=("auto", "explicit"))
def test_shard_map_keeps_the_kernel(kernel, tested, direction, axis_type):
    mesh, args = mesh_of((axis_type, axis_type)), tested.arguments(SHAPE)
    f = jax.shard_map(tested.bound(kernel), mesh=mesh, in_specs=(P("b", "s"),) * tested.rows + (P(),), out_specs=P("b", "s"))
    placed = place(mesh, args, P("b", "s"))
    executable, found = compiled(of_direction(tested, f, direction), *placed)
    assert found == expected(direction)
    want = jax.jit(program(tested, "jnp", direction))(*args)
    assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, want))


@every_norm
def test_shard_map_over_one_of_two_auto_axes_runs_the_reference(one_kernel, tested):
    mesh, args = mesh_of(MESHES["auto"]), tested.arguments(SHAPE)
    f = jax.shard_map(tested.bound(one_kernel), mesh=mesh, in_specs=(P("b"),) * tested.rows + (P(),), out_specs=P("b"),
                      axis_names={"b"})
    executable, found = compiled(f, *place(mesh, args, P("b")))
    assert found["kernels"] == 0
    assert_trees_close(run(executable, place(mesh, args, P("b"))), jax.tree.map(np.asarray, tested.bound("jnp")(*args)))


@every_norm
@every_mesh
def test_vmap_of_cut_operands_keeps_the_kernel(one_kernel, tested, types):
    mesh, args = mesh_of(types), tested.arguments(SHAPE)
    with jax.set_mesh(mesh):
        placed = place(mesh, args, P("b", "s"))
        for axis in (0, 1):
            f = jax.vmap(tested.bound(one_kernel), in_axes=(axis,) * tested.rows + (None,), out_axes=axis)
            executable, found = compiled(f, *placed)
            assert found == expected("forward")
            assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, tested.bound("jnp")(*args)))


@every_norm
def test_scan_with_remat_over_a_mesh_keeps_the_kernel(kernel, tested):
    mesh, args = mesh_of(MESHES["auto"]), tested.arguments(SHAPE)
    f = tested.bound(kernel)

    def chained(*args):
        step = jax.checkpoint(lambda x, _: (f(x, *args[1:])[0], None))
        return (jax.lax.scan(step, args[0], None, length=3)[0] ** 2).sum()

    placed = place(mesh, args, P("b"))
    executable, found = compiled(jax.grad(chained, len(args) - 1), *placed)
    assert found["all-gather"] == 0 and found["kernels"] > 0
    got = run(executable, placed)
    assert got.shape == (SHAPE[-1],) and np.isfinite(got).all()


def test_an_eager_op_under_a_mesh_keeps_the_kernel(kernel):
    mesh, args = mesh_of(MESHES["explicit"]), ALL[1].arguments(SHAPE)
    with jax.set_mesh(mesh):
        got = ALL[1].bound(kernel)(*place(mesh, args, P("b")))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, P("b")), 3)
    assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, ALL[1].bound("jnp")(*args)))


def test_an_abstract_mesh_runs_jnp():
    """JAX refuses it to primitives that ask for their devices: the plain twin has no such wish."""
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(jax.sharding.AbstractMesh((4,), ("b",)), P("b")))
    f = functools.partial(jax_fusednorm.rms_norm, implementation="jnp")
    assert "custom_call @jax_fusednorm" not in jax.jit(f).trace(x).lower(lowering_platforms=("tpu",)).as_text()


def test_without_shardy_several_devices_run_the_reference(one_kernel):
    mesh, args = mesh_of(MESHES["auto"]), ALL[0].arguments(SHAPE)
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        _, found = compiled(ALL[0].bound(one_kernel), *place(mesh, args, P("b")))
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert found["kernels"] == 0
