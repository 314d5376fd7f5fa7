"""Every variant of every kernel that a launcher asks Metal for, one list for whatever compiles them ahead.

    python metal_src/msl_variants.py DIR   writes a .metal file for each text: the text, and a line for each of its variants

metal_src/variants says which template arguments exist, and the host library of the installed package has them all; launch/shape.h says which
shapes follow them.
"""

import ctypes
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import embed

STORAGE = ("float", "bfloat", "half")
ARGUMENTS = ("false", "true", *STORAGE, "ones", "halves", "adjacent", "apart")  # launch.h's
INSTANTIATION = re.compile(r'^template \[\[host_name\("\w+"\)\]\] \[\[kernel\]\] decltype\((.+)\) \1;\n', re.M)


def variants(host_library, kernel):
    """The template arguments of every variant there is, before the shape's."""
    text = next(text for text in map(embed.assemble, embed.FILES) if kernel in embed.kernels(text))
    declared = re.search(rf"template <([^>]*)>\s*kernel void {kernel}\(", text)[1].split(",")
    return [tuple(ARGUMENTS[code] for code in codes) for codes in itertools.product(range(len(ARGUMENTS)), repeat=len(declared) - 4)
            if host_library.jax_fusednorm_run_host_kernel(kernel.encode(), (ctypes.c_ubyte * 8)(*codes), b"v2", None, None, 0)]


@functools.cache
def shapes():
    """{(storage, whether of rows and not of heads): [(V, R, SG, TEAMS), ...]}"""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "shapes")
        subprocess.run([*os.environ.get("CXX", "c++").split(), "-std=c++17", "-I", embed.ROOT, embed.ROOT / "variants/shapes.cc", "-o", program],
                       check=True)
        for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
            size, of_rows, *shape = map(int, line.split())
            for storage in (STORAGE[:1] if size == 4 else STORAGE[1:]):
                found.setdefault((storage, bool(of_rows)), {})[tuple(shape)] = None
    return {key: list(unique) for key, unique in found.items()}


def with_shapes(kernel, arguments):
    """Instantiations: each variant with every shape that fits it."""
    for variant in arguments:
        fitting = (s for s in shapes()[variant[0], "rope" not in kernel] if _fits(variant, s))
        yield from (f"{kernel}<{', '.join([*variant, *map(str, shape)])}>" for shape in fitting)


def _fits(variant, shape):
    """Whether a pack, or a thread's packs, hold whole pairs."""
    v, r, *_ = shape
    return not ("adjacent" in variant and v % 2) and not ("halves" in variant and (r == 0 or r % 2))


def instantiations(host_library, text):
    """Of every kernel of a text."""
    for kernel in embed.kernels(text):
        there = variants(host_library, kernel)
        there += [tuple("halves" if word == "apart" else word for word in v) for v in there if "apart" in v]  # GPUs tell these apart
        yield from with_shapes(kernel, there)


def lines(names):
    """As the launcher has them."""
    return "".join(f'template [[host_name("{re.sub("[^a-zA-Z0-9]", "_", name)}")]] [[kernel]] decltype({name}) {name};\n' for name in names)


def parted(text):
    """(the text without its lines of instantiations, their names)"""
    return INSTANTIATION.sub("", text), INSTANTIATION.findall(text)


def texts(host_library):
    """{name: every kernel file's text, with its variants}"""
    return {path.stem: (text := embed.assemble(path)) + lines(instantiations(host_library, text)) for path in embed.FILES}


def counted(texts):
    return f"{len(texts)} texts, {sum(len(parted(text)[1]) for text in texts)} variants"


def installed():
    """The host library of the package."""
    from jax_fusednorm.core import ffi

    return ffi.library("host").handle


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    written = texts(installed())
    for name, text in written.items():
        (folder / f"{name}.metal").write_text(text, encoding="utf-8")
    print(counted(written.values()))
