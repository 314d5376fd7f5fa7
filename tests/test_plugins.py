"""What platforms without kernels of ours get: plain StableHLO. No plugin is installed; its platform's name is all that lowering needs."""

import re

import jax
import jax.numpy as jnp
import pytest

from jax_fusednorm import explain, rms_norm
from jax_fusednorm.cli import calls

PLATFORMS = ("mps", "mtl", "metal", "METAL", "mlx", "tpu", "rocm")  # the first five are Apple GPUs'


def lowered(f, operands, platform):
    return jax.jit(f).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("call", calls.CALLS, ids=lambda call: call.name)
def test_every_op_and_its_gradient_are_plain_stablehlo(call):
    """One plugin answers a custom call that it does not know with its first operand, and no error."""
    operands = calls.shapes(call, 5, call.small, "bfloat16")
    for options in call.options(call.small):
        def step(*operands, options=options):
            if not call.differentiable:
                return call.op(*operands, **options)
            out, pull = jax.vjp(lambda x: call.op(x, *operands[1:], **options), operands[0])
            return out, pull(out)

        texts = {platform: lowered(step, operands, platform) for platform in PLATFORMS}
        assert set(texts.values()) == {texts["mps"]}
        assert "stablehlo.rsqrt" in texts["mps"] and "custom_call" not in texts["mps"]


def test_explain_says_that_they_run_jnp():
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    for platform, decision in explain(rms_norm, x, platforms=PLATFORMS).items():
        assert str(decision) == f"jnp: there are no kernels for platform {platform}"
    with pytest.raises(NotImplementedError, match="rms_norm: implementation='kernel' was asked for, but there are no kernels for platform mlx"):
        lowered(lambda x: rms_norm(x, implementation="kernel"), (x,), "mlx")


def test_rms_norm_has_the_form_that_plugins_recognise():
    """x * rsqrt(mean(x * x) + epsilon) * scale, and nothing between."""
    operands = jax.ShapeDtypeStruct((2, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    text = lowered(rms_norm, operands, "mps")
    found = [op for op in re.findall(r"stablehlo\.(\w+)", text) if op not in ("constant", "broadcast_in_dim", "reshape")]
    assert found == ["multiply", "reduce", "add", "divide", "add", "rsqrt", "multiply", "multiply"]
