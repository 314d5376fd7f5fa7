"""The text that a GPU's compiler gets, assembled in one way for the launchers, the stand-in driver and the checks.

    python embed.py HEADER [cuda]    writes every kernel's text, for Metal or for CUDA, into a C header: kernel_texts[], pairs of
                                     (kernel, text), a null one at the end

A text is compat/metal.h, or compat/cuda.h, and one file of kernels/, in which each #include "..." of ours stands replaced by that file, once.
#line marks keep the names and lines of the files, so that a compiler's message says where to look. `#include <metal_stdlib>` stays.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent
FILES = sorted((ROOT / "kernels").glob("*.metal"))
INCLUDE = re.compile(r'#include "(.+)"')
KERNEL = re.compile(r"^kernel void (\w+)\(", re.M)


def assemble(path, compiler="metal"):
    """The whole text of one kernel file."""
    seen = set()
    return "".join(line for part in (ROOT / "compat" / f"{compiler}.h", path) for line in _inlined(part, seen))


def _inlined(path, seen):
    seen.add(path.name)
    yield f'#line 1 "{path.name}"\n'
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        include = INCLUDE.match(line)
        if line == "#pragma once":
            yield "\n"
        elif not include:
            yield line + "\n"
        elif include[1] not in seen:
            yield from _inlined(path.parent / include[1], seen)
            yield f'#line {number + 1} "{path.name}"\n'
        else:
            yield "\n"


def kernels(text):
    """The names of the kernels that a text defines."""
    return KERNEL.findall(text)


def header(compiler="metal"):
    parts = ["// Made by embed.py. The text of every kernel, as its compiler gets it.\n"]
    rows = []
    for path in FILES:
        text = assemble(path, compiler)
        lines = (line.replace("\\", "\\\\").replace('"', '\\"') for line in text.splitlines())
        parts.append(f"static const char text_{path.stem}[] =\n" + "\n".join(f'    "{line}\\n"' for line in lines) + ";\n")
        rows += [f'    {{"{kernel}", text_{path.stem}}},\n' for kernel in kernels(text)]
    struct = "static const struct {\n  const char* kernel;\n  const char* text;\n} kernel_texts[] = {\n"
    return "".join([*parts, struct, *rows, "    {0, 0}};\n"])


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(header(*sys.argv[2:]), encoding="utf-8")
