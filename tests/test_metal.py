"""The Metal launcher over a stand-in for Metal's driver: what it sends, moves, keeps and says. What it computes: --implementations metal."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from jax_fusednorm import explain, matmul_partial_rms_norm, rms_norm
from ops import assert_trees_close, every_op, kernel_calls, loss
from plain import draw

pytestmark = pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
TESTS = pathlib.Path(__file__).parent
ROWS = 5


@pytest.fixture
def metal(standin):
    """The stand-in that the launcher has loaded."""
    assert os.path.samefile(standin.path, os.environ["JAX_FUSEDNORM_METAL_DRIVER"])
    yield standin
    assert standin.complaints() == []


def all_dispatched(metal):
    found = []
    while (dispatch := metal.dispatched(len(found))) is not None:
        found.append(dispatch)
    return found


def names(metal):
    return [d.kernel.decode().split("<")[0] for d in all_dispatched(metal)]


# ---- what a call is

@every_op
def test_a_call_is_one_dispatch_in_one_command_buffer(metal, tested):
    args, f = tested.arguments((ROWS, 300)), jax.jit(tested.bound("metal"))
    jax.block_until_ready(f(*args))
    assert names(metal) == [tested.op.__name__]
    metal.reset()
    step = jax.value_and_grad(loss(tested.bound("metal")), tuple(range(len(args))))
    calls = kernel_calls(step, *args)
    jax.block_until_ready(jax.jit(step)(*args))
    assert len(names(metal)) == metal.count("sent commit") == calls >= 2


@every_op
@pytest.mark.parametrize("width", (64, 1000, 4096))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_each_operand_is_read_once_and_each_result_written_once(metal, tested, dtype, width):
    args = tested.arguments((ROWS, width), dtype, dtype)
    outs = jax.block_until_ready(jax.jit(tested.bound("metal"))(*args))
    [dispatch] = all_dispatched(metal)
    row, scale = args[0].nbytes, args[-1].nbytes
    want = [(row, 0, row, 0)] * tested.rows + [(ROWS * scale, 0, scale, 0)] + [(0, row, 0, row)] * len(outs)
    assert [moved(b) for b in dispatch.buffers[:len(want)]] == want


def moved(b):
    return b.read, b.written, b.unique_read, b.unique_written


@every_op
def test_a_row_of_one_simdgroup_needs_no_barrier_and_no_threadgroup_memory(metal, tested):
    for width, alone in ((128, True), (4096, False)):
        metal.reset()
        jax.block_until_ready(jax.jit(tested.bound("metal"))(*tested.arguments((ROWS, width))))
        [dispatch] = all_dispatched(metal)
        assert (dispatch.barriers == 0) == (moved(dispatch.threadgroup_memory) == (0, 0, 0, 0)) == alone


@every_op
def test_a_kernel_has_the_threadgroup_memory_that_its_simdgroups_share(metal, tested):
    """Four sums of each; one alone has what a kernel that declares some must be given."""
    for width in (64, 300, 4096):
        jax.block_until_ready(jax.jit(tested.bound("metal"))(*tested.arguments((ROWS, width))))
    args = tested.arguments((ROWS, 4096))
    jax.block_until_ready(jax.jit(jax.grad(loss(tested.bound("metal")), tuple(range(len(args)))))(*args))
    ran = all_dispatched(metal)
    simdgroups = [int(d.kernel.decode().rstrip(">").split(", ")[-2]) for d in ran]
    assert [d.threadgroup_bytes for d in ran] == [16 * n for n in simdgroups] and {1, 16} <= set(simdgroups)


@pytest.mark.parametrize("transposed", (True, False))
@pytest.mark.parametrize("rows", (3, 40))
def test_a_wide_projection_sums_in_threadgroup_memory_of_its_own(metal, rows, transposed):
    """By the kernels for few rows, and by the norm after a product that XLA makes."""
    x, weight, scale = draw(1, (rows, 16)), draw(2, (2048, 16)), draw(3, (2000,))
    op = functools.partial(matmul_partial_rms_norm, x, weight if transposed else weight.T, scale, transpose_b=transposed)
    assert_trees_close(op(implementation="metal"), op(implementation="jnp"))
    assert max(d.threadgroup_bytes for d in all_dispatched(metal)) == 16 * 8


def test_ten_thousand_calls_leave_nothing_behind(metal):
    def run():
        return jax.block_until_ready(jax.lax.fori_loop(0, 10_000, lambda i, x: rms_norm(x, implementation="metal"), draw(1, (1, 8))))

    jax.block_until_ready(rms_norm(draw(1, (1, 8)), implementation="metal"))
    kinds = [f"live {kind}" for kind in ("MTLBuffer", "MTLCommandBuffer", "MTLComputeCommandEncoder", "MTLComputePipelineState", "MTLLibrary",
                                         "MTLFunction", "NSString", "NSError")]
    before = list(map(metal.count, kinds))
    run()
    assert metal.count("sent commit") == 10_001
    assert list(map(metal.count, kinds)) == before


# ---- what goes wrong

def finished(program, *arguments, **environment):
    """The standard output of a Python program that finds metal_driver and oracle."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


