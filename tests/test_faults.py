"""The planted faults of tests/faults: each still fits the sources, and (--faults, or `make faults`) the tests that it names fail with it."""

import fnmatch
import functools
import os
import re
import shlex
import subprocess

import pytest

import faulted

FAULTS = faulted.every()
AREAS = ("apple", "cuda", "kernels", "python")


@functools.cache
def _all_tests():
    return "".join(path.read_text() for path in (faulted.ROOT / "tests").glob("*.*"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_patch_fits(fault):
    assert fault.name.split("-")[0] in AREAS and fault.sentence.endswith(".") and fault.build in faulted.BUILDS
    assert fault.edits and all(text is None or text != (faulted.ROOT / name).read_text() for name, text in fault.applied(faulted.ROOT).items()
                               if (faulted.ROOT / name).exists())
    words = shlex.split(fault.run)
    files = [word for word in words if word.startswith("tests/")]
    assert files, "which tests fail?"
    for file in files:
        path, *names = file.split("::")
        text = (faulted.ROOT / path).read_text()
        assert all(re.search(rf"\b{re.escape(name.split('[')[0])}\b", text) for name in names), file
    if "-k" in words:
        first = re.search(r"\w+", words[words.index("-k") + 1])[0]
        assert first == "not" or first in _all_tests() or first.replace("_", " ") in _all_tests(), f"what has {first} in its name?"


def test_a_patch_that_fits_no_more_is_an_error(tmp_path):
    patch = tmp_path / "python-x.patch"
    patch.write_text("What.\nrun: tests/test_x.py\n\n--- a/README.md\n+++ b/README.md\n@@ -1,2 +1,1 @@\n-no such line\n+another\n")
    with pytest.raises(faulted.Stale, match="README.md has no such lines any more"):
        faulted.read(patch).applied(faulted.ROOT)


def test_a_copy_imports_its_own_package_and_library(tmp_path):
    tree = faulted.Tree(tmp_path)
    package = tree.root / "jax_fusednorm"
    init = package / "__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', '__version__ = "planted"', init.read_text()))
    (package / "lib").mkdir()
    (package / "lib" / "libjax_fusednorm_host.so").touch()
    program = "import jax_fusednorm as f; from jax_fusednorm.core import ffi; print(f.__version__, f.__file__, ffi._find('host')[1])"
    done = subprocess.run([tree.python, "-c", program], cwd=os.sep, env=tree.environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["planted", str(init), str(package / "lib" / "libjax_fusednorm_host.so")]


@pytest.fixture(scope="session")
def tree(worker_id):
    return faulted.Tree(faulted.ROOT / "build" / "faults" / worker_id)


@pytest.fixture(scope="session")
def worker_id(request):
    return getattr(request.config, "workerinput", {}).get("workerid", "master")


@pytest.mark.faults
@pytest.mark.parametrize("fault", [f for f in FAULTS if any(fnmatch.fnmatch(f.name, p) for p in os.environ.get("FAULTS", "*").split())],
                         ids=lambda fault: fault.name)
def test_the_fault_is_caught(fault, tree):
    tree.catches(fault)
