"""Every kernel text passes the language check with every variant that Metal is ever asked for; and the files of these are what a Mac compiles."""

import pathlib
import re
import shutil
import subprocess
import sys

import embed
import metal_calls
import msl_lint
import msl_variants
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
COMMAND = "metal_src/msl_variants.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("msl")
    done = subprocess.run([sys.executable, ROOT / COMMAND, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts = {path.stem: path.read_text("utf-8") for path in folder.iterdir()}
    assert done.stdout == msl_variants.counted(texts.values()) + "\n"
    return texts


@pytest.mark.parametrize("path", embed.FILES, ids=lambda path: path.stem)
def test_every_variant_passes(written, host_library, path, record_property):
    text, names = msl_variants.parted(written[path.stem])
    assert text == embed.assemble(path)
    for kernel in embed.kernels(text):
        asked = [name[:-1].split("<") for name in names if name.startswith(f"{kernel}<")]
        # no GPU's shape of 4-byte elements has pairs in one pack, and where a thread has whole pairs GPUs tell them from others
        there = {v for v in metal_calls.variants(host_library, kernel) if v[:1] + v[-1:] != ("float", "adjacent")}
        met = {tuple(arguments.split(", "))[:-4] for _, arguments in asked}
        assert there and {tuple(word.replace("halves", "apart") for word in variant) for variant in met} == there
    assert msl_lint.lint(written[path.stem]) == []
    record_property("checked by msl_lint", len(names))


def test_each_variant_has_every_shape_that_a_launcher_gives_it(written, standin):
    for dtype, t in metal_calls.DTYPES.items():
        size = np.dtype(t).itemsize
        assert set(msl_variants.shapes()[dtype, True]) == set(metal_calls.widths_of_shapes(standin, size))
        assert set(msl_variants.shapes()[dtype, False]) == {standin.shape(width, size, head=True) for width in range(1, 600)}
    names = {name for text in written.values() for name in msl_variants.parted(text)[1]}
    for kernel in metal_calls.KERNELS:
        for dtype in metal_calls.DTYPES:
            shapes = {name.split("<")[1][:-1].split(", ", 1)[1] for name in names if name.startswith(f"{kernel}<{dtype}, ")}
            for shape in msl_variants.shapes()[dtype, True]:
                assert any(each.endswith(", ".join(map(str, shape))) for each in shapes)
    assert "head_rms_norm_rope<half, true, true, halves, 8, 2, 1, 2>" in names
    assert "head_rms_norm_rope<half, true, true, adjacent, 1, 0, 1, 2>" not in names  # no pack of one element holds a pair


def test_names_are_unique(written):
    assert set(written) == {path.stem for path in embed.FILES}
    functions = [name for text in written.values() for name in re.findall(r'host_name\("(.*?)"\)', text)]
    assert len(functions) == len(set(functions)) == sum(len(msl_variants.parted(text)[1]) for text in written.values()) > 1000
    assert all(re.fullmatch(r"\w+", name) for name in functions)


def test_what_a_mac_compiles_is_these(tmp_path):
    """The workflow has the command's files compiled, as the launcher has them, before it runs anything."""
    steps = (ROOT / ".github/workflows/tests.yml").read_text("utf-8").partition("  macos:")[2]
    at = [steps.index(each) for each in (f"python {COMMAND} build/msl", "for text in build/msl/*.metal", "jax_fusednorm selftest")]
    assert at == sorted(at)
    [compiled] = re.findall(r"xcrun .*metal -std=.*", steps)
    for option in ("-std=metal3.1", "-fno-fast-math", "-Werror", '-c "$text"', "|| exit 1"):
        assert option in compiled


def test_the_new_op_of_the_docs(tmp_path):
    shutil.copytree(ROOT / "metal_src/kernels", tmp_path, dirs_exist_ok=True)
    text = embed.assemble(pathlib.Path(shutil.copy(ROOT / "docs/new_op/metal_src/kernels/l2_norm.metal", tmp_path)))
    names = list(msl_variants.with_shapes("l2_norm", [(storage,) for storage in msl_variants.STORAGE]))
    assert len(names) > 20 and msl_lint.lint(text + msl_variants.lines(names)) == []


def test_the_command(tmp_path):
    path = shutil.copytree(ROOT / "metal_src/kernels", tmp_path / "kernels") / "rms_norm.metal"

    def checked():
        return subprocess.run([sys.executable, ROOT / "metal_src/msl_lint.py", path], capture_output=True, text=True, check=False)

    done = checked()
    assert (done.returncode, done.stdout) == (0, "1 texts, 0 variants: nothing to complain of\n")
    path.write_text(path.read_text("utf-8").replace("const float offset", "const float half").replace(", offset)", ", half)"), "utf-8")
    done = checked()
    assert done.returncode == 1 and re.fullmatch(r"rms_norm\.metal:\d+: `half` is a word of MSL or of its library, and here a name\n", done.stdout)
