"""Heads and groups that several devices of one mesh axis share: a projection cut over more devices than it has heads for.

No PartitionSpec says how XLA cuts them, over heads by one part of the axis and over channels by the rest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_fusednorm import explain, gated_group_rms_norm, head_rms_norm_rope, qk_rms_norm_rope, rms_norm
from ops import assert_trees_close
from plain import draw, draw_scale
from test_sharding import compiled

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
WIDTH = 16  # of a head
SCALE = draw_scale(3, WIDTH, "float32")
MESHES = {"4": ((4,), ("model",)), "8": ((8,), ("model",)), "2x4": ((2, 4), ("data", "model"))}


def normed(heads, implementation):
    return rms_norm(heads, SCALE, implementation=implementation)


def turned(heads, implementation):
    return head_rms_norm_rope(heads, SCALE, np.arange(heads.shape[1]), implementation=implementation)


def of_both(heads, implementation):
    q, k = qk_rms_norm_rope(heads, heads[..., :1, :] + 1, SCALE, SCALE, np.arange(heads.shape[1]), implementation=implementation)
    return q + k


def gated(heads, implementation):
    flat = heads.reshape(*heads.shape[:2], -1)
    scale = jnp.tile(SCALE, heads.shape[2])
    return gated_group_rms_norm(flat, jnp.cos(flat), scale, group_size=WIDTH, implementation=implementation).reshape(heads.shape)


def block(op, heads, implementation):
    """A projection to heads, the op, and a projection back."""
    def f(x, w, back):
        y = op((x @ w).reshape(*x.shape[:2], heads, WIDTH), implementation)
        return y.reshape(*x.shape[:2], -1) @ back
    return f


def arguments(rows, heads):
    return draw(1, (*rows, 8)), draw(2, (8, heads * WIDTH)), draw(4, (heads * WIDTH, 8))


def placed(sizes, names, args, x=P()):
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, (x, P(None, "model"), P("model")))]


def run_both(op, heads, args, cut):
    """The executables' contents, forward, with the kernel and without. The results and all gradients are those of one device."""
    found = {}
    for implementation in ("auto", "jnp"):
        f = block(op, heads, implementation)
        executable, found[implementation] = compiled(f, *cut)
        assert_trees_close(np.asarray(executable(*cut)), np.asarray(jax.jit(block(op, heads, "jnp"))(*args)), rtol=1e-4, atol=1e-4)
    got, want = (jax.jit(jax.grad(lambda *a, i=i: jnp.sin(block(op, heads, i)(*a)).sum(), (0, 1, 2)))(*a) for i, a in (("auto", cut), ("jnp", args)))
    assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=2e-4, atol=2e-4)
    return found["auto"], found["jnp"]


@pytest.mark.parametrize("op, heads, mesh", (*((normed, 2, mesh) for mesh in MESHES), (normed, 6, "4"), (turned, 2, "8"), (turned, 2, "2x4"),
                                             (gated, 2, "4"), (of_both, 2, "4")), ids=lambda value: getattr(value, "__name__", str(value)))
def test_shared_heads_keep_the_kernel_on_fewer_rows(host_kernel, op, heads, mesh):
    """A width that is cut is sent where its rows go. Nothing is gathered but what jnp gathers, too, and the one sum is the projection's."""
    args = arguments((2, 4), heads)
    auto, of_jnp = run_both(op, heads, args, placed(*MESHES[mesh], args, P("data") if mesh == "2x4" else P()))
    if op is not of_both:  # its one key is made of all
        assert (auto["kernels"], auto["all-reduce"]) == (1, 1) and auto["all-gather"] <= (of_jnp["all-gather"] if heads == 6 else 0), auto


@pytest.mark.parametrize("heads, mesh", ((2, "4"), (4, "4"), (4, "8"), (6, "4"), (2, "2x4")))
def test_where_rows_are_too_few_the_reference_runs(host_kernel, heads, mesh):
    args = arguments((1, 3), heads)
    cut = placed(*MESHES[mesh], args)
    auto, of_jnp = run_both(normed, heads, args, cut)
    whole = heads % MESHES[mesh][0][-1] == 0 or heads == 6  # of which no half is cut again: XLA gathers it first
    assert auto == {**of_jnp, "kernels": int(whole)}
    assert str(explain(block(normed, heads, None), *cut)["cpu"]).startswith("host: " if whole else "jnp: the normalized axis is cut over devices")


def test_an_array_that_is_cut_in_parts_is_taken_as_it_is(host_kernel):
    """What jit gives back is cut over no axes of a mesh."""
    args = arguments((2, 4), 2)
    project = jax.jit(lambda x, w: (x @ w).reshape(2, 4, 2, WIDTH))
    heads = project(*placed(*MESHES["4"], args)[:2])
    want = np.asarray(normed(np.asarray(heads), "jnp"))
    for f in (normed, jax.jit(normed, static_argnums=1)):
        assert_trees_close(np.asarray(f(heads, "auto")), want)


@pytest.mark.parametrize("heads", (2, 6))
def test_groups_straddle_the_devices_of_an_explicit_mesh(host_kernel, heads):
    """No reshape says how they are cut: rows are, instead, as far as they divide."""
    for sizes, names in (((4,), ("model",)), ((2, 4), ("data", "model"))):
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(sizes))
        for rows, cut in (((8, 2), P(names[0], None, "model") if len(names) == 2 else P(None, None, "model")), ((1, 3), P(None, None, "model"))):
            y, gate, scale = draw(1, (*rows, 48)), draw(2, (*rows, 48)), draw_scale(3, 48, "float32")
            f = functools.partial(gated_group_rms_norm, group_size=48 // heads)

            def both(f):
                return lambda *a: (f(*a), jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2))(*a))

            args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((y, cut), (gate, cut), (scale, P("model")))]
            with jax.set_mesh(mesh):
                got = jax.jit(both(f))(*args)
                _, found = compiled(f, *args)
            assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, cut), 3)
            assert found["kernels"] == 1 and (found["all-gather"] <= 1 or rows == (1, 3)), found  # of the scale
            want = jax.jit(both(functools.partial(f, implementation="jnp")))(y, gate, scale)
            assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)


def test_a_gate_in_place_beside_channels_of_one_group_that_are_cut(host_kernel):
    """A device has a part of the only group, and takes its own columns."""
    args = draw(1, (3, 32)), draw(2, (3, 40)), draw_scale(3, 32, "float32")
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    cut = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, (P(None, "model"), P(), P()))]
    for size in (None, 16):
        def both(*a, implementation, size=size):
            f = functools.partial(gated_group_rms_norm, gate_start=5, group_size=size, implementation=implementation)
            return f(*a), jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2))(*a)
        got, want = (jax.jit(functools.partial(both, implementation=i))(*a) for i, a in (("auto", cut), ("jnp", args)))
        assert_trees_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)
