"""The examples that check themselves: they pass on every implementation, and fail where the op is another."""

import pytest

for package in ("flax", "torch", "tqdm", "transformers"):
    pytest.importorskip(package)
import mamba2  # noqa: E402

SMALL = ["--mixers", "zamba2", "--prompt", "70", "--steps", "2"]  # a whole chunk, and a part of one


def test_mamba2_agrees_with_hugging_face(implementation):
    assert mamba2.main([*SMALL, "--implementation", implementation]) == 0


@pytest.mark.parametrize("difference", (dict(norm_before_gate=True), dict(gate_start=1)), ids=str)
def test_mamba2_fails_with_another_norm(monkeypatch, difference):
    norm = mamba2.GatedGroupRMSNorm
    monkeypatch.setattr(mamba2, "GatedGroupRMSNorm", lambda *args, **options: norm(*args, **{**options, **difference}))
    assert mamba2.main([*SMALL, "--dtypes", "bfloat16", "--implementation", "jnp"]) == 1
