"""What Apple's compiler or the subset of MSL that the kernels keep to refuses, and a C++ compiler lets through.

    python metal_src/msl_lint.py metal_src/kernels/*.metal

A strict compile in clang's C++ for OpenCL mode, which knows address spaces; then a walk over its syntax tree, and a look at the text.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import embed

CLANG = next(filter(None, map(shutil.which, ("clang", *(f"clang-{version}" for version in range(25, 13, -1))))), None)
FLAGS = ["-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64", "-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64",
         "-fsyntax-only", "-Werror", "-Wpre-c++17-compat", "-Wno-unknown-attributes", "-Wno-unknown-pragmas",
         "-I", str(embed.ROOT / "compat/include"), "-include", str(embed.ROOT / "compat/opencl.h"), "-"]

NODES = {"LambdaExpr": "a lambda, which MSL has from 3.2 on", "GotoStmt": "goto", "CXXConstCastExpr": "const_cast", "GCCAsmStmt": "asm"}
CASTS = ("CXXReinterpretCastExpr", "CXXStaticCastExpr", "CStyleCastExpr", "CXXFunctionalCastExpr")
DECLARED = ("ParmVarDecl", "VarDecl", "FieldDecl", "TypedefDecl", "TypeAliasDecl", *CASTS)
FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl")

TAIL = [("threadgroup float*", "SCRATCH"), ("uint", "threadgroup_position_in_grid"), ("uint", "thread_index_in_simdgroup"),
        ("uint", "simdgroup_index_in_threadgroup")]


def lint(text, instantiations=()):
    """What is wrong, as "file:line: what"; an empty list if nothing is. text: as embed.assemble makes it."""
    lines, marks = _numbered(text)
    source = "".join(lines)
    checked = subprocess.run([CLANG, *FLAGS], input=source + "".join(f"template decltype({k}) {k};\n" for k in instantiations),
                             capture_output=True, text=True, check=False)
    found = [f"{marks(int(line))}: {what}" for line, what in re.findall(r"^<stdin>:(\d+):\d+: error: (.*)", checked.stderr, re.M)]
    if checked.returncode:
        return found or [checked.stderr]
    tree = subprocess.run([CLANG, "-Xclang", "-ast-dump=json", *FLAGS], input=source, capture_output=True, text=True, check=True)
    walk = _Walk(embed.kernels(text))
    walk.visit(json.loads(tree.stdout), None)
    return [f"{marks(line)}: {what}" for line, what in sorted({*walk.found, *_kernel_signatures(source)})]


def _numbered(text):
    """The lines without #line marks, and a function from their numbers to file:line."""
    lines, places, file, number = [], [], "?", 0
    for line in text.splitlines(keepends=True):
        mark = re.match(r'#line (\d+) "(.+)"', line)
        if mark:
            number, file = int(mark[1]) - 1, mark[2]
        else:
            number += 1
            lines.append(line)
            places.append(f"{file}:{number}")
    return lines, lambda line: places[line - 1] if line <= len(places) else "instantiations"


class _Walk:
    """Over clang's JSON, in which a location is given as far as it differs from the one before."""

    def __init__(self, kernels):
        self.kernels, self.found, self.file, self.line = kernels, [], "", 0

    def visit(self, node, function, implicit=False):
        implicit = implicit or node.get("isImplicit")  # the compiler's own: a copy constructor, and its parameters
        self.move(node.get("loc", {}))
        line, ours = self.line, self.file == "<stdin>"
        self.move(node.get("range", {}))
        if ours and not implicit:
            self.found += [(line, what) for what in self.rules(node, function)]
        if node.get("kind") in FUNCTIONS:
            function = node
        for child in node.get("inner", ()):
            self.visit(child, function, implicit)

    def move(self, location):
        self.file = location.get("file", self.file)
        self.line = location.get("line", self.line)
        for part in location.values():
            if isinstance(part, dict):
                self.move(part)

    def rules(self, node, function):
        kind, name = node.get("kind", ""), node.get("name", "")
        spelled = node.get("type", {}).get("qualType", "")
        if kind in NODES:
            yield NODES[kind]
        declared = spelled if kind in DECLARED else spelled.split("(")[0] if kind in FUNCTIONS else ""
        declared = re.sub(r"\[.*?\]", "", declared)
        if "__generic" in declared or re.match(r"((?!__(global|local|constant|private)\b)[^*&])*[*&]", declared):
            yield f"`{name or spelled}`: a pointer or reference needs an address space"
        if "long long" in spelled:
            yield f"`{name}`: long long"
        if kind == "VarDecl" and function and node.get("storageClass") == "static":
            yield f"`{name}`: a static local"
        if kind == "VarDecl" and not function and "__constant" not in spelled:
            yield f"`{name}`: data of program scope must be `constant`"
        if kind == "CXXRecordDecl" and node.get("bases"):
            yield f"`{name}`: a derived struct"
        if kind == "CXXRecordDecl" and node.get("tagUsed") == "union":
            yield f"`{name}`: a union"
        if kind in FUNCTIONS and not node.get("inline") and name not in self.kernels:
            yield f"`{name}`: functions and methods are declared `inline`"
        if kind in ("DeclRefExpr", "UnresolvedLookupExpr") and function:
            if function["name"] in [d.get("name") for d in (node.get("referencedDecl", {}), *node.get("lookups", ()))]:
                yield f"`{function['name']}`: recursion"
        if kind == "CXXMemberCallExpr" and re.search("__(global|local|constant)", json.dumps(node["inner"][0])):
            yield "a method is called on what is not a local"


def _kernel_signatures(source):
    """The order of parameters that every target relies on."""
    for found in re.finditer(r"\bkernel\s+(\w+)\s+(\w+)\s*\(([^{;]*?)\)\s*\{", source):
        line = source.count("\n", 0, found.start(2)) + 1
        if found[1] != "void":
            yield line, f"kernel `{found[2]}` must return void"
        parameters = re.findall(r"\s*([^,]*?)\s*\w+\s*\[\[(.*?)\]\]\s*,?", found[3])
        buffers = [f"buffer({i})" for i in range(len(parameters) - len(TAIL))]
        types = [type_ for type_, _ in parameters[:len(buffers)]]
        shaped = [re.fullmatch(r"device (const )?\w+\*", t) for t in types[:-1]] + [re.fullmatch(r"constant \w+&", t) for t in types[-1:]]
        if [a for _, a in parameters[:len(buffers)]] != buffers or not all(shaped) or not buffers or parameters[len(buffers):] != TAIL:
            yield line, (f"kernel `{found[2]}` must take device pointers [[buffer(0)]], ..., its params as the last buffer, and "
                         "scratch, group, lane, simdgroup")
    if source.count("#pragma METAL fp math_mode(safe)") != 1:
        yield 1, "the text must say `#pragma METAL fp math_mode(safe)` once"


if __name__ == "__main__":
    complaints = [c for path in sys.argv[1:] for c in lint(embed.assemble(pathlib.Path(path)))]
    print("\n".join(complaints) or "nothing to complain of")
    sys.exit(bool(complaints))
