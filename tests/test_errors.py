"""Every argument that cannot be: which error, and that it names the op, the argument, what came and what was wanted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fusednorm
from jax_fusednorm import add_rms_norm, explain, rms_norm, rms_norm_add

X, SCALE = jnp.ones((2, 3, 8)), jnp.ones(8)

OPS = pytest.mark.parametrize("op, rows", ((rms_norm, 1), (add_rms_norm, 2), (rms_norm_add, 2)),
                              ids=("rms_norm", "add_rms_norm", "rms_norm_add"))


def fails(op, *args, says, error=ValueError, **options):
    """The call raises `error`, eagerly and under jit, and the message holds the op's name and everything in `says`."""
    for call in (functools.partial(op, **options), jax.jit(functools.partial(op, **options))):
        with pytest.raises(error) as caught:
            call(*args)
        message = str(caught.value)
        for word in (op.__name__, *says):
            assert word in message, f"{word!r} is not in {message!r}"
    return message


@OPS
def test_rank_zero(op, rows):
    fails(op, *[jnp.float32(1.0)] * rows, says=("`x`", "scalar"))


@OPS
def test_a_reduced_width_of_zero(op, rows):
    for shape in ((0,), (3, 0), (0, 0)):
        fails(op, *[jnp.ones(shape)] * rows, says=("`x`", str(list(shape))))


@OPS
@pytest.mark.parametrize("dtype", ("int32", "uint8", "bool", "complex64", "float8_e4m3fn"))
def test_dtypes_of_x(op, rows, dtype):
    fails(op, *[X.astype(dtype)] * rows, says=("`x`", dtype, "float32", "bfloat16", "float16"))


@OPS
@pytest.mark.parametrize("dtype", ("int32", "bool", "complex64", "float8_e5m2"))
def test_dtypes_of_scale(op, rows, dtype):
    fails(op, *[X] * rows, SCALE.astype(dtype), says=("`scale`", dtype, "float32", "bfloat16", "float16"))


@OPS
@pytest.mark.parametrize("shape", ((), (7,), (9,), (1,), (1, 8), (3, 8), (0,)))
def test_shapes_of_scale(op, rows, shape):
    fails(op, *[X] * rows, jnp.ones(shape), says=("`scale`", str(list(shape)), "[8]"))


@pytest.mark.parametrize("shape", ((2, 3, 7), (3, 8), (8,), (1, 3, 8), (2, 1, 8), (2, 3, 8, 1), ()))
def test_a_residual_of_another_shape(shape):
    fails(add_rms_norm, X, jnp.ones(shape), says=("`residual`", "`x`", str(list(shape)), "[2, 3, 8]"))


def test_a_residual_of_another_dtype():
    for x_dtype, dtype in (("bfloat16", "float32"), ("float32", "float16"), ("float32", "int32")):
        fails(add_rms_norm, X.astype(x_dtype), X.astype(dtype), says=("`residual`", "`x`", x_dtype, dtype))


@OPS
@pytest.mark.parametrize("epsilon", (-1e-6, float("nan"), float("inf"), -float("inf"), 1e39))
def test_epsilon_must_be_finite_and_not_negative(op, rows, epsilon):
    fails(op, *[X] * rows, SCALE, epsilon=epsilon, says=("`epsilon`", str(epsilon)))


@OPS
@pytest.mark.parametrize("offset", (float("nan"), float("inf"), 1e39))
def test_the_scale_offset_must_be_finite(op, rows, offset):
    fails(op, *[X] * rows, SCALE, scale_offset=offset, says=("`scale_offset`", str(offset)))


@OPS
@pytest.mark.parametrize("option", ("epsilon", "scale_offset"))
def test_numbers_must_be_numbers(op, rows, option):
    for value in ("small", None, [1, 2], 1j):
        fails(op, *[X] * rows, SCALE, **{option: value}, says=(f"`{option}`",))


@OPS
@pytest.mark.parametrize("option", ("epsilon", "scale_offset", "multiply_before_cast"))
def test_options_must_be_static(op, rows, option):
    with pytest.raises(ValueError, match=f"(?s){op.__name__}.*`{option}`"):
        jax.jit(lambda value: op(*[X] * rows, SCALE, **{option: value}))(1.0)


@OPS
def test_an_offset_needs_a_scale(op, rows):
    fails(op, *[X] * rows, scale_offset=1.0, says=("`scale_offset`", "1.0", "`scale`"))


@OPS
def test_multiply_before_cast_must_be_a_bool(op, rows):
    for value in ("yes", None, 2, 0.0):
        fails(op, *[X] * rows, SCALE, multiply_before_cast=value, says=("`multiply_before_cast`", repr(value)))


def test_options_of_the_norm_that_is_added():
    for value in ("bfloat16", None, True):
        fails(rms_norm_add, X, X, SCALE, norm_rounding=value, says=("`norm_rounding`", "'float32'", "'storage'"))


def test_options_of_the_sum():
    for value in ("bfloat16", None, True, jnp.float32):
        fails(add_rms_norm, X, X, SCALE, sum_rounding=value, says=("`sum_rounding`", "'float32'", "'storage'"))
    for value in ("yes", None, 3):
        fails(add_rms_norm, X, X, SCALE, return_sum=value, says=("`return_sum`", repr(value)))


@OPS
def test_unknown_implementations(op, rows):
    for value in ("gpu", "", "JNP", 3, True):
        fails(op, *[X] * rows, SCALE, implementation=value, says=("`implementation`", repr(value), "auto", "jnp", "kernel"))


