"""docs/new-op.md's op is added as the page says, to a copy of the sources without the other kernels, builds, and passes its own tests."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(folder, *command, **environment):
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", ["host", pytest.param("metal", marks=pytest.mark.slow)])
def test_the_new_op_builds_and_passes_its_tests(launcher, tmp_path):
    pytest.importorskip("scikit_build_core")  # the package was built here
    kernels = [path.stem for path in (ROOT / "metal_src" / "kernels").glob("*.metal")]
    others = [*(f"{name}.metal" for name in kernels), *(f"{name}.h" for name in kernels),
              *(path.name for path in (ROOT / "metal_src" / "ffi").glob("*.cc") if path.name != "library.cc")]
    shutil.copytree(ROOT / "metal_src", tmp_path / "metal_src", ignore=shutil.ignore_patterns(*others))
    shutil.copytree(ROOT / "jax_fusednorm", tmp_path / "jax_fusednorm", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    shutil.copytree(ROOT / "docs" / "new_op", tmp_path, dirs_exist_ok=True)

    run(tmp_path, "cmake", "-G", "Ninja", "-S", "metal_src", "-B", "build", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DJAX_FUSEDNORM_METAL={'ON' if launcher == 'metal' else 'OFF'}")
    run(tmp_path, "cmake", "--build", "build", "-j", "2", "--target", f"jax_fusednorm_{launcher}")
    library = tmp_path / "jax_fusednorm" / "lib"
    library.mkdir()
    shutil.copy(next(tmp_path.glob(f"build/libjax_fusednorm_{launcher}.*")), library)
    driver = ""
    if launcher == "metal" and sys.platform == "linux":
        shutil.copy(ROOT / "Makefile", tmp_path)
        driver = run(tmp_path, "make", "-s", "standin", f"PYTHON={sys.executable}").strip()

    # -S: no editable install of this environment may answer instead
    passed = run(tmp_path, sys.executable, "-S", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "tests",
                 PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]), JAX_FUSEDNORM_METAL_DRIVER=driver, L2_NORM_ON=launcher)
    assert "9 passed" in passed and "skipped" not in passed
