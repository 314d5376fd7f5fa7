"""The gradients of head_rms_norm_rope and qk_rms_norm_rope: against the float64 oracle, one kernel each, and a head's bits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import oracle
from cases import DTYPES, some
from head_calls import PLACES, arguments
from jax_fusednorm import head_rms_norm_rope, qk_rms_norm_rope, rope_table
from ops import assert_trees_close, kernel_calls, loss
from plain import draw, draw_scale

# One for each shape of heads, each with every way that the pairs of a part of it can lie.
WIDTHS = (16, 30, 64, 96, 128, 160, 256, 288, 512, 576)


def gradients(implementation, calls):
    """((x~, scale~), or (x~,) without a scale) of every call ((x, scale, positions, cotangent), options), compiled together."""
    options = [o for _, o in calls]

    @jax.jit
    def all_of(args):
        return [jax.vjp(lambda *a: head_rms_norm_rope(a[0], a[1] if a[1:] else None, positions, implementation=implementation, **o),
                        *(a for a in (x, scale) if a is not None))[1](bar) for (x, scale, positions, bar), o in zip(args, options)]

    return all_of([a for a, _ in calls])


def check(implementation, calls):
    for ((x, scale, positions, bar), options), (of_x, *of_scale) in zip(calls, gradients(implementation, calls)):
        want, size, want_scale = oracle.head_rms_norm_rope_vjp(x, scale, positions, bar, **options)
        factors = 0 if options.get("multiply_before_cast", True) else 2  # the reference multiplies with the rounded ones
        what = f"{x.shape} {options}"
        oracle.assert_derivative_close(of_x, want, size, x.dtype, rounded_factors=factors, what=what)
        for found in of_scale:
            oracle.assert_scale_cotangent_close(found, want_scale, scale.dtype, what=what)


def with_bar(args):
    return *args, draw(9, args[0].shape, args[0].dtype)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_and_rope_dim(implementation, dtype, place):
    style, placement = place
    cases = [(width, rope_dim) for width in WIDTHS for rope_dim in sorted({width, width // 4 * 2, width // 8 * 2, 0})]
    part = 3 * PLACES.index(place) + DTYPES.index(dtype)
    cases = some(implementation, cases[part % 2::2], part // 2, 4)
    check(implementation, [(with_bar(arguments(width, dtype)), dict(style=style, placement=placement, rope_dim=rope_dim))
                           for width, rope_dim in cases])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_and_order_of_casts(implementation, dtype):
    casts = (dict(), dict(round_before_rope=True), dict(multiply_before_cast=False))
    calls = [(with_bar(arguments(width, dtype, tokens=9, scale_dtype=scale_dtype)),
              dict(scale_offset=float(i % 2) if scale_dtype else 0.0, style=style, epsilon=0.1, **order))
             for i, (order, scale_dtype) in enumerate(itertools.product(casts, (None, *DTYPES)))
             for width, style in ((64, "neox"), (24, "interleaved"))]
    check(implementation, some(implementation, calls, 0, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_outside_a_table_have_no_gradient(implementation, dtype):
    x, scale, _ = arguments(64, dtype, tokens=6)
    positions = jnp.asarray([3, -1, 9, 10, 0, 2**31 - 1])
    x = x.at[1].set(jnp.nan)
    bar = draw(9, x.shape, dtype).at[3].set(jnp.inf)
    for style in ("neox", "interleaved"):
        [(of_x, of_scale)] = gradients(implementation, [((x, scale, positions, bar), dict(freqs_cis=rope_table(10, 32), style=style))])
        kept = np.array([0, 2, 4])
        want, size, want_scale = oracle.head_rms_norm_rope_vjp(x[kept], scale, positions[kept], bar[kept], freqs_cis=rope_table(10, 32), style=style)
        oracle.assert_derivative_close(of_x[kept], want, size, dtype)
        if implementation != "jnp":  # of which XLA makes 0 * nan
            assert not np.asarray(of_x[np.array([1, 3, 5])], np.float32).any()
            oracle.assert_scale_cotangent_close(of_scale, want_scale, np.float32)


@pytest.mark.parametrize("heads", (1, 3, 5, 33))
def test_any_number_of_tokens_and_heads(implementation, heads):
    """More than there are teams, and fewer than one takes at once; the scale's gradient is a sum over all of them."""
    for tokens in (1, 0, 7) if heads > 1 else (150,):
        check(implementation, [(with_bar((draw(5, (2, tokens, heads, 16), "bfloat16"), draw_scale(6, 16, "float32"), jnp.arange(tokens))), {})])


