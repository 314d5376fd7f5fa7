"""examples/serve_qwen3.py passes on every implementation, fails where the op is another, and leaves its cache where it is."""

import re

import pytest

for package in ("flax", "torch", "tqdm", "transformers"):
    pytest.importorskip(package)
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import serve_qwen3  # noqa: E402
from flax import nnx  # noqa: E402

import jax_fusednorm  # noqa: E402

SMALL = ["--prompts", "5", "--batch", "2", "--new-tokens", "10", "--layers", "2"]


def test_tokens_are_those_of_hugging_face(implementation):
    compiles_less = [] if implementation == "host" else ["--no-gradients"]
    assert serve_qwen3.main([*SMALL, "--dtypes", "float32", "--implementation", implementation, *compiles_less]) == 0


def test_bfloat16_and_a_tied_head(one_kernel):
    assert serve_qwen3.main([*SMALL, "--dtypes", "bfloat16", "--tied", "--implementation", one_kernel]) == 0


@pytest.fixture
def new_step():
    """A step that is compiled with the op as it is, and afterwards again."""
    serve_qwen3.step.clear_cache()
    yield
    serve_qwen3.step.clear_cache()


@pytest.mark.parametrize("difference", (dict(style="interleaved"), dict(layer=0)), ids=str)
def test_those_of_another_op_are_not(monkeypatch, new_step, difference):
    of_example = jax_fusednorm.qk_rms_norm_rope_paged
    monkeypatch.setattr(jax_fusednorm, "qk_rms_norm_rope_paged", lambda *args, **options: of_example(*args, **{**options, **difference}))
    assert serve_qwen3.main([*SMALL, "--dtypes", "float32", "--no-gradients", "--implementation", "jnp"]) == 1


def test_pages_are_taken_whole_and_come_back():
    pool = serve_qwen3.PagePool(5)
    first, second = pool.take(2 * serve_qwen3.PAGE + 1), pool.take(2 * serve_qwen3.PAGE)
    assert sorted(first + second) == list(range(5))
    pool.give_back(second)
    assert pool.take(2 * serve_qwen3.PAGE + 1) is None
    assert sorted(pool.take(2 * serve_qwen3.PAGE)) == sorted(second)


def made_of_pages(step, *arguments):
    """(what makes an array of the pages' shape in the compiled step, the compiled step)."""
    compiled = step.lower(*arguments, longest=1).compile()
    shape = ",".join(map(str, arguments[1].shape))
    return set(re.findall(rf"= \w+\[{shape}\]\S* ([\w-]+)\(", compiled.as_text())), compiled


def test_a_donated_cache_is_not_copied(implementation):
    theirs = serve_qwen3.qwen3(**serve_qwen3.SMALL, num_hidden_layers=2)
    model = nnx.split(serve_qwen3.Qwen3(theirs, dtype=jnp.float32, implementation=implementation))
    pages = serve_qwen3.empty_pages(6, theirs.config, jnp.float32)
    rest = np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(2, np.int32), np.zeros(2, np.int32), np.arange(3, dtype=np.int32)
    kept, _ = made_of_pages(jax.jit(serve_qwen3.step.__wrapped__, static_argnames="longest"), model, pages, *rest)
    donated, compiled = made_of_pages(serve_qwen3.step, model, pages, *rest)
    assert "copy" in kept
    assert donated <= {"parameter", "custom-call", "get-tuple-element", "scatter", "fusion"}
    place = pages.unsafe_buffer_pointer()
    assert compiled(model, pages, *rest)[2].unsafe_buffer_pointer() == place
