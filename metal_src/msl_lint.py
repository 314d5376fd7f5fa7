"""What Apple's compiler or the subset of MSL that the kernels keep to refuses, and a C++ compiler lets through.

    python metal_src/msl_lint.py                                  every kernel, with every variant that is asked for (msl_variants.py)
    python metal_src/msl_lint.py metal_src/kernels/rms_norm.metal  one text

Its tokens are read as MSL reads them (msl_tokens.py). Then two strict compiles, as C++ for OpenCL, which knows address spaces, and as plain
C++14; and a walk over the syntax tree of the first. The compiler is ziglang's clang, wherever this runs.
"""

import json
import pathlib
import re
import subprocess
import sys

import ziglang

import embed
import msl_tokens
import msl_variants
import msl_words

CLANG = [str(pathlib.Path(ziglang.__file__).with_name("zig")), "clang"]
BOTH = ["-fsyntax-only", "-Werror", "-Wno-unknown-attributes", "-Wno-unknown-pragmas", "-D__METAL_VERSION__=310",
        "-I", str(embed.ROOT / "compat/include"), "-include", str(embed.ROOT / "compat/opencl.h"), "-"]
OPENCL = ["-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "spir64", "-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64",
          "-Wpre-c++17-compat", *BOTH]
CPP14 = ["-x", "c++", "-std=c++14", "-pedantic-errors", "-nostdinc", *BOTH]

CASTS = ("CXXReinterpretCastExpr", "CXXStaticCastExpr", "CStyleCastExpr", "CXXFunctionalCastExpr")
TYPED = ("ParmVarDecl", "VarDecl", "FieldDecl", "TypedefDecl", "TypeAliasDecl", *CASTS)
FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl")
SCOPES = ("TranslationUnitDecl", "FunctionTemplateDecl", "ClassTemplateDecl", "EnumDecl")  # what is declared in one of these is so at program scope

TAIL = [("threadgroup float*", "SCRATCH"), ("uint", "threadgroup_position_in_grid"), ("uint", "thread_index_in_simdgroup"),
        ("uint", "simdgroup_index_in_threadgroup")]


def lint(text):
    """What is wrong, as "file:line: what"; an empty list if nothing is. text: as embed.assemble makes it, and maybe lines of instantiations."""
    text, names = msl_variants.parted(text)
    lines, marks = _numbered(text)
    source = "".join(lines)
    found = {*msl_tokens.complaints(source), *_kernel_signatures(source), *_compiled(CPP14, source, names)[0]}
    few = list(_covering(names))
    refused, tree = _compiled([*OPENCL, "-Xclang", "-ast-dump=json"], source, few)
    if not refused and few:
        refused = _compiled(OPENCL, source, _with_one_shape(names))[0]
    found.update(refused)
    if not refused:
        walk = _Walk()
        walk.visit(json.loads(tree), [])
        found |= {*walk.found, *walk.recursions()}
    return [f"{marks(line)}: {what}" for line, what in sorted(found)]


def _compiled(flags, source, names):
    """(clang's errors, what it prints)"""
    done = subprocess.run([*CLANG, *flags], input=source + "".join(f"template decltype({name}) {name};\n" for name in names), capture_output=True,
                          text=True, check=False)
    errors = [(int(line), what) for line, what in re.findall(r"^<stdin>:(\d+):\d+: (?:fatal )?error: (.*)", done.stderr, re.M)]
    return errors or ([(1, done.stderr)] if done.returncode else []), done.stdout


def _with_one_shape(names):
    """An address space, or a type, depends on no number: nor does the language, but for the size of an array, which plain C++14 looks at."""
    return {re.sub(r"\b\d+\b", "", name): name for name in names}.values()


