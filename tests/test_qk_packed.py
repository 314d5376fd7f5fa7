"""qk_rms_norm_rope of a fused projection: what slices of it give, bit for bit, and one gradient of its whole width."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import oracle
from cases import DTYPES
from flax import nnx
from jax_fusednorm import EXPORT_CHECKS, qk_rms_norm_rope, rope_table
from jax_fusednorm.flax import linen as fused_linen, nnx as fused_nnx
from ops import assert_trees_close, kernel_calls, loss
from plain import draw, draw_scale

HEADS, GROUPS = 6, 2
POSITIONS = jnp.arange(5) * 31


def arguments(width=16, dtype="float32", columns=None, lead=(2,)):
    columns = (HEADS + 2 * GROUPS) * width if columns is None else columns
    return draw(1, (*lead, 5, columns), dtype), draw_scale(2, width, "float32"), draw_scale(3, width, "float32")


def starts(width=16, q=0, between=0, values=True):
    """One after another, with so many columns before the first and between."""
    k = q + HEADS * width + between
    return dict(num_heads=HEADS, num_kv_heads=GROUPS, q_start=q, k_start=k, v_start=k + GROUPS * width + between if values else None)


def packed(implementation, **options):
    return lambda x, *scales: qk_rms_norm_rope(x, None, *scales, POSITIONS, implementation=implementation, **options)


def sliced(implementation, num_heads, num_kv_heads, q_start, k_start, v_start, **options):
    def f(x, *scales):
        width = scales[0].shape[0]
        q, k, *v = (x[..., start:start + heads * width].reshape(*x.shape[:-1], heads, width)
                    for start, heads in ((q_start, num_heads), (k_start, num_kv_heads), (v_start, num_kv_heads)) if start is not None)
        return *qk_rms_norm_rope(q, k, *scales, POSITIONS, implementation=implementation, **options), *v
    return f


def both(f):
    """Results and gradients of all operands, for the same cotangents of the results."""
    def call(*args):
        out, pull = jax.vjp(f, *args)
        return out, pull(tuple(draw(5 + i, o.shape, o.dtype) for i, o in enumerate(out)))
    return jax.jit(call)


PLACED = {"side by side": (16, dict(), None), "apart, in more columns": (16, dict(q=8, between=16), 256), "without values": (16, dict(values=False), None),
          "of eight": (64, dict(q=64, between=8), None), "at any column": (16, dict(q=3, between=1), 191),
          "of any width": (30, dict(between=2), 310)}


@pytest.mark.parametrize("what", PLACED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_op_on_slices(implementation, dtype, what):
    width, places, columns = PLACED[what]
    places = starts(width, **places)
    if columns is None:
        columns = (places["k_start"] if places["v_start"] is None else places["v_start"]) + GROUPS * width
        columns += columns % 8
    args = arguments(width, dtype, columns)
    options = dict(style="interleaved" if what == "of any width" else "neox", rope_dim=width // 4 * 2)
    (got, gradients), (want, of_slices) = (both(f(implementation, **places, **options))(*args) for f in (packed, sliced))
    for g, w in zip(got, want, strict=True):
        oracle.assert_same_bits(g, w)
    if implementation == "jnp" or what == "at any column":  # of which the reference makes the gradient
        assert_trees_close(gradients, of_slices, rtol=1e-2, atol=1e-2)
    else:
        oracle.assert_same_bits(np.asarray(gradients[0]) + 0, np.asarray(of_slices[0]) + 0)  # zeros have a sign
        for g, w in zip(gradients[1:], of_slices[1:]):
            oracle.assert_scale_cotangent_close(g, np.asarray(w, np.float64), np.float32, tolerance=1e-4)


def test_the_columns_of_nothing_have_no_gradient(implementation):
    args = arguments(columns=200)
    places = starts(q=16, between=8)
    gradient = np.asarray(both(packed(implementation, **places))(*args)[1][0])
    used = np.zeros(200, bool)
    for start, heads in ((places["q_start"], HEADS), (places["k_start"], GROUPS), (places["v_start"], GROUPS)):
        used[start:start + heads * 16] = True
    assert (gradient[..., used] != 0).all() and not gradient[..., ~used].any()


def test_the_gradient_is_one_kernel_without_a_concatenation(implementation):
    args = arguments(64, "bfloat16")
    gradient = jax.grad(loss(packed(implementation, **starts(64))), (0, 1, 2))
    calls = kernel_calls(gradient, *args)
    assert calls == (0 if implementation == "jnp" else 2)
    if implementation != "jnp":
        text = jax.jit(gradient).lower(*args).compile().as_text()
        assert not re.search(r" (concatenate|pad)\(", text)


def test_columns_used_twice_add_up(implementation):
    """Keys that are also values, as Gemma 4's, are read by two; their gradient is a sum, which the reference makes."""
    args, places = arguments(), dict(starts(), v_start=starts()["k_start"])
    got, want = (both(f("jnp" if f is sliced else implementation, **places))(*args) for f in (packed, sliced))
    assert_trees_close(got, want, rtol=1e-4, atol=1e-4)