def test_queries_and_keys_are_one_kernel_each_way(implementation):
    q, k = draw(1, (2, 5, 6, 64), "bfloat16"), draw(2, (2, 5, 2, 64), "bfloat16")
    scales, positions = (draw_scale(3, 64, "bfloat16"), draw_scale(4, 64, "bfloat16")), jnp.arange(5) * 9
    f = functools.partial(qk_rms_norm_rope, positions=positions, implementation=implementation)
    bars = draw(5, q.shape, "bfloat16"), draw(6, k.shape, "bfloat16")
    pull = lambda *args: jax.vjp(f, *args)[1](bars)
    assert kernel_calls(pull, q, k, *scales) == (0 if implementation == "jnp" else 1)  # nothing needs the results
    got = jax.jit(pull)(q, k, *scales)
    for x, scale, bar, of_x, of_scale in zip((q, k), scales, bars, got[:2], got[2:]):
        want, size, want_scale = oracle.head_rms_norm_rope_vjp(x, scale, positions, bar)
        oracle.assert_derivative_close(of_x, want, size, x.dtype)
        oracle.assert_scale_cotangent_close(of_scale, want_scale, scale.dtype)


def test_for_every_subset_of_arguments(implementation):
    args = draw(1, (3, 4, 8)), draw(2, (3, 2, 8)), draw_scale(3, 8, "float32"), draw_scale(4, 8, "float32")
    f = functools.partial(qk_rms_norm_rope, positions=jnp.arange(3), implementation=implementation)
    subsets = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]
    found = jax.jit(lambda *a: [jax.grad(loss(f), s)(*a) for s in subsets])(*args)
    whole = found[-1]
    for subset, some_of in zip(subsets, found):
        assert_trees_close(some_of, tuple(whole[i] for i in subset))
    for wanted in ((0,), (2,), (0, 1, 2, 3)):
        assert kernel_calls(jax.grad(loss(f), wanted), *args) == (0 if implementation == "jnp" else 2)


def test_what_has_no_kernel_runs_the_reference(kernel):
    x, scale, positions = arguments(8, "float32")
    f = functools.partial(head_rms_norm_rope, implementation=kernel)
    copied = lambda x: f(x, scale, positions, copies=(("bfloat16", "head_major"),))
    assert kernel_calls(jax.grad(loss(copied)), x) == 1
    assert kernel_calls(jax.grad(lambda table: jnp.sin(f(x, scale, positions, freqs_cis=table)).sum()), rope_table(99, 8)) == 1


def test_numerical_derivatives_to_second_order(jnp_or_one_kernel):
    args = draw(1, (2, 2, 6)), draw(2, (2, 1, 6)), draw_scale(3, 6, "float32"), draw_scale(4, 6, "float32")
    f = functools.partial(qk_rms_norm_rope, positions=jnp.arange(2) + 1, rope_dim=4, implementation=jnp_or_one_kernel)
    check_grads(jax.jit(f), args, order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2, eps=1e-2)


def test_under_vmap(implementation):
    """Of a batch of sequences, as one by one; positions and the scale are shared."""
    x, scale, positions = draw(1, (3, 5, 2, 16)), draw_scale(2, 16, "float32"), jnp.arange(5)
    pull = jax.grad(lambda x, s: jnp.sin(head_rms_norm_rope(x, s, positions, implementation=implementation)).sum(), (0, 1))
    got = jax.jit(jax.vmap(pull, (0, None)))(x, scale)
    assert_trees_close(got, tuple(map(jnp.stack, zip(*(pull(each, scale) for each in x)))))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_bits_of_a_head_depend_on_nothing_else(kernel, dtype):
    order = np.random.default_rng(0).permutation(35)
    for width, options in ((128, {}), (96, dict(style="interleaved")), (30, dict(rope_dim=16))):
        x, scale, positions = arguments(width, dtype, tokens=35, heads=5, scale_dtype=dtype)
        bar = draw(9, x.shape, dtype)
        run = lambda *args: gradients(kernel, [((args[0], scale, *args[1:]), options)])[0][0]
        whole = np.asarray(run(x, positions, bar))
        oracle.assert_same_bits(run(x[:3], positions[:3], bar[:3]), whole[:3])
        oracle.assert_same_bits(run(x[:, 2:4], positions, bar[:, 2:4]), whole[:, 2:4])
        oracle.assert_same_bits(run(x[order], positions[order], bar[order]), whole[order])
        noisy = run(x.at[::2].set(jnp.nan), positions, bar.at[:, 1].set(jnp.inf))
        oracle.assert_same_bits(np.asarray(noisy)[1::2, 2:], whole[1::2, 2:])


def test_the_same_bits_every_time(implementation):
    x, scale, positions = arguments(64, "bfloat16", tokens=40, heads=7)
    call = (x, scale, positions, draw(9, x.shape, "bfloat16")), {}
    first, *others = (gradients(implementation, [call])[0] for _ in range(8))
    for other in others:
        for got, want in zip(other, first):
            oracle.assert_same_bits(got, want)
