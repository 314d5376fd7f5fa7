"""The Metal launcher over a stand-in for Metal's driver: what it sends, moves, keeps and says. What it computes: --implementations metal."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracle
from jax_fusednorm import add_rms_norm, explain, rms_norm
from ops import ALL, assert_trees_close, every_op, kernel_calls, loss
from plain import draw

pytestmark = pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
TESTS = pathlib.Path(__file__).parent
SOURCES = TESTS.parent / "metal_src"
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

@pytest.mark.parametrize("how", ("nil wrapper", "short wrapper"))
def test_memory_that_metal_does_not_wrap_is_copied(metal, how):
    metal.misbehave(how)

    def check():
        for tested in ALL:
            args = tested.arguments((ROWS, 300))
            f, plainly = tested.bound("metal"), tested.plain
            argnums = tuple(range(len(args)))
            assert_trees_close(jax.jit(lambda *a: (f(*a), jax.grad(loss(f), argnums)(*a)))(*args),
                               jax.jit(lambda *a: (plainly(*a), jax.grad(loss(plainly), argnums)(*a)))(*args))
        # what is absent is bound to another operand's or result's memory
        x = draw(2, (ROWS, 300))
        oracle.assert_close(rms_norm(x, implementation="metal"), oracle.rms_norm(x), "float32")
        normed = add_rms_norm(x, x, return_sum=False, implementation="metal")
        oracle.assert_close(normed, oracle.add_rms_norm(x, x)[0], "float32")

    check()
    copies = metal.count("sent contents")
    assert copies > 0
    check()
    # the second time, the buffers of the first are used again
    metal.reset()
    metal.misbehave(how)
    check()
    assert metal.count("sent contents") > 0 and metal.count("sent newBufferWithLength:options:") == 0


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
from jax_fusednorm import rms_norm
from metal_driver import Standin

standin = Standin(os.environ["JAX_FUSEDNORM_METAL_DRIVER"])
for i, width in enumerate((8, 300, 4096, 20000)):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, width)), jnp.float32)
    oracle.assert_close(rms_norm(x, implementation="metal"), oracle.rms_norm(x), "float32")
    print(standin.dispatched(i).threads)
assert standin.complaints() == []
"""


@pytest.mark.parametrize("most", (32, 64, 128))
def test_a_pipeline_that_allows_few_threads_gets_few(most):
    threads = list(map(int, finished(FEWER_THREADS, STANDIN_MAX_THREADS=str(most)).split()))
    assert len(threads) == 4 and max(threads) == most


# ---- what is chosen, and what is said of it

def test_metal_runs_where_it_is_asked_for_by_name(metal, host_kernel):
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    for requested, runs in (("auto", "host"), ("kernel", "host"), ("metal", "metal")):
        assert explain(rms_norm, x, implementation=requested)["cpu"].runs == runs
    assert re.search("metal: libjax_fusednorm_metal.so, a stand-in for Metal, Apple GPU family [0-9]+, unified memory, .*pages of 16384 bytes",
                     str(explain(rms_norm, x, implementation="metal")["cpu"]))
    assert explain(rms_norm, x, implementation="metal")["cuda"].runs is None


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


# ---- threads and memory, under the compiler's sanitizers

class Built:
    """metal_launcher.cc with the launcher's sources, one of which may be changed, under a sanitizer."""

    def __init__(self, folder, standin, sanitizer):
        self.folder, self.standin = folder, standin
        self.compiler = os.environ.get("CXX", "g++")
        self.flags = ["-g", "-O1", f"-fsanitize={sanitizer}", "-D_GNU_SOURCE", f"-I{SOURCES}", f"-I{SOURCES / 'launch/metal'}",
                      f"-I{pathlib.Path(standin.path).parent}", "-isystem", jax.ffi.include_dir()]
        self.objects = [self.compile(path) for path in (TESTS / "metal_launcher.cc", *sorted((SOURCES / "launch/metal").glob("*.c*")))]

    def compile(self, path):
        made = self.folder / f"{path.name}.o"
        language = ["-x", "c", "-std=gnu11"] if path.suffix == ".c" else ["-std=c++17"]
        subprocess.run([self.compiler, *language, *self.flags, "-c", path, "-o", made], check=True)
        return made

    def program(self, changed=None):
        """run(*arguments, **environment) -> (exit status, what it printed). changed: (file, old text, new text)."""
        made = list(self.objects)
        if changed:
            name, old, new = changed
            text = (SOURCES / "launch/metal" / name).read_text()
            assert old in text
            path = self.folder / f"changed_{name}"
            path.write_text(text.replace(old, new))
            made[[o.name for o in made].index(f"{name}.o")] = self.compile(path)
        program = self.folder / "program"
        subprocess.run([self.compiler, *self.flags, *made, "-o", program, "-ldl", "-pthread"], check=True)
        return functools.partial(self.run, program)

    def run(self, program, *arguments, **environment):
        suppressed = self.folder / "suppressed"
        suppressed.write_text("leak:libstandin\n")  # it never frees an object, so that one that is gone is known
        environment = {"LSAN_OPTIONS": f"suppressions={suppressed}", "JAX_FUSEDNORM_METAL_DRIVER": self.standin.path,
                       "JAX_FUSEDNORM_SELF_CHECK": "300", **environment}
        done = subprocess.run([program, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        return done.returncode, done.stdout + done.stderr


COPIES = dict(STANDIN_MISBEHAVE="nil wrapper:")
CHANGES = {
    "thread": (
        (("buffers.c", "pthread_mutex_lock(&kept.lock);\n  for", "for"), "data race", ("threads", "8", "200"), COPIES),
        (("launcher.cc", "std::lock_guard<std::mutex> guard(lock);", ""), "data race", ("threads", "8", "200"), {}),
    ),
    "address,undefined": (
        (("buffers.c", "array->data, contents(array), array->bytes)", "array->data, contents(array), array->bytes + 4096)"),
         "heap-buffer-overflow", ("threads", "1", "5"), COPIES),
        (("metal.c", "  free(bound);\n", ""), "detected memory leaks", ("threads", "2", "5"), {}),
        (("metal.c", "if (i) SEND", "if (i > 1) SEND"), "hazard: ", ("chain",), {}),
        (("metal.c", "send(encoder, \"endEncoding\");", ""), "order: ", ("chain",), {}),
        (("metal.c", "driver.pool_pop(pool);\n  free", "free"), "leak: ", ("chain",), {}),
        (("buffers.c", "send(array->buffer, \"release\");\n    return;", "return;"), "leak: ", ("chain",), {}),
    ),
}


@pytest.mark.parametrize("sanitizer", CHANGES)
def test_the_launcher_is_clean_under_sanitizers_which_see_what_is_not(standin_driver, tmp_path, sanitizer):
    built = Built(tmp_path, standin_driver, sanitizer)
    run = built.program()
    for arguments, environment in ((("chain",), {}), (("threads", "8", "100"), {}), (("threads", "8", "100"), COPIES)):
        status, text = run(*arguments, **environment)
        assert status == 0 and "right\n" in text and "Sanitizer: " not in text, text
    for change, complaint, arguments, environment in CHANGES[sanitizer]:
        run = built.program(change)
        # threads need not meet in one run
        answers = (run(*arguments, **environment) for _ in range(10))
        assert any(status != 0 and complaint in text for status, text in answers), f"{change} is not seen"
