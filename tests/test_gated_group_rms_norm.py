"""gated_group_rms_norm against the float64 oracle: every group size, place of the gate, dtype and option, forward and derivative."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import oracle
from cases import DTYPES, GATE_STARTS, GATED_GROUPS, GATED_MODELS, LEADING, some
from jax_fusednorm import gated_group_rms_norm
from plain import draw, draw_scale

ORDERS, ACTIVATIONS, ROUNDINGS = (False, True), ("silu", "sigmoid"), ("storage", "float32")
OPTIONS = tuple(dict(norm_before_gate=order, activation=activation, rounding=rounding)
                for order, activation, rounding in itertools.product(ORDERS, ACTIVATIONS, ROUNDINGS))


def call(shape, group_size, dtype, gate_dtype=None, scale_dtype="float32", width=None, **options):
    """(operands, options)"""
    gate = draw(2, (*shape[:-1], width or shape[-1]), gate_dtype or dtype)
    return (draw(1, shape, dtype, spread=1.0), gate, draw_scale(3, shape[-1], scale_dtype)), dict(options, group_size=group_size)


def run(implementation, calls):
    """One compilation for many calls."""
    def evaluate(operands):
        return [gated_group_rms_norm(*o, implementation=implementation, **options) for o, (_, options) in zip(operands, calls)]
    return jax.jit(evaluate)([operands for operands, _ in calls])


def check(implementation, calls):
    for (operands, options), got in zip(calls, run(implementation, calls)):
        want, dtype, what = oracle.gated_group_rms_norm(*operands, **options), operands[0].dtype, f"shape {operands[0].shape} {options}"
        out_dtype = jnp.dtype(options.get("out_dtype") or dtype)
        if out_dtype != dtype and options["rounding"] == "storage":
            # order of summation may flip the inner rounding, which shows in a result with other digits
            oracle.assert_close(got, want, out_dtype, rtol=2 * float(jnp.finfo(dtype).eps), atol=oracle.ATOL["float16"], what=what)
            off = np.abs(oracle.wide(got) - want) > 2 * float(jnp.finfo(out_dtype).eps) * np.abs(want) + 1e-5
            assert off.mean() <= 1e-3, f"{what}: {off.mean():.2%} of the elements differ"
        else:
            oracle.assert_close(got, want, out_dtype, what=what)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_group_size_gate_and_option(implementation, dtype):
    calls = []
    for i, (size, options) in enumerate(itertools.product(GATED_GROUPS, OPTIONS)):
        if i % len(OPTIONS) not in ((3 * (i // len(OPTIONS))) % 8, (3 * (i // len(OPTIONS)) + 5) % 8):
            continue  # two of the options for each size, all of them over the sizes
        groups = 1 + i % 4
        start = (None, *GATE_STARTS)[i % 5]
        calls.append(call((2, groups * size), size, dtype, DTYPES[i % 3], (*DTYPES, dtype)[i % 4], gate_start=start,
                          width=None if start is None else start + groups * size + (0, 3, 8)[i // 5 % 3],
                          out_dtype=(None, "float32", "float16")[i // 3 % 3], **options))
    check(implementation, some(implementation, calls, DTYPES.index(dtype), 2))


@pytest.mark.parametrize("gate_dtype", ("bfloat16", "float32"))
def test_model_shapes(implementation, gate_dtype):
    check(implementation, [call((3, width), size, "bfloat16", gate_dtype, gate_dtype, width=columns, gate_start=None if columns is None else 0)
                           for width, size, columns in some(implementation, GATED_MODELS, 0, 2)])


def test_every_number_of_rows_and_leading_dimensions(implementation):
    check(implementation, [call((rows, 320), size, dtype) for rows in (0, 1, 2, 31, 33, 130) for size, dtype in ((80, "bfloat16"), (5, "float32"))]
          + [call((*leading, 24), 8, "bfloat16", width=31, gate_start=7) for leading in LEADING])


def test_where_the_gate_lies_changes_no_bit(kernel):
    for dtype, gate_dtype in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")):
        (y, gate, scale), _ = call((5, 1920), 960, dtype, gate_dtype)
        wide = [(jnp.full((5, width), jnp.nan, gate.dtype).at[:, start:start + 1920].set(gate), start)
                for start, width in ((0, 1920), (0, 8192), (8, 17504), (1, 1930), (7, 2000), (40, 1961))]
        want, *got = run(kernel, [((y, gate, scale), dict(group_size=960))]
                         + [((y, g, scale), dict(group_size=960, gate_start=start)) for g, start in wide])
        for g, (_, start) in zip(got, wide):
            oracle.assert_same_bits(g, want, what=f"{gate_dtype} gate at column {start}")


def test_bits_do_not_depend_on_the_number_of_rows(kernel):
    (y, gate, scale), options = call((65, 300), 100, "bfloat16", width=307, gate_start=7)
    whole, *parts = run(kernel, [((y[:n], gate[:n], scale), options) for n in (65, 1, 2, 33)])
    for part in parts:
        oracle.assert_same_bits(part, whole[:len(part)])


def test_a_gate_in_place_is_not_copied(kernel):
    (y, gate, scale), options = call((64, 7680), 960, "bfloat16", scale_dtype="bfloat16", width=17504, gate_start=41)
    text = jax.jit(functools.partial(gated_group_rms_norm, implementation=kernel, **options)).lower(y, gate, scale).compile().as_text()
    made = {line.split(" = ")[1].split()[1].split("(")[0] for line in text.splitlines() if " = " in line}
    assert made <= {"parameter", "bitcast", "custom-call"}, made
    assert text.count('custom_call_target="jax_fusednorm') == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_tiny_groups_and_what_is_not_a_number(implementation, dtype):
    shape, size = (7, 4 * 129), 129
    (y, gate, scale), _ = call(shape, size, dtype)
    dirty = (y.at[0, :size].set(0).at[1, size:2 * size].set(jnp.asarray(1e-20, dtype)).at[2, 0].set(jnp.nan).at[3, 200].set(jnp.inf),
             gate.at[4, 300].set(jnp.nan).at[5, 515].set(jnp.inf).at[6, 7].set(-jnp.inf), scale)
    for norm_before_gate in ORDERS:
        options = dict(group_size=size, norm_before_gate=norm_before_gate)
        check(implementation, [(dirty, options)])
        got, clean = (np.asarray(a).reshape(7, 4, size) for a in run(implementation, [(dirty, options), ((y, gate, scale), options)]))
        assert (got[0, 0] == 0).all()
        touched = np.zeros((7, 4), bool)
        touched[[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 0]] = True
        oracle.assert_same_bits(got[~touched], clean[~touched])
        assert np.isnan(got[2, 0].astype(np.float32)).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero(implementation, activation):
    gates = np.array([-80.0, -88.0, -89.0, -104.0, -1e4, -3e38, 88.0, 89.0, 1e4, 3e38, 0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    act = getattr(jax.nn, activation)
    for norm_before_gate in ORDERS:
        [got] = run(implementation, [((jnp.ones((len(gates), 1)), gates[:, None], jnp.ones(1)),
                                      dict(norm_before_gate=norm_before_gate, activation=activation, epsilon=0.25))])
        got, a = np.asarray(got)[:, 0], np.asarray(act(gates), np.float64)
        with np.errstate(all="ignore"):
            want = a / np.sqrt(1.25) if norm_before_gate else a / np.sqrt(a * a + 0.25)
        usual = np.isfinite(want) & (np.abs(a) < 1e18)  # beyond it the square is inf, and the group's scale 0
        np.testing.assert_allclose(got[usual], want[usual], rtol=1e-5, atol=1e-35)
        np.testing.assert_array_equal(np.isnan(got[~usual & np.isnan(a)]), True)
        assert np.isnan(got[gates == -np.inf]).all() == (activation == "silu")


def test_the_activation_is_accurate_everywhere(implementation):
    """y = 1 and epsilon = 0 leave the bare activation: against float64, from where it underflows to where it is one."""
    gates = np.concatenate([np.linspace(-87, 88, 125_000), np.geomspace(1e-30, 1, 1536), -np.geomspace(1e-30, 1, 1536)]).astype(np.float32)
    gates = gates[:125 * 1024].reshape(125, 1024)
    operands = (jnp.ones(gates.shape), gates, jnp.ones(1024))
    sigmoid, silu = (np.asarray(a) for a in run(implementation, [
        (operands, dict(norm_before_gate=True, epsilon=0.0, activation=activation)) for activation in ("sigmoid", "silu")]))
    want = 1.0 / (1.0 + np.exp(-oracle.wide(gates)))
    limit = 64 if implementation in ("cuda", "jnp") else 3  # in units of float32's last place; the hardware's exp is worst far from zero
    for got, wanted in ((sigmoid, want), (silu, want * oracle.wide(gates))):
        off = np.abs(got - wanted) / np.spacing(np.abs(wanted).astype(np.float32))
        assert off.max() <= limit, f"{off.max():.2f} ulp at {gates.flat[off.argmax()]}"


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_cast_is_where_it_should_be(implementation, dtype):
    operands, _ = call((128, 1920), 960, dtype)
    for order in ORDERS:
        both = [dict(group_size=960, norm_before_gate=order, rounding=rounding) for rounding in ROUNDINGS]
        wants = [oracle.gated_group_rms_norm(*operands, **options) for options in both]
        assert (wants[0] != wants[1]).mean() > 0.05  # this sample can tell the two apart
        for options, want, got in zip(both, wants, run(implementation, [(operands, options) for options in both])):
            oracle.assert_same_casts(got, want, dtype, roundings=2 if options["rounding"] == "storage" else 1, what=str(options))


def assert_agrees_with_zamba2(implementation, module):
    """At most 0.01 % of the elements differ, and by one ulp; or, where the scale may carry an ulp of the inner rounding into the next binade, two."""
    (y, gate, scale), options = call((256, 7680), 960, "bfloat16")
    for scale, most in ((jnp.ones(7680), 1), (scale, 2)):
        [got] = run(implementation, [((y, gate, scale), options)])
        off = oracle.ulps(np.asarray(got), module(np.asarray(y), np.asarray(gate), np.asarray(scale)), "bfloat16")
        assert off.max() <= most and (off > 0).mean() <= 1e-4, f"{(off > 0).mean():.3%} of the elements differ, by up to {int(off.max())} ulp"


def test_bfloat16_as_the_formula_of_zamba2_gives_it(implementation):
    """Its roundings in numpy: everything float32, the norm rounded, the float32 scale, the result rounded."""
    def module(y, gate, scale):
        g = gate.astype(np.float32)
        v = (y.astype(np.float32) * (g / (np.float32(1) + np.exp(-g)))).reshape(256, 8, 960)
        v = v * (np.float32(1) / np.sqrt(np.mean(v * v, axis=-1, keepdims=True, dtype=np.float32) + np.float32(1e-5)))
        return scale * v.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(256, 7680)

    assert_agrees_with_zamba2(implementation, module)


def test_bfloat16_as_transformers_gives_it(implementation):
    torch = pytest.importorskip("torch")
    zamba2 = pytest.importorskip("transformers.models.zamba2.modeling_zamba2", reason="needs transformers")
    theirs = zamba2.Zamba2RMSNormGated(7680, 960, eps=1e-5)

    def module(y, gate, scale):
        with torch.no_grad():
            theirs.weight.copy_(torch.tensor(scale))
            return theirs(*(torch.tensor(a.astype(np.float32)).bfloat16() for a in (y, gate))).float().numpy()

    assert_agrees_with_zamba2(implementation, module)


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives(implementation, dtype):
    calls = []
    for i, (order, activation) in enumerate(itertools.product(ORDERS, ACTIVATIONS)):
        for j, (shape, size) in enumerate((((33, 12), 3), ((5, 1920), 960), ((3, 2, 300), 100), ((0, 24), 8), ((70, 520), 520))):
            start = (None, *GATE_STARTS)[(i + j) % 5]
            # the norm as stored is a factor of the other derivatives: they are then as exact as y's dtype
            rounding, gate_dtype, out_dtype = (("storage", dtype, None), ("float32", "float32", "float32"), ("float32", "float16", None))[(i + j) % 3]
            calls.append(call(shape, size, dtype, gate_dtype, (dtype, "float32")[j % 2],
                              width=None if start is None else start + shape[-1] + 5, gate_start=start,
                              norm_before_gate=order, activation=activation, rounding=rounding, out_dtype=out_dtype))
    calls = calls[DTYPES.index(dtype) % 2::2]
    tangents = [tuple(draw(10 + k, a.shape, a.dtype) for k, a in enumerate(operands)) for operands, _ in calls]
    cotangents = [draw(20, operands[0].shape, options["out_dtype"] or dtype) for operands, options in calls]

    @jax.jit
    def evaluate(operands, tangents, cotangents):
        results = []
        for o, t, c, (_, options) in zip(operands, tangents, cotangents, calls):
            f = functools.partial(gated_group_rms_norm, implementation=implementation, **options)
            results.append((jax.jvp(f, o, t)[1], jax.vjp(f, *o)[1](c)))
        return results

    results = evaluate([operands for operands, _ in calls], tangents, cotangents)
    for (operands, options), t, c, (tangent, (dy, dgate, dscale)) in zip(calls, tangents, cotangents, results):
        y, gate, scale = operands
        asked = {k: v for k, v in options.items() if k not in ("rounding", "out_dtype")}
        inexact = dict(rounded_factors=options["rounding"] == "storage")
        want, size = oracle.gated_group_rms_norm_jvp(*operands, *t, **asked)
        oracle.assert_derivative_close(tangent, want, size, c.dtype, what=f"tangent {options}", **inexact)
        (want, size), (want_gate, gate_size), want_scale = oracle.gated_group_rms_norm_vjp(*operands, c, **asked)
        oracle.assert_derivative_close(dy, want, size, dtype, what=f"cotangent of y {options}")
        oracle.assert_derivative_close(dgate, want_gate, gate_size, gate.dtype, what=f"cotangent of gate {options}", **inexact)
        if y.size:
            oracle.assert_scale_cotangent_close(dscale, want_scale, scale.dtype, what=f"cotangent of scale {options}")
        if options["gate_start"]:
            assert (np.asarray(dgate)[..., :options["gate_start"]] == 0).all()


def test_the_backward_pass_is_one_kernel(kernel):
    (y, gate, scale), options = call((8, 64), 16, "bfloat16")
    f = functools.partial(gated_group_rms_norm, implementation=kernel, **options)
    text = jax.jit(lambda *a: jax.vjp(f, *a)[1](a[0])).lower(y, gate, scale).as_text()
    assert text.count("custom_call @jax_fusednorm") == 1 and "gated_group_rms_norm_cotangent_v" in text