def _covering(names):
    """A few instantiations in which every type and option of a kernel is met: whatever it calls is called by one of them."""
    met = set()
    for name in names:
        kernel, arguments = name[:-1].split("<")
        new = {(kernel, *each) for each in enumerate(arguments.split(", ")) if not each[1].isdigit()} - met
        if new:
            met |= new
            yield name


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

    def __init__(self):
        self.found, self.file, self.line = [], "", 0
        self.first, self.names, self.calls = {}, {}, {}  # by id: a function's first declaration, its line and name, and whom it calls

    def visit(self, node, above, implicit=False):
        """above: the nodes around it."""
        implicit = implicit or node.get("isImplicit")  # the compiler's own: a copy constructor, and its parameters
        self.move(node.get("loc", {}))
        line, ours = self.line, self.file == "<stdin>"
        self.move(node.get("range", {}))
        if ours and not implicit:
            self.found += [(line, what) for what in self.rules(node, above)]
            self.called(node, above, line)
        for child in node.get("inner", ()):
            self.visit(child, [*above, node], implicit)

    def move(self, location):
        self.file = location.get("file", self.file)
        self.line = location.get("line", self.line)
        for part in location.values():
            if isinstance(part, dict):
                self.move(part)

    def rules(self, node, above):
        kind, name = node.get("kind", ""), {"Half": "half"}.get(node.get("name"), node.get("name", ""))
        spelled = node.get("type", {}).get("qualType", "")
        function = any(each.get("kind") in FUNCTIONS for each in above)
        if kind.endswith("Decl") and msl_words.reserved(name):
            yield f"`{name}` is a word of MSL or of its library, and here a name"
        if kind.endswith("Decl") and msl_words.in_library(name) and all(each["kind"] in SCOPES for each in above) and not _takes_ours(node):
            yield f"`{name}` is a name of metal_stdlib: with `using namespace metal`, one like it is ambiguous"
        if kind == "LambdaExpr":
            yield "a lambda, which MSL has from 3.2 on"
        declared = spelled if kind in TYPED else spelled.split("(")[0] if kind in FUNCTIONS else ""
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
        if kind == "FieldDecl" and node.get("isBitfield"):
            yield f"`{name}`: a bit-field"
        if kind in FUNCTIONS and not node.get("inline"):
            yield f"`{name}`: functions and methods are declared `inline`"
        if node.get("castKind") in ("IntegralToPointer", "PointerToIntegral"):
            yield "a pointer made from an integer, or the other way round"
        member = node["inner"][0] if kind == "CXXMemberCallExpr" else {"name": "operator"}
        if not member.get("name", "").startswith("operator") and re.search("__(global|local|constant)", json.dumps(member)):  # which is the shim's
            yield "a method is called on what is not a local"

    def called(self, node, above, line):
        if node.get("kind") in (*FUNCTIONS, "FunctionTemplateDecl"):
            self.first[node["id"]] = self.first.get(node.get("previousDecl"), node["id"])
            self.names[node["id"]] = line, node.get("name", "")
        within = [each["id"] for each in above if each.get("kind") in (*FUNCTIONS, "FunctionTemplateDecl")]
        callees = [d.get("id") for d in (node.get("referencedDecl", {}), *node.get("lookups", ()))] + [node.get("referencedMemberDecl")]
        for caller in within:
            self.calls.setdefault(caller, set()).update(callees)

    def recursions(self):
        """Whoever calls itself, at once or through others."""
        calls = {}
        for caller, callees in self.calls.items():
            calls.setdefault(self.first[caller], set()).update(self.first[c] for c in callees if c in self.first)
        for function in calls:
            reached, new = set(), {function}
            while new := {c for each in new for c in calls.get(each, ())} - reached:
                reached |= new
            if function in reached:
                line, name = self.names[function]
                yield line, f"`{name}`: recursion"


def _takes_ours(node):
    """Whether a function, or a template of one, has a parameter of a type of ours, or a pointer: metal_stdlib's functions take none."""
    if node["kind"] == "FunctionTemplateDecl":
        types = {each["name"] for each in node["inner"] if each["kind"] == "TemplateTypeParmDecl" and "name" in each}
        return any(_takes_ours(each) if not types else _has_ours(each, types) for each in node["inner"] if each["kind"] == "FunctionDecl")
    return node["kind"] == "FunctionDecl" and _has_ours(node, set())


def _has_ours(function, types):
    scalars = {*msl_words.USED, *msl_words.KEYWORDS, "Half", *types}
    given = [each["type"]["qualType"] for each in function.get("inner", ()) if each["kind"] == "ParmVarDecl"]
    return any("*" in each or not set(re.findall(r"\w+", re.sub("__(global|local|constant|private)", "", each))) <= scalars for each in given)


def _kernel_signatures(source):
    """The order of parameters that every target relies on."""
    kernels = list(re.finditer(r"\bkernel\s+(\w+)\s+(\w+)\s*\(([^{;]*?)\)\s*\{", source))
    for found in kernels:
        line = source.count("\n", 0, found.start(2)) + 1
        if found[1] != "void":
            yield line, f"kernel `{found[2]}` must return void"
        if found[2] not in embed.kernels(source):
            yield line, f"`kernel void {found[2]}(` must begin a line: so it is found"
        if [each[2] for each in kernels].count(found[2]) > 1:
            yield line, f"kernel `{found[2]}` is there twice"
        parameters = re.findall(r"\s*([^,]*?)\s*\w+\s*\[\[(.*?)\]\]\s*,?", found[3])
        buffers = [f"buffer({i})" for i in range(len(parameters) - len(TAIL))]
        types = [type_ for type_, _ in parameters[:len(buffers)]]
        shaped = [re.fullmatch(r"device (const )?\w+\*", t) for t in types[:-1]] + [re.fullmatch(r"constant \w+&", t) for t in types[-1:]]
        if [a for _, a in parameters[:len(buffers)]] != buffers or not all(shaped) or not 0 < len(buffers) <= 31 or parameters[len(buffers):] != TAIL:
            yield line, (f"kernel `{found[2]}` must take device pointers [[buffer(0)]], ..., its params as the last buffer, and "
                         "scratch, group, lane, simdgroup")


if __name__ == "__main__":
    checked = ({path: embed.assemble(pathlib.Path(path)) for path in sys.argv[1:]} or msl_variants.texts(msl_variants.installed()))
    complaints = [c for text in checked.values() for c in lint(text)]
    print("\n".join(complaints) or f"{msl_variants.counted(checked.values())}: nothing to complain of")
    sys.exit(bool(complaints))
