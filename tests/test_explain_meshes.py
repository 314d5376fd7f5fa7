"""explain() on meshes: the kernel, or each reason why the reference runs. And exports of calls that are cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from jax_fusednorm import EXPORT_CHECKS, add_rms_norm, explain, gated_group_rms_norm, matmul_partial_rms_norm, qk_rms_norm_rope_paged, rms_norm
from jax_fusednorm.core import lowering, primitive
from jax_fusednorm.ops.rms_norm import RMS_NORM
from ops import assert_trees_close
from plain import draw, draw_scale
from test_paged_sharding import CACHE, OFFSETS, PACKED, SCALE, arrays

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X, WEIGHT, GAIN = draw(1, (8, 4, 16)), draw(2, (48, 16)), draw_scale(3, 16, "float32")
NORMALIZED = "jnp: the normalized axis is cut over devices"
WHOLE = "jnp: an axis is cut over devices of which the kernel needs the whole"
in_place = functools.partial(gated_group_rms_norm, group_size=8, gate_start=0)
# op, operands with their cuts, and what explain says on an Auto and on an Explicit mesh
CALLS = {
    "rows": (rms_norm, ((X, P("b", "s")), (GAIN, P())), "host", "host"),
    "the normalized axis": (rms_norm, ((X, P("b", None, "s")), (GAIN, P())), NORMALIZED, NORMALIZED),
    "groups beside a gate in place": (in_place, ((X, P("b", None, "s")), (X, P("b")), (GAIN, P())), WHOLE, WHOLE),
    "a weight's outputs": (matmul_partial_rms_norm, ((X, P("b")), (WEIGHT, P("s")), (GAIN, P())), WHOLE, WHOLE),
    "operands in different ways": (add_rms_norm, ((X, P("b")), (X, P()), (GAIN, P())), "host", "jnp: the operands are cut in different ways"),
}


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("b", "s"), axis_types=(kind, kind))


def put(mesh, operands):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in operands]


@pytest.mark.parametrize("name", CALLS)
def test_what_runs_and_why(host_kernel, name):
    op, operands, *said = CALLS[name]
    for kind, wanted in zip((AUTO, EXPLICIT), said):
        mesh = mesh_of(kind)
        args = put(mesh, operands)
        with jax.set_mesh(mesh):
            assert str(explain(op, *args)["cpu"]).startswith(wanted)
            # as many kernels as it says
            assert ("custom_call_target=\"jax_fusednorm" in jax.jit(op).lower(*args).compile().as_text()) == (wanted == "host")
        assert explain(op, *args)["tpu"].runs == "jnp"


def test_without_a_mesh_in_force_the_arguments_say_it(host_kernel):
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh_of(AUTO), spec)) for a, spec in ((X, P("b", None, "s")), (GAIN, P()))]
    assert str(explain(rms_norm, *like)["cpu"]) == NORMALIZED


def test_shard_map_that_leaves_auto_axes(host_kernel):
    mesh = mesh_of(AUTO)
    f = jax.shard_map(rms_norm, mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"), axis_names={"b"})
    assert str(explain(f, *put(mesh, ((X, P("b")), (GAIN, P()))))["cpu"]) == "jnp: shard_map leaves Auto axes, whose shardings cannot be seen inside"


def test_without_shardy(host_kernel):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert str(explain(rms_norm, *put(mesh_of(AUTO), ((X, P("b")), (GAIN, P()))))["cpu"]) == "jnp: the Shardy partitioner is off"
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def test_an_abstract_mesh_of_auto_axes(host_kernel):
    """As where JAX has no way to ask for devices."""
    primitive._wants_devices.discard(RMS_NORM.op.with_kernels)
    try:
        sharding = NamedSharding(AbstractMesh((4,), ("b",), axis_types=(AUTO,)), P("b"))
        assert str(explain(rms_norm, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding), platforms=("cpu",))["cpu"]) == \
            "jnp: the devices are not known while lowering"
    finally:
        primitive._wants_devices.add(RMS_NORM.op.with_kernels)


def reasons(lower):
    with lowering._recording() as decisions:
        lower()
    return [str(decision) for decision in decisions]


def test_a_packed_projection_has_no_axis_to_cut(host_kernel):
    """Its slices have, and are asked next."""
    mesh = mesh_of(AUTO)
    cache = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), CACHE)
    f = jax.jit(lambda packed, cache: qk_rms_norm_rope_paged(packed, cache, SCALE, SCALE, arrays.table, OFFSETS, layer=1, num_heads=8, k_start=128,
                                                             v_start=192)[0])
    found = reasons(lambda: f.lower(jax.device_put(PACKED, NamedSharding(mesh, P())), cache))
    assert found[0] == "jnp: nothing of it can be cut" and found[1].startswith("host")


def exported(f, args):
    return jax.export.export(jax.jit(f), disabled_checks=EXPORT_CHECKS)(*args)


@pytest.mark.parametrize("kind", (AUTO, EXPLICIT), ids=("auto", "explicit"))
def test_a_cut_call_is_exported(host_kernel, kind):
    """A kernel asked for by name: an exported program knows only how Explicit axes cut it."""
    mesh = mesh_of(kind)
    args = put(mesh, ((X, P("b")), (GAIN, P())))
    want = np.asarray(rms_norm(X, GAIN, implementation="jnp"))
    for implementation in (None, "host", "kernel"):
        def f(x, gain, implementation=implementation):
            return rms_norm(x, gain, implementation=implementation)

        with jax.set_mesh(mesh):
            why = reasons(lambda f=f: exported(f, args))
            artefact = jax.export.deserialize(exported(f, args).serialize())
            got = jax.jit(artefact.call)(*args)
        keeps = implementation and kind == EXPLICIT
        assert ("jax_fusednorm_host" in artefact.mlir_module()) == bool(keeps)
        if implementation and kind == AUTO:
            assert why == ["jnp: an exported program cannot ask how Auto axes cut the call"]
        assert_trees_close(np.asarray(got), want)
        gradient = exported(jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1)), args)
        assert_trees_close(jax.tree.map(np.asarray, jax.jit(gradient.call)(*args)),
                           jax.tree.map(np.asarray, jax.grad(lambda *a: jnp.sin(rms_norm(*a, implementation="jnp")).sum(), (0, 1))(X, GAIN)))
