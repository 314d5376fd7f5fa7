"""The native library as a part that may be missing, old or wrong: a clear word, and jnp."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fusednorm
from jax_fusednorm.core import ffi

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments, **environment):
    """A fresh Python process; its standard output and error, in that order."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT.parent, capture_output=True, text=True,
                          env={**os.environ, "XLA_FLAGS": "", **environment}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """pretend(description): the host library is one that describes itself so; None: there is none."""
    def install(description, why=None):
        folder = tmp_path / "lib"
        folder.mkdir()
        if why:
            (folder / "not-built.txt").write_text(why + "\n")
        path = None
        if description is not None:
            path, source = folder / "libjax_fusednorm_host.so", folder / "library.c"
            source.write_text(description)
            compiler = shutil.which("cc") or shutil.which("g++")
            subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", path, source], check=True)
        monkeypatch.setattr(ffi, "_find", lambda launcher: (folder, path))
        ffi.library.cache_clear()
    yield install
    monkeypatch.undo()
    ffi.library.cache_clear()


def describing(version=jax_fusednorm.__version__, abi=ffi.ABI, minor=0):
    return (f'const char* jax_fusednorm_describe(void) '
            f'{{ return "version={version};abi={abi};ffi={minor};targets=rms_norm"; }}')


BROKEN = {
    "another version": (describing(version="0.0.1"), "is of version 0.0.1 with ABI"),
    "another ABI": (describing(abi=ffi.ABI + 1), f"with ABI {ffi.ABI + 1}, but the Python package is"),
    "newer XLA FFI": (describing(minor=1000), "was built for XLA FFI 0.1000, newer than this jaxlib's"),
    "other sources": (describing(), "was built from other sources of this version"),
    "no stamp": ("int something_else;", "carries no version stamp"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_unusable_library_warns_and_runs_jnp(pretend, what):
    source, complaint = BROKEN[what]
    pretend(source)
    with pytest.warns(UserWarning, match="running jnp instead. To fix it, reinstall"):
        about = ffi.library("host").about
    assert complaint in about
    x = jnp.ones((2, 8))
    assert "custom_call" not in jax.jit(lambda x: jax_fusednorm.rms_norm(x)).lower(x).as_text()
    assert complaint in str(jax_fusednorm.explain(jax_fusednorm.rms_norm, x)["cpu"])
    with pytest.raises(NotImplementedError, match="rms_norm: implementation='host' was asked for, but .*library"):
        jax_fusednorm.rms_norm(x, implementation="host")


def test_a_file_that_is_no_library_warns(pretend, tmp_path, monkeypatch):
    pretend(None)
    path = tmp_path / "libjax_fusednorm_host.so"
    path.write_text("not a library")
    monkeypatch.setattr(ffi, "_find", lambda launcher: (tmp_path, path))
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert not ffi.library("host").targets


def test_a_missing_library_says_why_and_does_not_warn(pretend, recwarn):
    pretend(None, why="there was no compiler")
    assert ffi.library("host").about == "the host kernels are not built: there was no compiler"
    assert jax_fusednorm.rms_norm(jnp.ones((2, 8))).shape == (2, 8)
    assert not [w for w in recwarn if "jax_fusednorm" in str(w.message)]


def test_target_names_carry_the_abi_version(host_kernel):
    text = jax.jit(lambda x: jax_fusednorm.rms_norm(x)).lower(jnp.ones((2, 8))).as_text()
    assert f"jax_fusednorm_host_rms_norm_v{ffi.ABI}" in text


def test_loading_the_library_keeps_denormals(host_kernel):
    program = ("import numpy as np, jax_fusednorm; from jax_fusednorm.core import ffi; assert ffi.library('host').targets; "
               "print(np.float32(1e-40) * np.float32(1) > 0, np.float64(5e-324) / 1 > 0)")
    assert run("-c", program)[0].split() == ["True", "True"]


@pytest.mark.parametrize("level", ["v2", "v3", "v4", "nonsense"])
def test_the_level_can_be_lowered_by_the_environment(host_kernel, level):
    program = ("import jax.numpy as jnp, jax_fusednorm; from jax_fusednorm.core import ffi; print(ffi.library('host').about); "
               "print(float(jax_fusednorm.rms_norm(3 * jnp.ones((2, 100)), implementation='host').sum()))")
    about, total = run("-c", program, JAX_FUSEDNORM_HOST_LEVEL=level)[0].splitlines()
    if level == "v2" and "x86-64" in about:
        assert about.endswith("x86-64-v2")
    assert abs(float(total) - 200) < 1e-3


def test_info_says_what_runs_where(host_kernel):
    out, _ = run("-m", "jax_fusednorm", "info", JAX_FUSEDNORM_IMPLEMENTATION="jnp")
    assert f"jax_fusednorm {jax_fusednorm.__version__}" in out and "default implementation: jnp" in out
    assert "kernels: add_rms_norm, " in out and "asked for by implementation='jnp'" in out


def test_a_wrong_environment_variable_warns_and_means_auto():
    out, err = run("-c", "import jax_fusednorm.core.lowering as l; print(l.requested('op', None))",
                   JAX_FUSEDNORM_IMPLEMENTATION="fast")
    assert out.strip() == "auto" and "JAX_FUSEDNORM_IMPLEMENTATION='fast' is none of" in err


def test_large_results_are_computed_in_parallel_and_whole(host_kernel):
    """More than one chunk, and results large enough for huge pages."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1031, 4099)), jnp.bfloat16)
    for want, got in zip(*(jax.jit(lambda x: jax_fusednorm.add_rms_norm(x, x, implementation=i))(x) for i in ("jnp", "host"))):
        difference = np.abs(np.asarray(want, np.float32) - np.asarray(got, np.float32))
        assert (difference > 0).mean() < 1e-3 and difference.max() < 0.05


def test_without_a_compiler_the_install_is_pure_python(tmp_path):
    pytest.importorskip("scikit_build_core")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
                    "-C", f"build-dir={tmp_path / 'build'}", "-w", tmp_path, ROOT],
                   env={**os.environ, "CXX": "/nonexistent/c++"}, check=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert not list((tmp_path / "site").rglob("*.so"))
    # -S: no editable install of this environment may answer instead
    packages = os.pathsep.join([str(tmp_path / "site"), sysconfig.get_path("purelib")])
    out, _ = run("-S", "-m", "jax_fusednorm", "info", PYTHONPATH=packages)
    assert "the host kernels are not built: there was no C++ compiler when the package was installed" in out
    out, _ = run("-S", "-c", "import jax.numpy as jnp, jax_fusednorm as f; print(f.rms_norm(jnp.ones((2, 4))).sum())",
                 PYTHONPATH=packages)
    assert abs(float(out) - 8) < 1e-4
