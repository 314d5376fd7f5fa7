"""The CUDA launcher where there is no GPU: which words it has for what is missing, what it compiles when, and what it keeps."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from cuda_launcher import Machine, build, rms_norm

ENTRY = "rms_norm_bfloat__bfloat__false__8__2__8__1_"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def machine(built, tmp_path):
    return Machine(*built, tmp_path)


def compiled(log):
    return [line for line in log if line.startswith("compile ")]


STATUS = {  # settings: what is said
    "all is well": ({}, "usable: compiled by NVRTC 13.0 for sm_90"),
    "two kinds of device": (dict(DEVICES="80,90,90"), "usable: compiled by NVRTC 13.0 for sm_80, sm_90"),
    "newer than NVRTC": (dict(DEVICES="121"), "usable: compiled by NVRTC 13.0 for compute_100"),
    "older than NVRTC knows": (dict(DEVICES="86", KNOWN="90,100"), "not usable: NVRTC 13.0 compiles for no architecture up to sm_86"),
    "old device": (dict(DEVICES="90,75"), "not usable: device 1 is sm_75, and the kernels need sm_80 or newer"),
    "old driver": (dict(DRIVER=11080), "not usable: this machine's NVIDIA driver is for CUDA 11.8, and 12.0 or newer is needed: update the driver"),
    "NVRTC newer than the driver": (dict(DRIVER=12080), "not usable: NVRTC 13.0, in .*cuda_driver.so, is newer than this machine's driver, for CUDA "
                                                         r"12.8: update the driver, or install an older NVRTC \(`pip install nvidia-cuda-nvrtc`.*"),
    "NVRTC older than the driver": (dict(NVRTC=12), "usable: compiled by NVRTC 12.0 for sm_90"),
    "no NVRTC": (dict(nvrtc="/nonexistent/libnvrtc.so"), "not usable: NVRTC, CUDA's compiler of kernels, was not found: "
                                                         "`pip install nvidia-cuda-nvrtc`, or of CUDA 12 `pip install nvidia-cuda-nvrtc-cu12`.*"),
    "no driver": (dict(driver="/nonexistent/libcuda.so"), "usable: there is no NVIDIA GPU here"),
    "no device": (dict(DEVICES=""), "usable: there is no NVIDIA GPU here"),
}


@pytest.mark.parametrize("what", STATUS)
def test_what_is_missing_is_said(machine, what):
    settings, words = STATUS[what]
    [status, prepared, called], log = machine.ask("status", f"prepare {rms_norm()}", f"call {rms_norm()}", **settings)
    assert re.fullmatch(words, status)
    usable, here = status.startswith("usable"), "no NVIDIA GPU" not in status
    assert len(compiled(log)) == (settings.get("DEVICES") == "80,90,90") + (usable and here)
    if not usable:
        assert prepared == called == "jax_fusednorm: " + status.removeprefix("not usable: ")
    else:
        assert prepared == "" and (called == "") == here


def test_a_call_is_compiled_when_it_is_prepared_and_launched_when_it_is_made(machine):
    answers, log = machine.ask(*[f"prepare {rms_norm()}"] * 2, *[f"call {rms_norm(rows)}" for rows in (5, 700, 0)])
    assert answers == [""] * 5
    assert log == ["compile rms_norm -arch=sm_90 -std=c++17 -w ", "compiled rms_norm", "mode 2", "load -arch=sm_90 -std=c++17 -w  of rms_norm", "mode 0",
                   f"launch {ENTRY} 5 256 shared 128", f"launch {ENTRY} 700 256 shared 128"]


def test_what_was_not_prepared_is_compiled_when_it_is_called(machine):
    answers, log = machine.ask(*[f"call {rms_norm(4, 256)}"] * 2)
    assert answers == ["", ""] and len(compiled(log)) == 1
    assert [line for line in log if "launch" in line] == ["launch rms_norm_bfloat__bfloat__false__8__2__1__4_ 1 128 shared 0"] * 2


def test_each_device_gets_code_of_its_own(machine):
    for device, arch in enumerate(("sm_80", "compute_100")):
        _, log = machine.ask(f"call {rms_norm()}", DEVICES="80,103", CURRENT=device)
        assert compiled(log) == [f"compile rms_norm -arch={arch} -std=c++17 -w "]
        assert [line for line in log if "load" in line][0].startswith("load PTX" if device else "load -arch")


def test_kernels_are_compiled_side_by_side(machine):
    calls = "; ".join(rms_norm(5, width) for width in (256, 1024, 2048, 4096))
    start = time.monotonic()
    _, log = machine.ask(f"together {calls}", MS=300)
    assert time.monotonic() - start < 1.1 and len(compiled(log)) == 4
    first_done = log.index("compiled rms_norm")
    assert len(compiled(log[:first_done])) > 1


def test_one_kernel_is_compiled_once_however_many_want_it(machine):
    _, log = machine.ask("together " + "; ".join([rms_norm()] * 4), MS=50)
    assert len(compiled(log)) == 1


def test_a_kernel_that_is_not_compiled_is_told_with_the_compilers_words(machine):
    answers, log = machine.ask(f"prepare {rms_norm()}", f"call {rms_norm()}", REFUSED="rms_norm")
    assert answers == ["jax_fusednorm: rms_norm<bfloat, bfloat, false, 8, 2, 8, 1> for sm_90: line 7: this is refused"] * 2
    assert len(compiled(log)) == 1 and not machine.files()


def test_a_kernel_that_is_not_loaded_is_told_with_the_drivers_words(machine):
    answers, _ = machine.ask(f"prepare {rms_norm()}", UNLOADED=1)
    assert answers == ["jax_fusednorm: rms_norm<bfloat, bfloat, false, 8, 2, 8, 1> for sm_90: the driver does not load it: FAKE_ERROR, as asked for"]


def test_compiled_kernels_are_kept_for_other_processes(machine):
    line = f"call {rms_norm()}"
    machine.ask(line)
    [file] = machine.files()
    assert file.suffix == ".kernel"
    assert compiled(machine.ask(line)[1]) == []
    for other in (dict(NVRTC=12), dict(DEVICES="80")):
        assert len(compiled(machine.ask(line, **other)[1])) == 1, other
    assert len(compiled(machine.ask(f"call {rms_norm(5, 8192)}")[1])) == 1
    assert len(machine.files()) == 4
    answers, log = machine.ask(line, cache="")
    assert answers == [""] and len(compiled(log)) == 1


@pytest.mark.parametrize("damage", ("cut", "changed", "empty", "another's"))
def test_a_damaged_file_is_compiled_again(machine, damage):
    line = f"call {rms_norm()}"
    machine.ask(line)
    [file] = machine.files()
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[:-9], "changed": whole[:-9] + b"?" + whole[-8:], "empty": b"", "another's": whole.replace(b"sm_90", b"sm_80", 1)}[damage])
    answers, log = machine.ask(line)
    assert answers == [""] and len(compiled(log)) == 1
    assert [f.read_bytes() for f in machine.files()] == [whole]


def test_a_folder_that_cannot_be_written_is_done_without(machine):
    machine.folder.joinpath("file").write_text("")
    answers, log = machine.ask(f"call {rms_norm()}", cache=machine.folder / "file" / "folder")
    assert answers == [""] and len(compiled(log)) == 1


def test_what_was_not_used_for_longest_goes(machine):
    machine.ask(f"call {rms_norm()}")
    [mine] = machine.files()
    for i in range(9):
        path = machine.cache / f"{i}.kernel"
        path.write_bytes(bytes(8 << 20))
        os.utime(path, (1e9 + i, 1e9 + i))
    machine.ask(f"call {rms_norm()}")  # used, not written: nothing goes
    assert len(machine.files()) == 10
    machine.ask(f"call {rms_norm(5, 8192)}")
    left = {file.name for file in machine.files()}
    assert mine.name in left and {f"{i}.kernel" for i in range(10)} & left == {f"{i}.kernel" for i in range(4, 9)}
    assert sum(file.stat().st_size for file in machine.files()) <= 48 << 20


# Prints [warnings, what runs, how the call by name was refused] of a kernel that the compiler refuses, and of another.
REFUSED = """
import json, sys, warnings
import jax, jax.numpy as jnp
from jax_fusednorm import add_rms_norm, explain, rms_norm
from jax_fusednorm.core import ffi

