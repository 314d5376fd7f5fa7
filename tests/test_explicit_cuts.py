"""Operands of one call that an Explicit mesh, or shard_map, cuts unlike: right, or refused as jnp refuses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_fusednorm import add_rms_norm, head_rms_norm_rope, matmul_partial_rms_norm, qk_rms_norm_rope, rms_norm_add, rope_table
from ops import assert_trees_close, loss
from plain import draw, draw_scale
from test_paged_sharding import CACHE, K, Q, V, arrays, placed as placed_cache, want_of

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
X, Y, SCALE = draw(1, (4, 2, 8)), draw(2, (4, 2, 8)), draw_scale(3, 8, "float32")
HEADS, KEYS, POSITIONS = draw(1, (2, 4, 4, 8)), draw(2, (2, 4, 2, 8)), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)


def tabled(x, scale, table, positions):
    return head_rms_norm_rope(x, scale, positions, freqs_cis=table)


def partly(x, scale, positions):
    return head_rms_norm_rope(x, scale, positions, rope_dim=4)


# op, operands with their cuts, how many of them have gradients
CALLS = {
    "a scale alone": (rms_norm_add, ((X, P()), (Y, P()), (SCALE, P("b"))), 3),
    "the first summand alone": (lambda *a: add_rms_norm(*a, sum_rounding="storage"), ((X, P("b")), (Y, P()), (SCALE, P())), 3),
    "a weight's outputs alone": (matmul_partial_rms_norm, ((X, P()), (draw(4, (8, 8)), P("b")), (SCALE[:4], P())), 3),
    "a table's rows": (tabled, ((HEADS, P()), (SCALE, P()), (rope_table(8, 8), P("b")), (POSITIONS, P())), 3),
    "a table's columns": (tabled, ((HEADS, P("b")), (SCALE, P()), (rope_table(8, 4), P(None, "h")), (POSITIONS, P("b"))), 3),
    "positions": (partly, ((HEADS, P()), (SCALE, P()), (POSITIONS, P("b"))), 2),
    "the keys' heads alone": (qk_rms_norm_rope, ((HEADS, P("b")), (KEYS, P("b", None, "h")), (SCALE, P()), (SCALE, P()), (POSITIONS, P())), 4),
    "keys by another axis": (qk_rms_norm_rope, ((HEADS, P(None, "b")), (KEYS, P("h")), (SCALE, P()), (SCALE, P()), (POSITIONS, P())), 4),
    "keys' batch by the axis of the queries' tokens":
        (qk_rms_norm_rope, ((HEADS, P(None, "b")), (KEYS, P("b")), (SCALE, P()), (SCALE, P()), (POSITIONS, P())), 4),
    "rows over an axis of one device": (rms_norm_add, ((X, P("one")), (Y, P("one")), (SCALE, P())), 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_that_are_cut_unlike(host_kernel, name):
    op, operands, floats = CALLS[name]
    mesh = jax.make_mesh((2, 2, 1), ("b", "h", "one"), axis_types=(AxisType.Explicit,) * 3)

    def both(*args):
        def f(*active):
            out = op(*active, *args[floats:])
            return out if isinstance(out, tuple) else (out,)

        return f(*args[:floats]), jax.grad(loss(f), tuple(range(floats)))(*args[:floats])

    want = jax.tree.map(np.asarray, jax.jit(both)(*(a for a, _ in operands)))
    with jax.set_mesh(mesh):
        got = jax.jit(both)(*(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in operands))
    assert_trees_close(jax.tree.map(np.asarray, got), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_shard_map_over_the_heads_of_queries_alone(host_kernel, kind):
    """The keys' result is the same on all devices, and shard_map sees it."""
    mesh, rows = jax.make_mesh((4,), ("h",), axis_types=(kind,)), P(None, None, "h")
    f = jax.shard_map(qk_rms_norm_rope, mesh=mesh, in_specs=(rows, P(), P(), P(), P()), out_specs=(rows, P()))
    args = HEADS, KEYS, SCALE, SCALE, POSITIONS
    got = jax.jit(lambda *a: (f(*a), jax.grad(loss(lambda *a: f(*a, POSITIONS)), (0, 1, 2, 3))(*a[:4])))(
        *(jax.device_put(a, NamedSharding(mesh, rows if a is HEADS else P())) for a in args))
    want = qk_rms_norm_rope(*args), jax.grad(loss(lambda *a: qk_rms_norm_rope(*a, POSITIONS)), (0, 1, 2, 3))(*args[:4])
    assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)


def test_explicit_axes_that_shard_map_leaves(host_kernel):
    """Heads over one of them, and batch by hand over another: forward and backward."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto, AxisType.Explicit))
    f = jax.shard_map(lambda q, k: qk_rms_norm_rope(q, k, SCALE, SCALE, POSITIONS[0]), mesh=mesh, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})

    def both(f):
        return lambda *a: (f(*a), jax.grad(loss(f), (0, 1))(*a))

    want = jax.jit(both(lambda q, k: qk_rms_norm_rope(q, k, SCALE, SCALE, POSITIONS[0])))(HEADS, KEYS)
    for keys in (P("b", None, "h"), P("b")):
        with jax.set_mesh(mesh):
            got = jax.jit(both(f))(*(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((HEADS, P("b", None, "h")), (KEYS, keys))))
        assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)


def test_a_table_whose_gradient_is_taken_through_shard_map_beside_explicit_axes(host_kernel):
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto, AxisType.Explicit))
    f = jax.shard_map(tabled, mesh=mesh, in_specs=(P("b"), P(), P(), P("b")), out_specs=P("b"), axis_names={"b"})
    args = HEADS, SCALE, rope_table(8, 8), POSITIONS

    def gradients(f):
        return jax.grad(loss(lambda *a: (f(*a, POSITIONS),)), (0, 1, 2))

    want = jax.jit(gradients(tabled))(*args[:3])
    with jax.set_mesh(mesh):
        got = jax.jit(gradients(f))(*(jax.device_put(a, NamedSharding(mesh, P("b") if a is HEADS else P())) for a in args[:3]))
    assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)


def test_new_keys_cut_unlike_the_cache(host_kernel):
    want = want_of(arrays, Q, CACHE, K, V)
    arrays.implementation = None
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    for pages, keys in ((P(), P(None, "h")), (P(*[None] * 4, "b"), P(None, "h")), (P(*[None] * 4, "b"), P())):
        with jax.set_mesh(mesh):
            got = jax.jit(lambda *a: arrays(*a))(*placed_cache(mesh, P(None, "h"), pages, keys))  # pylint: disable=unnecessary-lambda
        assert_trees_close(jax.tree.map(np.asarray, got), want, rtol=1e-5, atol=1e-5)
