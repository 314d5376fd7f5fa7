"""What type checkers make of the public API: the programs in tests/typed are right, or wrong in every call, to mypy and to pyright, both strict."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TYPED = ROOT / "tests" / "typed"


def mypy(names, folder):
    """{name: the lines that are refused}"""
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-pretty", "--cache-dir", str(ROOT / "build" / "mypy"),
         *(str(TYPED / name) for name in names)], cwd=folder, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    return lines_of(names, ((path, int(line)) for path, line in re.findall(r"^(.+?):(\d+): error:", done.stdout, re.M)), done.stdout)


def pyright(names, folder):
    """The same. Based on pyright, and with a Node.js of its own: nothing is fetched."""
    pytest.importorskip("basedpyright")
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": "strict", "include": [str(TYPED / name) for name in names], "extraPaths": [str(ROOT)]}))
    done = subprocess.run([sys.executable, "-m", "basedpyright", "--project", str(config), "--pythonpath", sys.executable, "--outputjson"],
                          cwd=folder, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(names), done.stdout
    errors = [d for d in found["generalDiagnostics"] if d["severity"] == "error"]
    return lines_of(names, ((d["file"], d["range"]["start"]["line"] + 1) for d in errors), done.stdout)


def lines_of(names, errors, said):
    print(said)  # seen where the test fails
    found = {name: set() for name in names}
    for path, line in errors:
        found[pathlib.Path(path).name].add(line)
    return found


def calls_of(name):
    """The lines of a program after its last definition, of which each is a statement."""
    body = ast.parse((TYPED / name).read_text()).body
    start = max(i for i, node in enumerate(body) if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Attribute))
    return {node.lineno for node in body[start + 1:]}


def check(checker, right, wrong, folder):
    refused = checker([right, wrong], folder)
    assert refused[right] == set()
    assert refused[wrong] == calls_of(wrong)


@pytest.mark.parametrize("checker", (mypy, pytest.param(pyright, marks=pytest.mark.slow)))
def test_calls_are_typed_and_wrong_ones_are_refused(checker, tmp_path):
    check(checker, "right.py", "wrong.py", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("checker", (mypy, pyright))
def test_modules_are_typed_and_wrong_options_are_refused(checker, tmp_path):
    check(checker, "right_flax.py", "wrong_flax.py", tmp_path)
