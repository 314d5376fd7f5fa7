"""The compiled helpers of run.py: the triad that measures memory bandwidth, and the wall that XLA cannot fuse across."""

import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import jax

HERE = pathlib.Path(__file__).resolve().parent


def build(source, compilers, *flags):
    """The source file as a loaded library, or None where no compiler takes it."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, *flags, "-fPIC", "-shared", str(HERE / source), "-o", f"{folder}/library.so"]
        if compiler is None or subprocess.run(command, capture_output=True).returncode:
            return None
        return ctypes.CDLL(command[-1])


def cache_bytes():
    """Size of the last-level cache that core 0 sees; 32 MiB where the system does not say."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [f.read_text().strip() for f in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units), default=32 * 2**20)


class Triad:
    """The machine's memory bandwidth by STREAM's triad, on arrays of at least four times the last-level cache."""

    def __init__(self):
        self.rates, self.threads = [], 0
        self.compiled = build("triad.c", (os.environ.get("CC", "cc"), "gcc", "clang"), "-O3", "-march=native", "-fopenmp")
        if self.compiled:
            self.compiled.triad_best.restype = ctypes.c_double
            self.threads = self.compiled.triad_start(ctypes.c_size_t(max(4 * cache_bytes(), 2**27) // 8))

    def run(self, pause):
        if self.threads:
            time.sleep(pause)
            self.rates.append(self.compiled.triad_best(5))

    @property
    def best(self):
        return max(self.rates, default=0.0)


@functools.cache
def wall():
    """(*arrays) -> the same arrays, through a custom call that does nothing; None where it cannot be built."""
    if jax.default_backend() != "cpu":
        return None
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    library = build("wall.cc", compilers, "-O1", "-std=c++17", "-I" + jax.ffi.include_dir())
    if library is None:
        return None
    name = "jax_fusednorm_benchmark_wall"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.wall), platform="cpu")

    def through(*arrays):
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        return jax.ffi.ffi_call(name, results, input_output_aliases={i: i for i in range(len(arrays))})(*arrays)

    return through
