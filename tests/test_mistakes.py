"""What can only be a mistake is refused, or warned of, where it is written."""

import gc
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fusednorm
from jax_fusednorm import explain, head_rms_norm_rope, qk_rms_norm_rope, qk_rms_norm_rope_paged, rms_norm
from ops import kernel_calls
from paged_op_calls import make
from test_errors import fails

X = jnp.ones((2, 8))


def test_explain_answers_to_the_name_of_the_default_backend(host_kernel):
    found = explain(rms_norm, X)
    assert jax.default_backend() in found and found["gpu"] == found["cuda"]
    assert isinstance(found["cpu"], jax_fusednorm.Decision)


def test_explain_takes_one_platform_by_name(host_kernel):
    found = explain(rms_norm, X, platforms="gpu")
    assert list(found) == ["gpu"] and found["gpu"] == explain(rms_norm, X, platforms=("cuda",))["cuda"]


def test_set_implementation_reaches_what_is_jitted_already(host_kernel):
    jitted = jax.jit(rms_norm)

    def runs_a_kernel():
        jitted(X)
        return "jax_fusednorm_host" in jitted.lower(X).as_text()

    before = jax_fusednorm.core.lowering.requested("test", None)
    try:
        seen = [runs_a_kernel()]
        for name in ("jnp", "host"):
            jax_fusednorm.set_implementation(name)
            seen.append(runs_a_kernel())
            with jax_fusednorm.implementation("jnp"):
                assert kernel_calls(rms_norm, X) == 0
    finally:
        jax_fusednorm.set_implementation(before)
    assert seen == [True, False, True]
    with pytest.raises(ValueError, match="set_implementation.*'gpu'"):
        jax_fusednorm.set_implementation("gpu")


def test_an_implementation_without_with_says_that_it_does_nothing():
    with pytest.warns(RuntimeWarning, match=r"implementation\('jnp'\) did nothing.*set_implementation"):
        jax_fusednorm.implementation("jnp")
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jax_fusednorm.implementation("jnp"):
            rms_norm(X)
        gc.collect()


@pytest.mark.parametrize("kind", ("nnx", "linen"))
def test_modules_refuse_an_implementation_that_there_is_none_of(kind):
    flax = pytest.importorskip("flax")
    modules = pytest.importorskip(f"jax_fusednorm.flax.{kind}")
    arguments = {"MatmulPartialRMSNorm": (8, 8, 8) if kind == "nnx" else (8, 8), "RMSNorm": (8,) if kind == "nnx" else ()}
    for name in modules.__all__:
        takes = arguments.get(name, (8,) if kind == "nnx" or name == "GatedGroupRMSNorm" else ())
        options = {"rngs": flax.nnx.Rngs(0)} if kind == "nnx" else {}
        with pytest.raises(ValueError, match=f"{name}: `implementation` is 'gpu'"):
            getattr(modules, name)(*takes, implementation="gpu", **options)


def test_a_layer_that_the_cache_has_not():
    call = make("float32")
    args, arrays, static = call.arguments()
    for layer in (3, -1, np.int64(2**32)):
        with pytest.raises(ValueError, match="qk_rms_norm_rope_paged: `layer` is .* 0 to 2"):
            qk_rms_norm_rope_paged(*args, **arrays, **static, layer=layer)


def test_queries_that_are_no_multiple_of_the_keys():
    def heads(n):
        return jnp.ones((2, n, 8))

    positions = jnp.arange(2)
    fails(qk_rms_norm_rope, heads(2), heads(4), None, None, positions, says=("`q`", "2 heads", "4 of keys", "swapped"))
    fails(qk_rms_norm_rope, heads(3), heads(2), None, None, positions, says=("`q`", "3 heads", "2 of keys", "multiple"))
    fails(qk_rms_norm_rope, jnp.ones((2, 40)), None, jnp.ones(8), jnp.ones(8), positions, num_heads=3, num_kv_heads=2, k_start=24,
          says=("`q`", "3 heads", "2 of keys"))
    call = make("float32", heads=(3, 2))
    args, arrays, _ = call.arguments()
    with pytest.raises(ValueError, match="qk_rms_norm_rope_paged: `q` is of 3 heads beside 2 of keys"):
        qk_rms_norm_rope_paged(*args, **arrays, layer=0)


def test_heads_before_tokens_are_told_from_wrong_positions():
    fails(head_rms_norm_rope, jnp.ones((2, 4, 6, 8)), None, jnp.arange(6), says=("`positions`", "axis -3, 4 of them", "swapaxes(-2, -3)"))
    assert "swapaxes" not in fails(head_rms_norm_rope, jnp.ones((2, 4, 6, 8)), None, jnp.arange(5), says=("`positions`", "axis -3"))


@pytest.mark.parametrize("variable, value", (("JAX_FUSEDNORM_HOST_LEVEL", "v9"), ("JAX_FUSEDNORM_SELF_CHECK", "x")))
def test_environment_variables_of_no_known_value_are_warned_of(variable, value):
    ran = subprocess.run([sys.executable, "-c", "import jax_fusednorm"], env={**os.environ, variable: value, "JAX_PLATFORMS": "cpu"},
                         capture_output=True, text=True, check=True)
    assert f"jax_fusednorm: {variable}={value!r}" in ran.stderr and ran.stderr.count("UserWarning") == 1
