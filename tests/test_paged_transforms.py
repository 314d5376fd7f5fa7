"""qk_rms_norm_rope_paged under JAX's transformations: one kernel, scan, vmap and export, and derivatives, which there are none of."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jax_fusednorm import EXPORT_CHECKS, PagedKVCache, explain, qk_rms_norm_rope_paged
from ops import assert_trees_close, kernel_calls, kernels_expected
from paged_op_calls import FORMS, check_call, small, step


def test_one_kernel_for_everything(implementation):
    for form in FORMS:
        call = small(form)
        args, arrays, static = call.arguments()
        op = functools.partial(qk_rms_norm_rope_paged, layer=1, implementation=implementation, **static)
        assert kernel_calls(lambda args, arrays: op(*args, **arrays), args, arrays) == kernels_expected(implementation)
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    assert explain(op, *structs)["cuda" if implementation == "cuda" else "cpu"].runs == implementation
    assert explain(op, *structs)["tpu"].runs == ("jnp" if implementation == "jnp" else None)


def test_layers_in_a_scan_are_layers_in_a_loop(implementation):
    call = small("packed", "bfloat16")
    args, arrays, _ = call.arguments()

    def body(cache, layer):
        q, cache = step(call, implementation, (args[0], cache, *args[2:]), arrays, layer)
        return cache, q

    cache, queries = jax.jit(lambda cache: jax.lax.scan(body, cache, jnp.arange(3)))(call.cache)
    for layer in range(3):
        others = jnp.arange(3) != layer
        pages = jnp.where(others[:, None, None, None], call.cache.pages, cache.pages)
        check_call(call, dict(layer=layer), (queries[layer], dataclasses.replace(cache, pages=pages)), "scan")


@pytest.mark.parametrize("axes", ((0, PagedKVCache(0, None, 0), None), (None, None, 1)), ids=("caches", "keys"))
def test_vmap(implementation, axes):
    """The reference, for a batch of caches, and for one cache that every example starts from."""
    call = small()
    args, _, _ = call.arguments()

    def f(q, cache, k):
        return step(call, implementation, (q, cache, *args[2:]), {"k": k, "v": call.v}, 1)

    def each(pick, operands):
        flat = jax.tree.leaves(axes, is_leaf=lambda axis: axis is None)
        spread = flat if len(flat) == 5 else [axes[0], *[None] * 3, axes[2]]
        leaves, tree = jax.tree.flatten(operands)
        return jax.tree.unflatten(tree, [a if axis is None else pick(a, axis) for a, axis in zip(leaves, spread, strict=True)])

    batched = each(lambda a, axis: jnp.stack([a, a + 1], axis), (call.q, call.cache, call.k))
    got = jax.jit(jax.vmap(f, axes))(*batched)
    for i in range(2):
        want = f(*each(lambda a, axis: jnp.take(a, i, axis), batched))
        assert_trees_close(jax.tree.map(lambda a: a[i], (got[0], got[1].pages)), (want[0], want[1].pages), rtol=1e-5, atol=1e-5)


def test_there_is_no_derivative(implementation):
    call = small()
    args, arrays, _ = call.arguments()

    def total(q, pages, stop=lambda a: a):
        q, cache = step(call, implementation, (stop(q), dataclasses.replace(call.cache, pages=stop(pages)), *args[2:]), arrays, 1)
        return q.sum() + cache.pages.sum()

    for derivative in (jax.grad(total), jax.grad(total, 1), lambda *a: jax.jvp(total, a, a)):
        for f in (derivative, jax.jit(derivative)):
            with pytest.raises(NotImplementedError, match="qk_rms_norm_rope_paged.*qk_rms_norm_rope,"):
                f(args[0], call.cache.pages)
    stopped = functools.partial(total, stop=jax.lax.stop_gradient)
    got = jax.jit(jax.grad(lambda q: stopped(q, call.cache.pages) * (q ** 2).sum()))(args[0])
    assert_trees_close(got, 2 * args[0] * total(args[0], call.cache.pages), rtol=1e-4, atol=1e-4)


def test_exports_with_any_number_of_tokens(implementation):
    tokens, = jax.export.symbolic_shape("t")
    call = small("packed", "bfloat16")
    args, arrays, static = call.arguments()
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    structs = (jax.ShapeDtypeStruct((tokens, args[0].shape[1]), jnp.bfloat16), *structs[1:])
    layer = jax.ShapeDtypeStruct((), jnp.int32)

    def program(value, **options):
        f = jax.jit(lambda args, layer: qk_rms_norm_rope_paged(*args, **static, layer=layer, implementation=value))
        return jax.export.deserialize(jax.export.export(f, **options)(structs, layer).serialize())

    want = step(call, "jnp", args, arrays, 1)
    everywhere = program("auto", platforms=("cpu", "cuda", "tpu"))
    here = program(implementation, disabled_checks=EXPORT_CHECKS)
    for exported in (everywhere, here):
        got = exported.call(args, jnp.int32(1))
        assert isinstance(got[1], PagedKVCache)
        assert_trees_close(got, want, rtol=2e-2, atol=2e-2)
    assert ("custom_call @jax_fusednorm" in here.mlir_module()) == (implementation != "jnp")