ffi.library("cuda").handle.jax_fusednorm_configure(sys.argv[1].encode(), b"")
x, found = jnp.ones((4, 4096), jnp.bfloat16), []
for op, operands in ((rms_norm, (x, x[0])), (add_rms_norm, (x, x, x[0]))):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runs = [str(explain(op, *operands, platforms=("cuda",))["cuda"]) for _ in range(2)]
    named = ""
    try:
        jax.jit(lambda *o: op(*o, implementation="cuda")).trace(*operands).lower(lowering_platforms=("cuda",))
    except NotImplementedError as error:
        named = str(error)
    found.append([[str(w.message) for w in warned], runs, named])
print(json.dumps(found))
"""


def test_a_kernel_that_does_not_compile_is_warned_of_once_and_passed_over(machine):
    done = subprocess.run([sys.executable, "-c", REFUSED, machine.driver], capture_output=True, text=True, check=False, timeout=240,
                          env={**machine.environment(REFUSED="rms_norm"), "JAX_FUSEDNORM_CACHE_DIR": "", "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    (warned, runs, named), (none, others, allowed) = json.loads(done.stdout)
    words = "rms_norm<bfloat, bfloat, false, 8, 2, 8, 1> for sm_90: line 7: this is refused"
    [warning] = warned
    assert "the cuda kernel of rms_norm cannot be had, so calls like this one do without it. On operands bfloat16[4, 4096], " in warning and words in warning
    assert runs == [f"jnp: {words}"] * 2 and named.startswith(f"rms_norm: implementation='cuda' was asked for, but {words}")
    assert not none and not allowed and all(other.startswith("cuda: libjax_fusednorm_cuda.so, compiled by NVRTC 13.0 for sm_90") for other in others)


# Every op with NVRTC itself, as far as a machine without a GPU goes.
COMPILED = """
import sys
import jax
from jax_fusednorm import explain
from jax_fusednorm.cli import calls
from jax_fusednorm.core import ffi, selfcheck

print(ffi.library("cuda").about)
for dtype in sys.argv[1:]:
    for call in calls.CALLS:
        for options in call.options(call.model):
            print(call.name, dtype, explain(call.op, *calls.shapes(call, 64, call.model, dtype), platforms=("cuda",), **options)["cuda"].runs)
print(selfcheck.failures)
"""


@pytest.mark.parametrize("dtypes", ["bfloat16", pytest.param("float32,float16", marks=pytest.mark.slow)])
def test_nvrtc_compiles_every_op(machine, dtypes):
    pytest.importorskip("nvidia.cu13", reason="needs the wheel nvidia-cuda-nvrtc")
    done = subprocess.run([sys.executable, "-c", COMPILED, *dtypes.split(",")], capture_output=True, text=True, check=False, timeout=500,
                          env={**machine.environment(), "JAX_FUSEDNORM_CACHE_DIR": str(machine.cache), "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    about, *ops, failures = done.stdout.splitlines()
    assert "compiled by NVRTC 13." in about and failures == "[]"
    assert len(ops) >= 8 and all(op.endswith(" cuda") for op in ops), ops
    assert len(machine.files()) >= 7 and all(b"\x7fELF" in file.read_bytes() for file in machine.files())
