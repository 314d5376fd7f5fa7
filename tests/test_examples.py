"""The examples that check themselves: they pass on every implementation, and fail where the op is another."""

import importlib

import pytest

for package in ("flax", "torch", "tqdm", "transformers"):
    pytest.importorskip(package)
import count  # noqa: E402
import mamba2  # noqa: E402
import mla  # noqa: E402

# Smaller than by default, and where an example has several variants, the one that has more to it.
SMALL = {
    "gemma": ["--layers", "2", "--prompt", "20", "--steps", "3", "--variants", "gemma4"],
    "mamba2": ["--prompt", "70", "--steps", "2", "--variants", "zamba2"],  # a whole chunk, and a part of one
    "mla": ["--prompt", "12", "--steps", "2"],
    "nemotron_h": ["--layers", "M*-", "--prompt", "20", "--steps", "3"],
}


def run(example, *arguments):
    return importlib.import_module(example).main([*SMALL[example], *arguments])


@pytest.mark.parametrize("example", SMALL)
def test_the_examples_agree_with_hugging_face(example, implementation):
    compiles_less = [] if implementation == "host" else ["--dtypes", "float32", "--no-gradients"]
    assert run(example, "--implementation", implementation, *compiles_less) == 0


def test_gemma_3_agrees_too(one_kernel):
    assert run("gemma", "--variants", "gemma3", "--dtypes", "float32", "--no-gradients", "--implementation", one_kernel) == 0


@pytest.mark.parametrize("example, module, difference", [
    pytest.param(mamba2, "GatedGroupRMSNorm", dict(norm_before_gate=True), id="norm before gate"),
    pytest.param(mamba2, "GatedGroupRMSNorm", dict(gate_start=1), id="gate elsewhere"),
    pytest.param(mla, "MatmulPartialRMSNorm", dict(epsilon=0.1), id="epsilon"),
    pytest.param(mla, "MatmulPartialRMSNorm", dict(scale_offset=0.1), id="scale offset"),
])
def test_an_example_fails_with_another_norm(example, module, difference, monkeypatch):
    norm = getattr(example, module)
    monkeypatch.setattr(example, module, lambda *args, **options: norm(*args, **{**options, **difference}))
    assert run(example.__name__, "--dtypes", "bfloat16", "--implementation", "jnp") == 1


def test_the_kernels_of_a_token_are_counted(kernel):
    step = count.MODELS["mamba2"]()
    (before, none), (after, own) = (count.kernels(count.compiled(step, name)[0]) for name in ("jnp", kernel))
    assert (none, own) == (0, 1) and after < before
    if kernel == "metal":
        assert count.dispatches(step) in (1, None)
