"""matmul_partial_rms_norm against the float64 oracle: shapes, layouts and casts, few rows and many, derivatives and transformations."""

import functools
import itertools
import re
import sys
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_fusednorm
import oracle
import plain
from cases import DTYPES, SCALE_DTYPES
from jax_fusednorm import explain, matmul_partial_rms_norm
from ops import assert_trees_close, kernel_calls, kernels_expected, loss
from plain import OPTIONS, draw, draw_scale

module = sys.modules["jax_fusednorm.ops.matmul_partial_rms_norm"]
LAYOUTS = (True, False)
# (outputs, width, normed outputs): a model's, then what no pack, simdgroup or team divides, and every output normed.
SHAPES = ((2112, 7168, 1536), (4096, 512, 2056), (512, 1024, 256), (17, 33, 5), (3000, 64, 2999), (576, 80, 576), (1, 1, 1), (520, 24, 257))
LARGE, SMALL = SHAPES[:2], SHAPES[2:]
ROWS = (0, 1, 2, 12)
# SPEC's other form of 2 ulp: a product's elements may cancel, which leaves an error of the summands' size.
TOLERANCE = {"float32": {}, "float16": {}, "bfloat16": dict(rtol=1.6e-2, atol=1e-3)}


def operands(shape, rows, dtype, transpose_b=True, scale_dtype="float32", seed=0):
    outputs, width, normed = shape
    leading = rows if isinstance(rows, tuple) else (rows,)
    weight = np.asarray(draw(seed + 1, (outputs, width))) / np.sqrt(width)
    weight = jnp.asarray((weight if transpose_b else weight.T).astype(jnp.dtype(dtype)))
    return draw(seed, (*leading, width), dtype, spread=1.0), weight, draw_scale(seed + 2, normed, scale_dtype)


def run(implementation, calls, **options):
    """One compilation for many shapes."""
    op = functools.partial(matmul_partial_rms_norm, implementation=implementation, **options)
    return jax.jit(lambda calls: [op(*call) for call in calls])(calls)


def check(implementation, calls, **options):
    for call, got in zip(calls, run(implementation, calls, **options)):
        want = oracle.matmul_partial_rms_norm(*call, **options)
        for name, g, w in zip(("normed", "unnormed"), got, want):
            oracle.assert_close(g, w, call[0].dtype, **TOLERANCE[call[0].dtype.name], what=f"{name}, {[a.shape for a in call]} {options}")


