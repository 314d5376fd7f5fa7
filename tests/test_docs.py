"""The documentation says what is so: its first page's code runs, and the tests that it names exist."""

import doctest
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def snippets(page):
    """Its python blocks but for those that show a file, which has tests of its own."""
    return [block for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S) if "--8<--" not in block]


def paste(page):
    """What is defined when all its snippets have run, in their order. A session must print what stands there."""
    found, runner = {}, doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for block in snippets(page):
        if block.startswith(">>>"):
            session = doctest.DocTestParser().get_doctest(block, found, page.name, str(page), 0)
            said = []
            assert not runner.run(session, out=said.append, clear_globs=False).failed, "".join(said)
            found.update(session.globs)
        else:
            exec(block, found)  # noqa: S102
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_snippet_runs_as_pasted(page, host_kernel):
    pytest.importorskip("flax")
    found = paste(page)
    if page.name == "index.md" and page.parent.name == "docs":
        assert found["gradient"].shape == (256,) and found["per_example"].shape == (2, 256)


def test_the_tests_that_a_page_names_exist():
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*.py")}
    known = {*files, *(name for text in files.values() for name in re.findall(r"^ *def (test_\w+)", text, re.M))}
    named = {(page.name, name) for page in PAGES for name in re.findall(r"`(?:tests/)?(test_\w+(?:\.py)?)`", page.read_text(encoding="utf-8"))}
    assert len(named) > 40 and not [each for each in sorted(named) if each[1] not in known]