FAILURES = """
import json, os
import jax, jax.numpy as jnp
from jax_fusednorm import rms_norm
from metal_driver import Standin

standin, x, said = Standin(os.environ["JAX_FUSEDNORM_METAL_DRIVER"]), jnp.ones((2, 40)), {}
for how in ("refuse source", "refuse pipeline", "fail"):
    standin.misbehave(how, "rms_norm<float, ones")
    try:
        jax.block_until_ready(rms_norm(x, implementation="metal"))
    except jax.errors.JaxRuntimeError as error:
        said[how] = str(error)
    standin.misbehave(how, None)
said["sum"] = float(rms_norm(x, implementation="metal").sum())
print(json.dumps([said, standin.complaints()]))
"""


def test_a_failure_is_an_error_with_metals_own_words_and_the_next_call_is_right():
    said, complaints = json.loads(finished(FAILURES))
    instance = r"rms_norm<float, ones, false, \d+, \d+, \d+, \d+>"
    assert re.search(f"Metal does not compile {instance}: .*the source is refused, as asked for", said["refuse source"])
    assert re.search(f"Metal does not compile {instance}: .*the pipeline is refused, as asked for", said["refuse pipeline"])
    assert re.search(f"INTERNAL: {instance}: .*as asked for", said["fail"])
    assert abs(said["sum"] - 80) < 1e-3 and complaints == []


FEWER_THREADS = """
import os, sys
import numpy as np, jax.numpy as jnp
import oracle
from jax_fusednorm import head_rms_norm_rope, rms_norm
from metal_driver import Standin

standin = Standin(os.environ["JAX_FUSEDNORM_METAL_DRIVER"])
for i, width in enumerate((8, 300, 4096, 20000)):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, width)), jnp.float32)
    oracle.assert_close(rms_norm(x, implementation="metal"), oracle.rms_norm(x), "float32")
    print(standin.dispatched(i).threads)
x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 64)), jnp.float32)
got, want = (head_rms_norm_rope(x, None, jnp.arange(3), implementation=i) for i in ("metal", "jnp"))
np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
print(standin.dispatched(4).threads)
assert standin.complaints() == []
"""


@pytest.mark.parametrize("most", (32, 64, 128))
def test_a_pipeline_that_allows_few_threads_gets_few(most):
    threads = list(map(int, finished(FEWER_THREADS, STANDIN_MAX_THREADS=str(most)).split()))
    assert len(threads) == 5 and max(threads) == most and threads[4] == min(most, 64)  # two heads a threadgroup, where it may have two


# ---- what is chosen, and what is said of it

def test_metal_runs_where_it_is_asked_for_by_name(metal, host_kernel):
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    for requested, runs in (("auto", "host"), ("kernel", "host"), ("metal", "metal")):
        assert explain(rms_norm, x, implementation=requested)["cpu"].runs == runs
    assert re.search("metal: libjax_fusednorm_metal.so, a stand-in for Metal, Apple GPU family [0-9]+, unified memory, .*pages of 16384 bytes",
                     str(explain(rms_norm, x, implementation="metal")["cpu"]))
    assert explain(rms_norm, x, implementation="metal")["cuda"].runs is None


SHORT_BUFFERS = """
import json
import jax, jax.numpy as jnp
from jax_fusednorm import explain, rms_norm
from jax_fusednorm.core import lowering

lowering.on_apple_silicon, lowering.METAL_MIN_BYTES = lambda: True, 0
said = []
for rows in (16, 17):
    x = jnp.ones((rows, 256))
    said.append([str(explain(rms_norm, x)["cpu"]), float(jax.jit(rms_norm)(x).sum())])
try:
    rms_norm(x, implementation="metal")
except NotImplementedError as error:
    said.append(str(error))
print(json.dumps(said))
"""


def test_what_is_longer_than_a_buffer_may_be_runs_elsewhere(host_kernel):
    """Sixteen rows are one page, which is all that a buffer may have here; with one more, a call does without Metal."""
    [first, fits], [second, long], error = json.loads(finished(SHORT_BUFFERS, STANDIN_MISBEHAVE="longest buffer:16384"))
    why = "metal takes arrays of up to 16384 bytes here, and one is of 17408"
    assert first.startswith("metal: ") and second.startswith("host: ") and why in second
    assert abs(fits - 16 * 256) < 0.1 and abs(long - 17 * 256) < 0.1
    assert error.startswith(f"rms_norm: implementation='metal' was asked for, but {why}")


NO_DRIVER = """
import jax.numpy as jnp
from jax_fusednorm import explain, rms_norm
from jax_fusednorm.cli import info

x = jnp.ones((2, 8))
print(explain(rms_norm, x, implementation="metal")["cpu"])
try:
    rms_norm(x, implementation="metal")
except NotImplementedError as error:
    print(error)
info.main(None)
print(float(rms_norm(x).sum()))
"""


@pytest.mark.parametrize("environment, why", (
    (dict(JAX_FUSEDNORM_METAL_DRIVER="/nonexistent/Metal"), "the Metal driver cannot be loaded: /nonexistent/Metal: cannot open shared object"),
    (dict(JAX_FUSEDNORM_METAL_DRIVER="libc.so.6"), "the Metal driver cannot be loaded: it has no MTLCreateSystemDefaultDevice"),
    (dict(STANDIN_MISBEHAVE="no device:"), "there is no Metal device"),
), ids=("no file", "another file", "no device"))
def test_without_a_driver_the_reason_is_said(environment, why):
    explained, error, *info, total = finished(NO_DRIVER, **environment).splitlines()
    assert explained.startswith(f"error: {why}")
    assert error.startswith(f"rms_norm: implementation='metal' was asked for, but {why}")
    assert any(line.startswith(f"metal: {why}") for line in info) and any(line.startswith("  host: ") for line in info)
    assert abs(float(total) - 16) < 1e-3
