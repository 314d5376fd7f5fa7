"""The CUDA kernels: what can be shown without a GPU, and what only a GPU shows. `--implementations jnp,cuda` runs every other file on one."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fusednorm
import oracle
from jax_fusednorm.core import ffi
from ops import assert_trees_close, every_op, loss
from plain import draw, draw_scale

needs_gpu = pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs a GPU")


@pytest.fixture
def library():
    if ffi.library("cuda").handle is None:
        pytest.skip(ffi.library("cuda").about)


@every_op
def test_a_program_for_cuda_is_lowered_without_a_gpu(library, tested):
    args = tested.arguments((5, 24), "bfloat16", "float16")
    gradient = jax.jit(jax.grad(loss(tested.bound("cuda")), range(len(args))))
    text = gradient.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in (tested.op.__name__, tested.cotangent_kernel):
        assert text.count(f"custom_call @jax_fusednorm_cuda_{kernel}_v{ffi.ABI}(") == 1


def test_without_the_library_explain_says_why(monkeypatch):
    monkeypatch.setattr(ffi, "_find", lambda launcher: (None, None))
    ffi.library.cache_clear()
    try:
        x = jnp.ones((2, 8))
        decision = jax_fusednorm.explain(jax_fusednorm.rms_norm, x)["cuda"]
        assert decision.runs == "jnp" and decision.why == "the cuda kernels are not built: they are built on Linux only"
        with pytest.raises(NotImplementedError, match="rms_norm: implementation='cuda' was asked for, but .*built on Linux only"):
            call = functools.partial(jax_fusednorm.rms_norm, implementation="cuda")
            jax.jit(call).trace(x).lower(lowering_platforms=("cuda",))
    finally:
        monkeypatch.undo()
        ffi.library.cache_clear()


@needs_gpu
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("row_bytes", (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 36 << 10, 1 << 9, 1 << 11))
def test_the_backward_pass_where_a_team_has_several_rows(row_bytes, dtype):
    odd = row_bytes < 1 << 10 or row_bytes == 1 << 11
    width = row_bytes // jnp.dtype(dtype).itemsize - (1 if odd else 0)
    rows = 2 * 132 * 16 * 1024 // max(1024, min(row_bytes, 16 << 10)) + 1
    x, scale, dn = draw(1, (rows, width), dtype), draw_scale(2, width, "float32"), draw(3, (rows, width), dtype)
    op = functools.partial(jax_fusednorm.rms_norm, implementation="cuda")
    dx, dscale = jax.jit(lambda x, scale, dn: jax.vjp(op, x, scale)[1](dn))(x, scale, dn)
    want, size, want_scale = oracle.rms_norm_vjp(x, scale, dn)
    oracle.assert_derivative_close(dx, want, size, dtype)
    oracle.assert_scale_cotangent_close(dscale, want_scale, "float32", tolerance=1e-4)


@needs_gpu
def test_a_chain_of_layers_is_launched_as_graphs(tmp_path):
    """XLA has recorded the custom calls in command buffers: a run of forty layers makes a few graph launches and no kernel launch."""
    x, scales = draw(1, (4, 4096), "bfloat16"), draw(2, (40, 4096), "bfloat16")

    @jax.jit
    def chain(x, residual, scales):
        for scale in scales:
            x, residual = jax_fusednorm.add_rms_norm(x, residual, scale, implementation="cuda")
        return x, residual

    runs = 5
    for _ in range(3):
        jax.block_until_ready(chain(x, x, scales))
    with jax.profiler.trace(tmp_path):
        for _ in range(runs):
            jax.block_until_ready(chain(x, x, scales))
    [path] = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    launches = collections.Counter(e.name for plane in planes if "GPU" not in plane.name for line in plane.lines for e in line.events
                                   if "Launch" in e.name)
    graphs = sum(n for name, n in launches.items() if "GraphLaunch" in name)
    kernels = sum(n for name, n in launches.items() if "LaunchKernel" in name)
    assert runs <= graphs <= 4 * runs and kernels < 40, launches


@pytest.mark.skipif("jax.default_backend() != 'gpu' or jax.device_count() < 2", reason="needs two GPUs")
@every_op
def test_two_gpus_run_the_kernels_on_their_own_rows(tested):
    args, f = tested.arguments((4, 6, 256), "bfloat16", "float32"), tested.bound("cuda")
    step = jax.jit(lambda *a: (f(*a), jax.grad(loss(f), range(len(a)))(*a)))
    want = step(*args)
    mesh = jax.make_mesh((2,), ("b",))
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in (("b",), ()))
    cut = [jax.device_put(a, rows if a.ndim > 1 else whole) for a in args]
    text = step.lower(*cut).compile().as_text()
    assert "jax_fusednorm_cuda" in text and "all-gather" not in text
    assert_trees_close(step(*cut), want, rtol=1e-2, atol=1e-2)
    for got, w in zip(f(*(jax.device_put(a, jax.devices()[1]) for a in args)), want[0]):
        assert got.devices() == {jax.devices()[1]}
        oracle.assert_same_bits(got, np.asarray(w))


@needs_gpu
def test_a_call_that_no_kernel_takes_names_the_kernel():
    x = jnp.ones((2, 64), jnp.bfloat16)

    def call(scale):
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        options = dict(epsilon=np.float32(0), scale_offset=np.float32(0), multiply_before_cast=True)
        jax.block_until_ready(jax.ffi.ffi_call(ffi.target("cuda", "rms_norm"), result)(x, scale, **options))

    with pytest.raises(Exception, match="rms_norm: scale has 63 elements, but 64 were wanted"):
        call(jnp.ones(63))
    with pytest.raises(Exception, match="rms_norm: scale is of a dtype that has no kernel"):
        call(jnp.ones(64, jnp.int32))
