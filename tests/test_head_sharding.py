"""The head ops cut over devices by batch, tokens or heads keep their kernel, and need no collective but a gradient's sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_fusednorm import head_rms_norm_rope, qk_rms_norm_rope, rope_table
from ops import assert_trees_close, loss
from plain import draw, draw_scale
from test_sharding import compiled, run

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
AXES = pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
POSITIONS = jnp.arange(8).reshape(2, 4) * 100
CUTS = (P("b", None, "h"), P(None, "b", "h"), P("b"), P(None, None, ("b", "h")), P(None, None, "h"))


def heads(x, scale, positions):
    out, copy = head_rms_norm_rope(x, scale, positions, implementation=heads.implementation, copies=(("float32", "head_major"),))
    return out, copy


def queries_and_keys(q, k, q_scale, k_scale, positions):
    return qk_rms_norm_rope(q, k, q_scale, k_scale, positions, implementation=heads.implementation)


def tabled(x, scale, table, positions):
    return head_rms_norm_rope(x, scale, positions, freqs_cis=table, implementation=heads.implementation),


SCALES = draw_scale(3, 16, "float32"), draw_scale(4, 16, "float32")
Q, K = draw(1, (2, 4, 8, 16)), draw(2, (2, 4, 8, 16))
PROGRAMS = {"heads": (heads, (Q, SCALES[0])), "queries and keys": (queries_and_keys, (Q, K, *SCALES)),
            "a table": (tabled, (Q, SCALES[0], rope_table(1000, 16)))}


@AXES
@pytest.mark.parametrize("name", PROGRAMS)
def test_batch_tokens_and_heads_may_be_cut(one_kernel, name, axis_type):
    f, args = PROGRAMS[name]
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(axis_type,) * 2)

    def backward(*args):
        return jax.grad(lambda *args: loss(lambda *args: f(*args, POSITIONS))(*args), tuple(range(len(args))))(*args)

    heads.implementation = "jnp"
    want, gradients = jax.jit(lambda *args: f(*args, POSITIONS))(*args), jax.jit(backward)(*args)
    heads.implementation = one_kernel
    for cut in CUTS:
        spec = NamedSharding(mesh, cut)
        placed = [jax.device_put(a, spec if a.ndim == 4 else NamedSharding(mesh, P())) for a in args]
        with jax.set_mesh(mesh):
            executable, found = compiled(lambda *args: f(*args, POSITIONS), *placed)
            assert found == {"kernels": 1, "all-gather": 0, "all-reduce": 0, "other": 0}, cut
            assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, want))
            assert jax.tree.leaves(executable.output_shardings)[0].is_equivalent_to(spec, 4)
            executable, found = compiled(backward, *placed)
            assert found["all-gather"] == found["other"] == 0 and found["all-reduce"] <= 2, cut
            assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, gradients), rtol=1e-4, atol=1e-4)


@AXES
def test_the_heads_of_queries_alone_may_be_cut(one_kernel, axis_type):
    """Fewer keys than devices: each device has all of them, and their scale's gradient counts once."""
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(axis_type,) * 2)
    args = Q, K[:, :, :2], *SCALES

    def both(*args):
        f = lambda *args: queries_and_keys(*args, POSITIONS)
        return f(*args), jax.grad(loss(f), (0, 1, 2, 3))(*args)

    heads.implementation = "jnp"
    want = jax.jit(both)(*args)
    heads.implementation = one_kernel
    for of_q, of_k in ((P("b", None, "h"), P("b")), (P(None, None, "h"), P()), (P("b"), P("b", None, "h"))):
        k = K if "h" in of_k else args[1]
        if k is K:
            heads.implementation = "jnp"
            want = jax.jit(both)(Q, K, *SCALES)
            heads.implementation = one_kernel
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((Q, k, *SCALES), (of_q, of_k, P(), P()))]
        with jax.set_mesh(mesh):
            executable, found = compiled(both, *placed)
            assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)
        assert found["all-gather"] == found["other"] == 0


def test_positions_cut_as_the_tokens_are(one_kernel):
    heads.implementation = one_kernel
    mesh = jax.make_mesh((2, 4), ("b", "h"))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((Q, P("b", "h")), (SCALES[0], P()), (POSITIONS, P("b", "h")))]
    executable, found = compiled(heads, *placed)
    assert found == {"kernels": 1, "all-gather": 0, "all-reduce": 0, "other": 0}
    heads.implementation = "jnp"
    assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, heads(Q, SCALES[0], POSITIONS)))


@AXES
@pytest.mark.parametrize("name", PROGRAMS)
def test_cut_channels_are_gathered(one_kernel, name, axis_type):
    f, args = PROGRAMS[name]
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(axis_type,) * 2)
    heads.implementation = "jnp"
    want = jax.jit(lambda *args: f(*args, POSITIONS))(*args)
    heads.implementation = one_kernel
    placed = [jax.device_put(a, NamedSharding(mesh, P("b", None, None, "h") if a.ndim == 4 else P())) for a in args]
    with jax.set_mesh(mesh):
        executable, _ = compiled(lambda *args: f(*args, POSITIONS), *placed)
        assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, want))


def test_shard_map_over_heads(one_kernel):
    """Tensor parallel: a device has its own heads of q and k, and all of the scales."""
    heads.implementation = one_kernel
    mesh = jax.make_mesh((4,), ("h",))
    rows = P(None, None, "h")
    f = jax.shard_map(queries_and_keys, mesh=mesh, in_specs=(rows, rows, P(), P(), P()), out_specs=rows)
    placed = [jax.device_put(a, NamedSharding(mesh, rows if a.ndim == 4 else P())) for a in (Q, K, *SCALES, POSITIONS)]
    executable, found = compiled(f, *placed)
    assert found == {"kernels": 1, "all-gather": 0, "all-reduce": 0, "other": 0}
    got = jax.jit(jax.grad(lambda *args: loss(lambda *a: f(*a, POSITIONS))(*args), (0, 2)))(*placed[:-1])
    heads.implementation = "jnp"
    assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, queries_and_keys(Q, K, *SCALES, POSITIONS)))
    want = jax.grad(lambda *args: loss(lambda *a: queries_and_keys(*a, POSITIONS))(*args), (0, 2))(Q, K, *SCALES)
    assert_trees_close(got, want, rtol=1e-4, atol=1e-4)
