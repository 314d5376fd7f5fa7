"""Several devices: shard_map and sharded arguments give the numbers of one device, gradients of a shared scale included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import oracle
from ops import ADD_RMS_NORM, ADD_RMS_NORM_STORAGE, assert_trees_close, every_op, kernel_calls, kernels_expected, loss

pytestmark = pytest.mark.skipif("jax.device_count() < 4", reason="needs four devices")
SHAPE = (8, 6, 24)
MESHES = pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))


def mesh_of(axis_type, shape=(2, 2), names=("b", "s")):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def specs(tested, rows=P("b", "s"), scale=P()):
    return (rows,) * tested.rows + (scale,)


def placed(mesh, args, specs):
    return tuple(jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs))


def unsharded(tested, args):
    argnums = tuple(range(len(args)))
    return jax.jit(lambda *a: (tested.plain(*a), jax.grad(loss(tested.plain), argnums)(*a)))(*args)


@every_op
@MESHES
def test_grad_of_shard_map(jnp_or_one_kernel, tested, axis_type):
    mesh, args = mesh_of(axis_type), tested.arguments(SHAPE)
    sharded = jax.shard_map(tested.bound(jnp_or_one_kernel), mesh=mesh, in_specs=specs(tested), out_specs=P("b", "s"))
    argnums = tuple(range(len(args)))
    got = jax.jit(lambda *a: (sharded(*a), jax.grad(loss(sharded), argnums)(*a)))(*placed(mesh, args, specs(tested)))
    assert_trees_close(got, unsharded(tested, args))


@every_op
def test_grad_inside_shard_map(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments(SHAPE)
    argnums = tuple(range(len(args)))

    def inside(*a):
        # the loss of the shards together; the scale is the same on all of them
        return jax.grad(lambda *a: jax.lax.psum(loss(tested.bound(jnp_or_one_kernel))(*a), ("b", "s")), argnums)(*a)

    got = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=specs(tested), out_specs=specs(tested)))(*args)
    assert_trees_close(got, unsharded(tested, args)[1])


@every_op
def test_second_order_and_jvp_through_shard_map(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments((4, 2, 12))
    argnums = tuple(range(len(args)))
    tangents = tested.arguments((4, 2, 12), seed=50)

    def evaluate(f):
        return jax.jit(lambda a, t: (jax.jvp(f, a, t), jax.jvp(jax.grad(loss(f), argnums), a, t)))(args, tangents)

    sharded = jax.shard_map(tested.bound(jnp_or_one_kernel), mesh=mesh, in_specs=specs(tested), out_specs=P("b", "s"))
    assert_trees_close(evaluate(sharded), evaluate(tested.plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tested", (ADD_RMS_NORM, ADD_RMS_NORM_STORAGE), ids=str)
def test_a_replicated_residual_inside_shard_map(jnp_or_one_kernel, tested):
    mesh, (x, residual, scale) = mesh_of(AxisType.Auto, (4,), ("b",)), tested.arguments((4, 24))
    residual, argnums = residual[:1], (0, 1, 2)

    def spread(f):
        return lambda x, residual, scale: f(x, jnp.broadcast_to(residual, x.shape), scale)

    sharded = jax.shard_map(tested.bound(jnp_or_one_kernel), mesh=mesh, in_specs=(P("b"), P(), P()), out_specs=P("b"))
    got, want = (jax.jit(jax.grad(loss(f), argnums))(x, residual, scale) for f in (sharded, spread(tested.plain)))
    assert_trees_close(got, want)


@every_op
def test_remat_and_scan_inside_shard_map(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments(SHAPE)
    argnums = tuple(range(len(args)))

    def layers(f):
        def stack(*a):
            step = jax.checkpoint(lambda x, _: (x + 0.1 * f(x, *a[1:])[0], None))
            return (jax.lax.scan(step, a[0], None, length=3)[0],)
        return stack

    sharded = jax.shard_map(layers(tested.bound(jnp_or_one_kernel)), mesh=mesh, in_specs=specs(tested), out_specs=P("b", "s"))
    got, want = (jax.jit(jax.grad(loss(f), argnums))(*args) for f in (sharded, layers(tested.plain)))
    assert_trees_close(got, want)


@every_op
def test_vmap_of_shard_map_and_shard_map_of_vmap(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments((3, *SHAPE))
    axes, f = (0,) * tested.rows + (None,), tested.bound(jnp_or_one_kernel)
    outside = jax.vmap(jax.shard_map(f, mesh=mesh, in_specs=specs(tested), out_specs=P("b", "s")), axes)
    inner = specs(tested, P(None, "b", "s"))
    inside = jax.shard_map(jax.vmap(f, axes), mesh=mesh, in_specs=inner, out_specs=P(None, "b", "s"))
    want = tested.plain(*args)
    assert_trees_close(jax.jit(outside)(*args), want)
    assert_trees_close(jax.jit(inside)(*args), want)


@every_op
def test_the_kernel_runs_inside_shard_map(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments(SHAPE)
    sharded = jax.shard_map(tested.bound(jnp_or_one_kernel), mesh=mesh, in_specs=specs(tested), out_specs=P("b", "s"))
    assert kernel_calls(sharded, *args) == kernels_expected(jnp_or_one_kernel)


@every_op
@MESHES
@pytest.mark.parametrize("rows", (P("b"), P("b", "s"), P(("b", "s")), P(None, "s")), ids=str)
def test_sharded_arguments_of_jit(jnp_or_one_kernel, tested, axis_type, rows):
    mesh, args = mesh_of(axis_type), tested.arguments(SHAPE)
    f, argnums = tested.bound(jnp_or_one_kernel), tuple(range(len(args)))
    placed_args = placed(mesh, args, specs(tested, rows))
    with jax.set_mesh(mesh):
        step = jax.jit(lambda *a: (f(*a), jax.grad(loss(f), argnums)(*a)))
        got = step(*placed_args)
        text = step.lower(*placed_args).compile().as_text()
    assert_trees_close(got, unsharded(tested, args))
    assert all(o.sharding.is_equivalent_to(NamedSharding(mesh, rows), 3) for o in got[0])
    assert "all-gather" not in text


@every_op
def test_a_sharded_reduced_axis(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments(SHAPE)
    f, argnums = tested.bound(jnp_or_one_kernel), tuple(range(len(args)))
    got = jax.jit(lambda *a: (f(*a), jax.grad(loss(f), argnums)(*a)))(*placed(mesh, args, specs(tested, P("b", None, "s"), P("s"))))
    assert_trees_close(got, unsharded(tested, args))


@every_op
def test_a_sharded_scale(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments(SHAPE)
    f, argnums = tested.bound(jnp_or_one_kernel), tuple(range(len(args)))
    got = jax.jit(lambda *a: (f(*a), jax.grad(loss(f), argnums)(*a)))(*placed(mesh, args, specs(tested, P("b"), P("b"))))
    assert_trees_close(got, unsharded(tested, args))


@every_op
def test_eager_calls_on_sharded_arrays(jnp_or_one_kernel, tested):
    mesh, args = mesh_of(AxisType.Auto), tested.arguments(SHAPE)
    got = tested.bound(jnp_or_one_kernel)(*placed(mesh, args, specs(tested)))
    assert_trees_close(got, unsharded(tested, args)[0])


@every_op
def test_arrays_on_another_device_than_the_first(jnp_or_one_kernel, tested):
    args = tested.arguments(SHAPE)
    there = [jax.device_put(a, jax.devices()[3]) for a in args]
    for got, want in zip(tested.bound(jnp_or_one_kernel)(*there), tested.bound(jnp_or_one_kernel)(*args)):
        assert got.devices() == {jax.devices()[3]}
        oracle.assert_same_bits(got, np.asarray(want))
