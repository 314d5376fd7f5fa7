"""The CUDA launcher over a driver and an NVRTC that run nothing and write down what they are asked (cuda_driver.c), in a process of its own."""

import dataclasses
import os
import pathlib
import shutil
import subprocess

import jax
import pytest

from jax_fusednorm.core import ffi

TESTS = pathlib.Path(__file__).parent


def build(folder):
    """(the fake driver, the program that makes calls)"""
    compiler = shutil.which("g++") or shutil.which("c++")
    if ffi.library("cuda").handle is None or compiler is None:
        pytest.skip(f"{ffi.library('cuda').about}; C++ compiler: {compiler}")
    driver, program = folder / "cuda_driver.so", folder / "cuda_call"
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-O1", TESTS / "cuda_driver.c", "-o", driver], check=True)
    subprocess.run([compiler, "-std=c++17", "-pthread", f"-I{TESTS.parent / 'metal_src'}", f"-I{jax.ffi.include_dir()}", TESTS / "cuda_call.cc",
                    "-o", program, "-ldl"], check=True)
    return driver, program


@dataclasses.dataclass
class Machine:
    """ask(*lines) -> (the answers, what the driver and NVRTC were asked). Settings: FAKE_CUDA_... without the prefix, and nvrtc, a path."""

    driver: pathlib.Path
    program: pathlib.Path
    folder: pathlib.Path

    @property
    def cache(self):
        return self.folder / "cache"

    def files(self):
        return sorted(self.cache.glob("*"))

    def environment(self, **settings):
        return {**os.environ, "JAX_FUSEDNORM_CUDA_DRIVER": str(self.driver), "FAKE_CUDA_LOG": str(self.folder / "log"),
                **{f"FAKE_CUDA_{name}": str(value) for name, value in settings.items()}}

    def ask(self, *lines, nvrtc=None, driver=None, cache=None, **settings):
        log = self.folder / "log"
        log.write_text("")
        environment = self.environment(**settings)
        if driver is not None:
            environment["JAX_FUSEDNORM_CUDA_DRIVER"] = driver
        done = subprocess.run([self.program, ffi.library("cuda").handle._name, nvrtc or self.driver, self.cache if cache is None else cache],
                              input="\n".join(lines), env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), log.read_text().splitlines()


def rms_norm(rows=5, width=4096, dtype="bf16"):
    """A call's line."""
    return (f"{ffi.target('cuda', 'rms_norm')} in:{dtype}:{rows}x{width}: in:{dtype}:{width}: out:{dtype}:{rows}x{width}: attr:epsilon:f32:1e-6 "
            "attr:multiply_before_cast:i1:true attr:scale_offset:f32:0")
