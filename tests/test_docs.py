"""The documentation says what is so: its first page's code runs, and the tests that it names exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def test_the_code_of_the_first_page_runs():
    pytest.importorskip("flax")
    found = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.S):
        exec(block, found)  # noqa: S102
    assert found["gradient"].shape == (256,) and found["per_example"].shape == (2, 256)


def test_the_tests_that_a_page_names_exist():
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*.py")}
    known = {*files, *(name for text in files.values() for name in re.findall(r"^ *def (test_\w+)", text, re.M))}
    named = {(page.name, name) for page in PAGES for name in re.findall(r"`(?:tests/)?(test_\w+(?:\.py)?)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 40 and not [each for each in sorted(named) if each[1] not in known]