@pytest.mark.parametrize("transpose_b", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_and_number_of_rows(implementation, dtype, transpose_b):
    shapes = SMALL[1:] if implementation == "metal" and cases.STAND_IN else SMALL
    rows = (0, 1, 12) if implementation == "metal" and cases.STAND_IN else ROWS
    calls = [*itertools.product(shapes, rows), ((17, 33, 5), 300)]
    check(implementation, [operands(shape, n, dtype, transpose_b) for shape, n in calls], transpose_b=transpose_b)


@pytest.mark.parametrize("dtype, transpose_b", tuple(zip(DTYPES, (True, True, False))))
def test_large_shapes(implementation, dtype, transpose_b):
    if implementation == "metal" and cases.STAND_IN:
        pytest.skip("lane by lane this takes minutes")
    check(implementation, [operands(shape, 2, dtype, transpose_b) for shape in LARGE] + [operands(LARGE[1], 300, dtype, transpose_b)],
          transpose_b=transpose_b)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES[:3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option_and_scale(implementation, dtype, scale_dtype):
    for options, transpose_b in zip(OPTIONS, LAYOUTS * 2):
        calls = [operands((40, 24, 17), rows, dtype, transpose_b, scale_dtype) for rows in (3, 40)]
        check(implementation, calls, transpose_b=transpose_b, **options)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_cast_is_where_it_should_be(implementation, dtype):
    """Positive summands do not cancel, so that the product's error is far below the rounding that follows it."""
    x, weight = (jnp.abs(draw(i, (rows, 32), "float32")).astype(dtype) for i, rows in ((3, 40), (4, 400)))
    scale = draw_scale(5, 300, dtype)
    for rows, options in itertools.product((8, 40), OPTIONS):
        [got] = run(implementation, [(x[:rows], weight, scale)], **options)
        want = oracle.matmul_partial_rms_norm(x[:rows], weight, scale, **options)
        exact = oracle.wide(x[:rows]) @ oracle.wide(weight).T[:, :300]
        unrounded = oracle.rms_norm(exact.astype(np.float32), scale, **options)
        assert (oracle.rounded(unrounded, dtype) != want[0]).mean() > 0.01  # this sample can tell where the product is rounded
        oracle.assert_same_casts(got[0], want[0], dtype, roundings=3)
        oracle.assert_same_casts(got[1], want[1], dtype)


@pytest.mark.parametrize("leading", cases.LEADING)
def test_leading_dimensions(implementation, leading):
    call = operands((40, 24, 17), leading, "float32")
    check(implementation, [call])
    assert [a.shape for a in run(implementation, [call])[0]] == [(*leading, 17), (*leading, 23)]


def test_every_output_normed_leaves_an_empty_second_result(implementation):
    for rows in (2, 40):
        [(normed, unnormed)] = run(implementation, [operands((40, 24, 40), rows, "bfloat16")])
        assert normed.shape == (rows, 40) and unnormed.shape == (rows, 0) and unnormed.dtype == jnp.bfloat16


def test_zeros_tiny_rows_and_what_is_not_a_number(implementation):
    for dtype, rows in itertools.product(DTYPES, (7, 40)):
        x, weight, scale = operands((40, 24, 17), rows, dtype)
        x = x.at[0].set(0).at[1].set(jnp.asarray(1e-20, dtype)).at[3, 5].set(jnp.nan).at[5, 0].set(jnp.inf)
        check(implementation, [(x, weight, scale)])
        [(normed, unnormed)] = run(implementation, [(x, weight, scale)])
        assert (np.asarray(normed[0]) == 0).all() and np.isnan(np.asarray(normed[3], np.float32)).all()
        assert np.isfinite(np.asarray(unnormed[4], np.float32)).all()


# ---- few rows and many

@pytest.mark.parametrize("transpose_b", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(kernel, dtype, transpose_b, monkeypatch):
    monkeypatch.setitem(module.FEW_ROWS, "cuda", module.FEW_ROWS["metal"])  # the kernel is right there, too, if not fast
    few = module.FEW_ROWS[kernel][transpose_b][dtype == "float32"]
    x, *rest = operands((50, 40, 33), few, dtype, transpose_b)
    [whole] = run(kernel, [(x, *rest)], transpose_b=transpose_b)
    for rows in {1, few // 2}:
        for start in (0, few - rows):
            [part] = run(kernel, [(x[start:start + rows], *rest)], transpose_b=transpose_b)
            for all_rows, some in zip(whole, part):
                oracle.assert_same_bits(some, all_rows[start:start + rows])


@pytest.mark.parametrize("transpose_b", LAYOUTS)
def test_many_rows_are_xlas_product_and_one_kernel(kernel, transpose_b, monkeypatch):
    monkeypatch.setitem(module.FEW_ROWS, "cuda", module.FEW_ROWS["metal"])
    for dtype in DTYPES:
        few = module.FEW_ROWS[kernel][transpose_b][dtype == "float32"]
        for rows, handler, products in ((few, "matmul_partial_rms_norm", 0), (few + 1, "partial_rms_norm", 1)):
            f = functools.partial(matmul_partial_rms_norm, transpose_b=transpose_b, implementation=kernel)
            text = jax.jit(f).lower(*operands((48, 24, 16), rows, dtype, transpose_b)).as_text()
            calls = re.findall(r"custom_call @jax_fusednorm_[a-z]+?_(\w+)_v\d+\(", text)
            assert (calls, text.count("dot_general"), text.count("transpose "), text.count("slice")) == ([handler], products, 0, 0)


def test_where_xlas_product_is_always_faster_one_row_is_all_its_own(kernel, monkeypatch):
    monkeypatch.setitem(module.FEW_ROWS, kernel, ((0, 0), (0, 0)))
    for rows, calls in ((1, 0), (2, 1)):
        text = jax.jit(functools.partial(matmul_partial_rms_norm, implementation=kernel)).lower(*operands((48, 24, 16), rows, "bfloat16")).as_text()
        assert (text.count("custom_call @jax_fusednorm"), text.count("dot_general")) == (calls, 1)


@pytest.mark.parametrize("transpose_b", LAYOUTS)
def test_the_reference_copies_no_weight(transpose_b):
    f = functools.partial(matmul_partial_rms_norm, transpose_b=transpose_b, implementation="jnp")
    text = jax.jit(f).lower(*operands((48, 24, 16), 5, "bfloat16", transpose_b)).as_text()
    assert text.count("dot_general") == 1 and "stablehlo.transpose" not in text


def test_replays_and_concurrent_calls_leave_nothing_behind(kernel):
    runs = cases.repeated(kernel, 0, 60)[1]
    sets = [operands((300, 64, 200), 3, "bfloat16", seed=10 * i) for i in range(4)]
    f = jax.jit(functools.partial(matmul_partial_rms_norm, implementation=kernel))
    want = [jax.tree.map(np.asarray, f(*s)) for s in sets]
    wrong = []

    def again(i):
        for _ in range(runs):
            for got, w in zip(f(*sets[i]), want[i]):
                if (oracle.bits(got) != oracle.bits(w)).any():
                    wrong.append(i)

    threads = [threading.Thread(target=again, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- derivatives

@pytest.mark.parametrize("rows", (5, 40))
@pytest.mark.parametrize("dtype", DTYPES)
def test_cotangents(implementation, dtype, rows):
    for options, transpose_b in zip(OPTIONS, LAYOUTS * 2):
        x, weight, scale = operands((50, 36, 33), rows, dtype, transpose_b)
        x = draw(7, x.shape, dtype)
        cotangents = draw(8, (rows, 33), dtype), draw(9, (rows, 17), dtype)
        op = functools.partial(matmul_partial_rms_norm, transpose_b=transpose_b, implementation=implementation, **options)
        got = jax.jit(lambda c, *a: jax.vjp(op, *a)[1](c))(cotangents, x, weight, scale)
        *wants, want_scale = oracle.matmul_partial_rms_norm_vjp(x, weight, scale, *cotangents, transpose_b=transpose_b, **options)
        for name, g, (want, size) in zip(("x", "weight"), got, wants):
            # the product's cotangent is rounded before it is multiplied
            oracle.assert_derivative_close(g, want, size, dtype, rounded_factors=2, what=f"cotangent of {name} {options}")
        oracle.assert_scale_cotangent_close(got[2], want_scale, "float32")


def both(implementation, transpose_b):
    return (functools.partial(matmul_partial_rms_norm, transpose_b=transpose_b, scale_offset=1.0, implementation=implementation),
            functools.partial(plain.matmul_partial_rms_norm, transpose_b=transpose_b, scale_offset=1.0))


@pytest.mark.parametrize("transpose_b", LAYOUTS)
def test_every_mode_of_every_subset_of_operands(implementation, transpose_b):
    args = operands((14, 9, 8), (2, 3), "float32", transpose_b)
    tangents = tuple(draw(20 + i, a.shape) for i, a in enumerate(args))
    subsets = [s for n in (1, 2, 3) for s in itertools.combinations(range(3), n)]

    def evaluate(f):
        def call(args, tangents):
            found = []
            for moving in subsets:
                def g(*values):
                    return f(*(values[moving.index(i)] if i in moving else a for i, a in enumerate(args)))
                at, along = [args[i] for i in moving], [tangents[i] for i in moving]
                found += [jax.jvp(g, at, along)[1], jax.grad(loss(g), range(len(at)))(*at)]
            total = loss(f)
            found.append(jax.jvp(jax.grad(total, (0, 1, 2)), args, tangents))  # forward over reverse
            found.append(jax.grad(lambda *a: loss(lambda *b: jax.grad(total, (0, 1, 2))(*b))(*a), (0, 1, 2))(*args))
            return found
        return jax.jit(call)(args, tangents)

    got, want = map(evaluate, both(implementation, transpose_b))
    assert_trees_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", (4, 40))
def test_the_backward_pass_keeps_the_product_and_does_not_compute_it_again(implementation, rows):
    args = operands((48, 24, 16), rows, "bfloat16")
    f = functools.partial(matmul_partial_rms_norm, implementation=implementation)
    _, backward = jax.vjp(f, *args)
    kept = sorted(a.shape for a in jax.tree.leaves(backward))
    assert kept == sorted(((rows, 24), (48, 24), (16,), (rows, 48)))
    text = jax.jit(lambda cotangents, *a: jax.vjp(f, *a)[1](cotangents)).lower(f(*args), *args).as_text()
    in_kernel = implementation != "jnp" and rows <= module.FEW_ROWS[implementation][True][False]
    assert text.count("dot_general") == (2 if in_kernel else 3)


# ---- transformations

def test_vmap_of_rows_keeps_the_kernel_and_of_weights_does_not(implementation):
    f, formula = both(implementation, True)
    x, weight, scale = operands((14, 9, 8), (3, 2), "float32")
    for axes, args, calls in (((0, None, None), (x, weight, scale), kernels_expected(implementation)),
                              ((1, None, None), (x, weight, scale), kernels_expected(implementation)),
                              ((0, 0, None), (x, jnp.stack([weight, -weight, 2 * weight]), scale), 0),
                              ((None, None, 0), (x, weight, jnp.stack([scale, -scale])), 0)):
        assert kernel_calls(jax.vmap(f, axes), *args) == calls, axes
        assert_trees_close(jax.jit(jax.vmap(f, axes))(*args), jax.vmap(formula, axes)(*args))


def test_scan_remat_and_eager_calls(implementation):
    f, formula = both(implementation, False)
    x, weight, scale = operands((12, 12, 8), 4, "float32", False)

    def total(f, x, weight, scale):
        layer = jax.checkpoint(lambda x, _: (x + jnp.concatenate(f(x, weight, scale), -1), None))
        return jnp.sin(jax.lax.scan(layer, x, None, length=3)[0]).sum()

    got, want = (jax.jit(jax.value_and_grad(functools.partial(total, g), (0, 1, 2)))(x, weight, scale) for g in (f, formula))
    assert_trees_close(got, want, rtol=1e-4, atol=1e-4)
    for eager, jitted in zip(f(x, weight, scale), jax.jit(f)(x, weight, scale)):
        oracle.assert_same_bits(eager, jitted)


def test_export(implementation):
    batch, = jax.export.symbolic_shape("batch")
    _, weight, scale = operands((14, 9, 8), 1, "float32")
    f = functools.partial(matmul_partial_rms_norm, implementation=implementation)
    exported = jax.export.export(jax.jit(f), disabled_checks=jax_fusednorm.EXPORT_CHECKS)(
        jax.ShapeDtypeStruct((batch, 9), jnp.float32), weight, scale)
    for rows in (1, 30):
        args = operands((14, 9, 8), rows, "float32")
        assert_trees_close(exported.call(*args), plain.matmul_partial_rms_norm(*args))
    platforms = jax.export.export(jax.jit(functools.partial(f, implementation="auto")), platforms=("cpu", "cuda", "tpu"))(*args)
    assert "custom_call @jax_fusednorm" not in platforms.mlir_module()


def test_explain_says_what_runs(host_kernel):
    args = operands((14, 9, 8), 3, "bfloat16")
    found = explain(matmul_partial_rms_norm, *args)
    assert (found["cpu"].runs, found["tpu"].runs) == (host_kernel, "jnp")


def test_float64_runs_the_reference():
    with jax.enable_x64(True):
        x, weight, scale = (jnp.asarray(np.asarray(a), jnp.float64) for a in operands((17, 33, 5), 4, "float32"))
        want = oracle.matmul_partial_rms_norm(x, weight, scale)
        for got, w in zip(matmul_partial_rms_norm(x, weight, scale, implementation="auto"), want):
            oracle.assert_close(got, w, "float64")


# ---- what cannot be

@pytest.mark.parametrize("change, says", (
    (dict(x=jnp.ones((2, 8))), ("`weight`", "[14, 9]", "[N, 8]", "transpose_b=True", "transpose_b=False")),
    (dict(transpose_b=False), ("`weight`", "[14, 9]", "[9, N]", "transpose_b=False")),
    (dict(transpose_b=1), ("`transpose_b`", "True or False")),
    (dict(weight=jnp.ones((14, 9), jnp.bfloat16)), ("`weight`", "bfloat16", "float32", "`x`")),
    (dict(weight=jnp.ones((14, 9), jnp.int32)), ("`weight`", "int32")),
    (dict(weight=jnp.ones((2, 14, 9))), ("`weight`", "[2, 14, 9]")),
    (dict(weight=jnp.ones((0, 9))), ("`weight`", "[0, 9]")),
    (dict(scale=jnp.ones(15)), ("`scale`", "[15]", "1 to 14")),
    (dict(scale=jnp.ones(0)), ("`scale`", "[0]", "1 to 14")),
    (dict(scale=jnp.ones((2, 4))), ("`scale`", "[2, 4]")),
    (dict(scale=jnp.ones(8, jnp.int32)), ("`scale`", "int32")),
    (dict(scale=None), ("`scale`", "NoneType")),
    (dict(x=jnp.ones(())), ("`x`", "scalar")),
    (dict(epsilon=-1.0), ("`epsilon`", "-1.0")),
    (dict(scale_offset=float("nan")), ("`scale_offset`", "nan"))))
def test_what_is_wrong_is_named(change, says):
    call = dict(x=jnp.ones((2, 9)), weight=jnp.ones((14, 9)), scale=jnp.ones(8)) | change
    with pytest.raises(ValueError) as caught:
        matmul_partial_rms_norm(**call)
    for word in ("matmul_partial_rms_norm", *says):
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