def test_transformations(jnp_or_one_kernel):
    args = arguments(8, columns=88)
    f, g = packed(jnp_or_one_kernel, **starts(8, between=4)), sliced("jnp", **starts(8, between=4))
    tangents = tuple(jnp.cos(a) for a in args)
    for derivative in (lambda f: lambda *a: jax.jvp(f, a, tangents)[1], lambda f: lambda *a: jax.jvp(jax.grad(loss(f), (0, 1, 2)), a, tangents)[1],
                       lambda f: jax.vmap(f, (0, None, None)), lambda f: jax.vmap(jax.grad(loss(f)), (0, None, None)),
                       lambda f: jax.grad(lambda x, *s: loss(lambda x: jax.checkpoint(f)(x, *s))(x))):
        assert_trees_close(*(jax.jit(derivative(each))(*args) for each in (f, g)), rtol=1e-4, atol=1e-4)


def test_one_scale_tells_the_width_and_a_table_may_turn(implementation):
    x, scale, _ = arguments()
    options = dict(starts(), freqs_cis=rope_table(99, 16))
    got, want = (f(implementation, **options)(x, scale, None) for f in (packed, sliced))
    for g, w in zip(got, want, strict=True):
        oracle.assert_same_bits(g, w)


def test_exports_with_any_number_of_tokens(one_kernel):
    tokens, = jax.export.symbolic_shape("t")
    structs = jax.ShapeDtypeStruct((tokens, 160), jnp.bfloat16), jax.ShapeDtypeStruct((16,), jnp.float32)

    def gradient(x, scale):
        f = functools.partial(qk_rms_norm_rope, k=None, positions=jnp.int32(7), implementation=one_kernel, **starts())
        return jax.grad(lambda x, s: sum(o.astype(jnp.float32).sum() for o in f(x, q_scale=s, k_scale=s)), (0, 1))(x, scale)

    program = jax.export.export(jax.jit(gradient), disabled_checks=EXPORT_CHECKS)(*structs)
    x, scale, _ = arguments(dtype="bfloat16", lead=())
    assert_trees_close(program.call(x, scale), jax.jit(gradient)(x, scale))


@pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_rows_may_be_cut_and_cut_columns_are_gathered(one_kernel, axis_type):
    from test_sharding import compiled, run

    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    args = draw(1, (4, 5, 160)), *arguments()[1:]
    f = sliced("jnp", **starts())
    want = jax.jit(lambda *args: (f(*args), jax.grad(loss(f), (0, 1, 2))(*args)))(*args)
    f = packed(one_kernel, **starts())
    program = lambda *args: (f(*args), jax.grad(loss(f), (0, 1, 2))(*args))
    for cut in (P("b"), P(("b", "h")), P("b", None, "h")):
        placed = [jax.device_put(a, NamedSharding(mesh, cut if a.ndim == 3 else P())) for a in args]
        with jax.set_mesh(mesh):
            executable, found = compiled(program, *placed)
            assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, want), rtol=1e-4, atol=1e-4)
        if len(cut) == 1:
            assert found["kernels"] >= 2 and found["all-gather"] == found["other"] == 0 and found["all-reduce"] <= 2, (cut, found)


@pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
def test_whole_heads_on_each_device_keep_the_kernel(one_kernel):
    """Tensor parallel inside shard_map: a device's columns are a projection of their own, with its share of all heads."""
    from test_sharding import compiled, run

    mesh, width = jax.make_mesh((2,), ("h",), devices=jax.devices()[:2]), 16
    local = dict(num_heads=HEADS // 2, num_kv_heads=GROUPS // 2, k_start=HEADS // 2 * width, v_start=(HEADS + GROUPS) // 2 * width)
    x, *scales = arguments()
    q, k, v = jnp.split(x, (HEADS * width, (HEADS + GROUPS) * width), axis=-1)
    by_device = jnp.concatenate([part[..., i * part.shape[-1] // 2:(i + 1) * part.shape[-1] // 2] for i in range(2) for part in (q, k, v)], axis=-1)
    f = jax.shard_map(packed(one_kernel, **local), mesh=mesh, in_specs=(P(None, None, "h"), P(), P()), out_specs=P(None, None, "h"))
    whole = sliced("jnp", **starts())
    program, of_whole = (lambda *args, f=f: (f(*args), jax.grad(loss(f), (1, 2))(*args)) for f in (f, whole))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((by_device, *scales), (P(None, None, "h"), P(), P()))]
    executable, found = compiled(program, *placed)
    assert found["kernels"] >= 2 and found["all-gather"] == found["other"] == 0 and found["all-reduce"] <= 2
    assert_trees_close(run(executable, placed), jax.tree.map(np.asarray, jax.jit(of_whole)(x, *scales)), rtol=1e-4, atol=1e-4)


def test_both_modules_take_it(implementation):
    x, *scales = arguments(dtype="bfloat16")
    module = fused_nnx.QKNormRope(16, rngs=nnx.Rngs(0), theta=1e6, implementation=implementation)
    layer = fused_linen.QKNormRope(head_dim=16, theta=1e6, implementation=implementation)
    module.q_norm.scale[...], module.k_norm.scale[...] = scales
    variables = {"params": {name: {"scale": scale} for name, scale in zip(("q_norm", "k_norm"), scales)}}
    want = packed(implementation, theta=1e6, **starts())(x.astype(jnp.float32), *scales)
    for got in (module(x, None, POSITIONS, **starts()), layer.apply(variables, x, None, POSITIONS, **starts())):
        for g, w in zip(got, want, strict=True):
            oracle.assert_same_bits(g, w)
    with pytest.raises(ValueError, match="QKNormRope: `head_dim` is None"):
        fused_linen.QKNormRope().init(jax.random.key(0), x, None, POSITIONS, **starts())


WRONG = {
    "no heads": ("`num_heads` is None", dict(num_heads=None)),
    "no keys": ("`k_start` is None", dict(k_start=None)),
    "a negative start": ("`q_start` is -1", dict(q_start=-1)),
    "keys beyond the end": ("`k_start` is 140, but 2 heads of 16 channels", dict(k_start=140)),
    "values beyond the end": ("`v_start` is 129", dict(v_start=129)),
    "heads that are no number": ("`num_kv_heads` is 2.0", dict(num_kv_heads=2.0)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named(what):
    says, changed = WRONG[what]
    with pytest.raises(ValueError, match=f"qk_rms_norm_rope: {says}"):
        packed("jnp", **{**starts(), **changed})(*arguments())


def test_what_goes_with_the_other_form_is_named():
    x, *scales = arguments()
    with pytest.raises(ValueError, match="`q_scale` is None, as `k_scale` is"):
        packed("jnp", **starts())(x, None, None)
    with pytest.raises(ValueError, match="`k_scale` is of shape"):
        packed("jnp", **starts())(x, scales[0], scales[1][:8])
    heads = x[..., :32].reshape(2, 5, 2, 16)
    for argument, value in (("num_heads", 6), ("k_start", 0), ("q_start", 16)):
        with pytest.raises(ValueError, match=f"`{argument}` is {value}, but it goes with a fused projection"):
            qk_rms_norm_rope(heads, heads, *scales, POSITIONS, **{argument: value})