def test_the_context_manager_checks_its_argument():
    for value in ("gpu", None, 3):
        with pytest.raises(ValueError, match="(?s)implementation.*jnp"):
            jax_fusednorm.implementation(value)


@OPS
def test_a_kernel_that_cannot_run_here(op, rows):
    elsewhere = [name for name in ("metal", "cuda") if explain(op, *[X] * rows, implementation=name)["cpu"].runs is None]
    for name in elsewhere:
        if name == "cuda" and jax.default_backend() == "gpu":
            continue
        fails(op, *[X] * rows, SCALE, implementation=name, error=NotImplementedError, says=(name,))


@OPS
def test_a_kernel_on_a_platform_without_kernels(op, rows):
    for platform in ("tpu", "rocm", "mps"):
        lowered = jax.jit(functools.partial(op, implementation="kernel")).trace(*[X] * rows)
        with pytest.raises(NotImplementedError, match=f"(?s){op.__name__}.*{platform}"):
            lowered.lower(lowering_platforms=(platform,))
        assert explain(op, *[X] * rows, implementation="kernel")["cpu"] is not None


@OPS
def test_options_are_keywords_only(op, rows):
    with pytest.raises(TypeError):
        op(*[X] * rows, SCALE, 1e-6)


@OPS
def test_things_that_are_no_arrays(op, rows):
    for value in ("text", object(), {"a": 1}):
        with pytest.raises(ValueError, match=f"(?s){op.__name__}.*`x`"):
            op(*[value] * rows)
        with pytest.raises(ValueError, match=f"(?s){op.__name__}.*`scale`"):
            op(*[X] * rows, value)


@OPS
def test_arguments_that_are_fine(op, rows):
    # lists, numpy arrays, ints for numbers: none of these may be refused
    op(*[np.ones((2, 8), np.float32)] * rows, np.ones(8, np.float16), epsilon=0, scale_offset=1)
    op(*[jnp.ones((2, 8))] * rows, None, epsilon=np.float64(1e-6))
    op(*[[[1.0, 2.0]]] * rows, [1.0, 2.0], multiply_before_cast=np.True_)


def test_messages_under_transformations_are_the_same():
    with pytest.raises(ValueError, match=r"(?s)add_rms_norm.*`residual`"):
        jax.vmap(add_rms_norm)(X, X[:, :2])
    with pytest.raises(ValueError, match=r"(?s)rms_norm.*`scale`"):
        jax.grad(lambda s: rms_norm(X, s).sum())(jnp.ones(5))


GATED_X, GATED_SCALE = jnp.ones((2, 12)), jnp.ones(12)


@pytest.mark.parametrize("says, change", [
    (("`y`", "int32"), dict(y=GATED_X.astype("int32"))),
    (("`y`", "scalar"), dict(y=jnp.float32(1))),
    (("`gate`", "int8"), dict(gate=GATED_X.astype("int8"))),
    (("`gate`", "[2, 11]", "[2, 12]"), dict(gate=GATED_X[:, 1:])),
    (("`gate`", "[3, 12]", "[2, 12]"), dict(gate=jnp.ones((3, 12)))),
    (("`gate`", "[12]", "[2, 12]"), dict(gate=jnp.ones(12))),
    (("`gate`", "[2, 12]", "[2, 13]", "or more columns", "gate_start=1"), dict(gate_start=1)),
    (("`gate`", "[3, 20]", "[2, 20]"), dict(gate=jnp.ones((3, 20)), gate_start=1)),
    (("`gate_start`", "-1", "at least 0"), dict(gate_start=-1)),
    (("`gate_start`", "1.5", "static integer"), dict(gate_start=1.5)),
    (("`gate_start`", "True"), dict(gate_start=True)),
    (("`scale`", "NoneType"), dict(scale=None)),
    (("`scale`", "[4]", "[12]"), dict(scale=jnp.ones(4))),
    (("`group_size`", "5", "divisor of 12"), dict(group_size=5)),
    (("`group_size`", "0", "at least 1"), dict(group_size=0)),
    (("`group_size`", "24", "divisor of 12"), dict(group_size=24)),
    (("`epsilon`", "-1.0"), dict(epsilon=-1.0)),
    (("`epsilon`", "'1e-5'"), dict(epsilon="1e-5")),
    (("`norm_before_gate`", "1"), dict(norm_before_gate=1)),
    (("`activation`", "'relu'", "'silu'", "'sigmoid'"), dict(activation="relu")),
    (("`rounding`", "'hf'", "'storage'", "'float32'"), dict(rounding="hf")),
    (("`out_dtype`", "int32", "'bfloat16'"), dict(out_dtype=jnp.int32)),
    (("`out_dtype`", "'no dtype'"), dict(out_dtype="no dtype")),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else None)
def test_arguments_of_the_gated_norm(says, change):
    arguments = dict(y=GATED_X, gate=GATED_X, scale=GATED_SCALE, group_size=4) | change
    y, gate, scale = (arguments.pop(name) for name in ("y", "gate", "scale"))
    fails(jax_fusednorm.gated_group_rms_norm, y, gate, scale, says=says, **arguments)


def test_gate_start_may_be_an_integer_of_numpy():
    gate = jnp.arange(26.0).reshape(2, 13)
    options = dict(norm_before_gate=True, epsilon=0, activation="sigmoid")
    got = jax_fusednorm.gated_group_rms_norm(GATED_X, gate, GATED_SCALE, gate_start=np.int64(1), **options)
    np.testing.assert_allclose(got, jax.nn.sigmoid(gate[:, 1:]), rtol=1e-6)
