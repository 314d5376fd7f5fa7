"""examples/mla.py passes on every implementation, and fails where the op is another."""

import pathlib
import sys

import pytest

for package in ("flax", "torch", "tqdm", "transformers"):
    pytest.importorskip(package)
sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
import mla  # noqa: E402

SMALL = ["--prompt", "12", "--steps", "2"]


def test_latent_attention_agrees_with_hugging_face(implementation):
    assert mla.main([*SMALL, "--implementation", implementation]) == 0


@pytest.mark.parametrize("difference", (dict(epsilon=0.1), dict(scale_offset=0.1)), ids=str)
def test_another_norm_does_not(monkeypatch, difference):
    of_example = mla.MatmulPartialRMSNorm
    monkeypatch.setattr(mla, "MatmulPartialRMSNorm", lambda *args, **options: of_example(*args, **{**options, **difference}))
    assert mla.main([*SMALL, "--dtypes", "bfloat16", "--implementation", "jnp"]) == 1
