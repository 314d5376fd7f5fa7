"""qk_rms_norm_rope_paged cut over devices by heads, as tensor parallel models are: the kernel stays, and nothing is sent or copied."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_fusednorm import PagedKVCache, explain, qk_rms_norm_rope_paged
from ops import assert_trees_close
from paged_op_calls import copies_of
from plain import draw, draw_scale
from test_sharding import run

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
AXES = pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
Q, K, V, SCALE = draw(1, (8, 8, 16)), draw(2, (8, 4, 16)), draw(3, (8, 4, 16)), draw_scale(4, 16, "float32")
PACKED = jnp.concatenate([a.reshape(8, -1) for a in (Q, K, V)], axis=1)
CACHE = PagedKVCache(draw(5, (8, 2, 4, 3, 4, 16)), jnp.asarray([[3, 1], [0, 5]], jnp.int32), jnp.asarray([2, 0], jnp.int32))
OFFSETS = jnp.asarray([0, 3, 7], jnp.int32)


def arrays(q, cache, k, v):
    return qk_rms_norm_rope_paged(q, cache, SCALE, SCALE, arrays.table, OFFSETS, layer=1, k=k, v=v, implementation=arrays.implementation)


arrays.table = draw(6, (6, 16))


def in_its_rows(q, cache, k, v):
    return arrays(q, cache, None, None)


def placed(mesh, heads, pages, keys, others=P()):
    cut = NamedSharding(mesh, others)
    cache = PagedKVCache(*(jax.device_put(np.array(a), s) for a, s in zip(jax.tree.leaves(CACHE), (NamedSharding(mesh, pages), cut, cut))))
    return (jax.device_put(Q, NamedSharding(mesh, heads)), cache, *(jax.device_put(a, NamedSharding(mesh, keys)) for a in (K, V)))


def fresh(f):
    """f, which jit has not traced with another implementation."""
    return lambda *args: f(*args)


def compiled(f, args):
    executable = jax.jit(fresh(f), donate_argnums=1).lower(*args).compile()
    text = executable.as_text()
    found = {name: text.count(f" {name}(") + text.count(f" {name}-start(")
             for name in ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")}
    return executable, text.count('custom_call_target="jax_fusednorm'), sum(found.values()), text


def want_of(f, *args):
    arrays.implementation = "jnp"
    return jax.tree.map(np.asarray, jax.jit(fresh(f))(*args))


@AXES
@pytest.mark.parametrize("f", (arrays, in_its_rows))
def test_heads_may_be_cut(jnp_or_one_kernel, f, axis_type):
    """All, the queries' alone where there are few keys, or the keys' alone; over one mesh axis or two."""
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(axis_type,) * 2)
    want = want_of(f, Q, CACHE, K, V)
    arrays.implementation = jnp_or_one_kernel
    for q, kv in (("h", "h"), ("h", None), (("b", "h"), "b"))[:1 if jnp_or_one_kernel == "jnp" else None]:
        pages, keys = P(*[None] * 4, kv), P(None, kv)
        args = placed(mesh, P(None, q), pages, keys)
        with jax.set_mesh(mesh):
            executable, kernels, collectives, text = compiled(f, args)
            assert (kernels, collectives) == (int(jnp_or_one_kernel != "jnp"), 0), (q, kv)
            assert not copies_of(args[1].pages.addressable_data(0), text)
            got = executable(*args)
        assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, P(None, q)), 3)
        assert got[1].pages.sharding.is_equivalent_to(NamedSharding(mesh, pages), 6)
        assert_trees_close(jax.tree.map(np.asarray, got), want, rtol=1e-5, atol=1e-5)


@AXES
def test_any_other_cut_is_right(one_kernel, axis_type):
    """Tokens, channels, pages, tables: at the cost of what gathers them."""
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(axis_type,) * 2)
    want = want_of(arrays, Q, CACHE, K, V)
    arrays.implementation = one_kernel
    for cuts in ((P("b", "h"), P("b", None, "h"), P("b"), P("b")), (P(None, None, "h"), P(*[None] * 5, "h"), P(None, None, "h"))):
        args = placed(mesh, *cuts)
        with jax.set_mesh(mesh):
            got = run(jax.jit(fresh(arrays)), args)
        assert_trees_close(got, want, rtol=1e-5, atol=1e-5)


@AXES
def test_a_packed_projection_is_sliced_for_the_devices(one_kernel, axis_type):
    """Its columns of a device's heads are no part of it; on an Auto mesh the kernel stays."""
    def f(packed, cache):
        return qk_rms_norm_rope_paged(packed, cache, SCALE, SCALE, arrays.table, OFFSETS, layer=1, num_heads=8, k_start=128, v_start=192,
                                      implementation=arrays.implementation)

    mesh = jax.make_mesh((4,), ("h",), axis_types=(axis_type,))
    want = want_of(f, PACKED, CACHE)
    arrays.implementation = one_kernel
    _, cache, _, _ = placed(mesh, P(), P(*[None] * 4, "h"), P())
    with jax.set_mesh(mesh):
        args = jax.device_put(PACKED, NamedSharding(mesh, P(None, "h"))), cache
        executable, kernels, _, text = compiled(f, args)
        assert kernels == int(axis_type == AxisType.Auto) and not copies_of(cache.pages.addressable_data(0), text)
        assert_trees_close(run(executable, args), want, rtol=1e-5, atol=1e-5)
        assert explain(f, *args)["cpu"].runs == (one_kernel if axis_type == AxisType.Auto else "jnp")  # of the call on slices


def test_shard_map_over_the_heads_of_queries_alone(one_kernel):
    """Every device writes the whole cache, and shard_map sees that they all write the same."""
    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(fresh(arrays), mesh=mesh, in_specs=(P(None, "h"), P(), P(), P()), out_specs=(P(None, "h"), P()))
    want = want_of(arrays, Q, CACHE, K, V)
    arrays.implementation = one_kernel
    args = placed(mesh, P(None, "h"), P(), P())
    executable, kernels, collectives, text = compiled(f, args)
    assert (kernels, collectives) == (1, 0) and not copies_of(CACHE.pages, text)
    assert_trees_close(run(executable, args), want, rtol=1e-5, atol=1e-5)


def test_shard_map_over_heads(one_kernel):
    """Tensor parallel: a device has its own heads, of the projection too, and a part of every page."""
    def local(packed, cache):
        return qk_rms_norm_rope_paged(packed, cache, SCALE, SCALE, arrays.table, OFFSETS, layer=jnp.int32(1), num_heads=2, k_start=32, v_start=48,
                                      implementation=arrays.implementation)

    mesh = jax.make_mesh((4,), ("h",))
    specs = PagedKVCache(P(*[None] * 4, "h"), P(), P())
    f = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "h"), specs), out_specs=(P(None, "h"), specs))
    parts = [a.reshape(8, 4, -1) for a in (Q, K, V)]
    packed = jnp.concatenate(parts, axis=2).reshape(8, -1)
    want = want_of(arrays, Q, CACHE, K, V)
    arrays.implementation = one_kernel
    _, cache, _, _ = placed(mesh, P(), specs.pages, P())
    args = (jax.device_put(packed, NamedSharding(mesh, P(None, "h"))), cache)
    executable, kernels, collectives, text = compiled(f, args)
    assert (kernels, collectives) == (1, 0) and not copies_of(cache.pages.addressable_data(0), text)
    assert_trees_close(run(executable, args), want, rtol=1e-5, atol=1e-5)
