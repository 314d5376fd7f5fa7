"""A kernel text as the preprocessor reads it: the rules that need no grammar. Branches for other targets keep to them too."""

import re

import embed
import msl_words

TOKEN = re.compile(r"""(?P<comment>//[^\n]*|/\*.*?\*/) | (?P<string>"[^"\n]*") | (?P<character>'[^'\n]+')
                       | (?P<number>\.?[0-9](?:[eEpP][+-]|[\w.'])*)
                       | (?P<name>[A-Za-z_]\w*) | (?P<space>[ \t\n]+) | (?P<sign>\#\#|::|[-+*/%&|^~!=<>?:;,.(){}\[\]\#]) | (?P<other>.)""", re.S | re.X)
# Metal has the pragma from 3.2 on, and the launcher compiles as 3.1: there the compile options say it.
MATH = ["if __METAL_VERSION__ >= 320", "pragma METAL fp math_mode(safe)", "endif"]
# What may decide between branches: that a target of ours defines it. Anything else Metal's compiler might define, and then see another text.
TARGETS = frozenset(name for path in (embed.ROOT / "compat").glob("*.h") for name in re.findall(r"^#define (\w+)", path.read_text("utf-8"), re.M))


def complaints(source):
    """(line, what is wrong), of a text without #line marks."""
    line, tokens, directives = 1, [], []
    for found in TOKEN.finditer(source + "\n"):
        kind, token = found.lastgroup, found[0]
        if kind not in ("comment", "space"):
            tokens.append((kind, token))
        elif "\n" in token and tokens:
            if tokens[0][1] == "#":
                directives.append((line, " ".join(re.sub(r"//.*", "", source.splitlines()[line - 1]).replace("#", "", 1).split())))
            for what in _rules(tokens):
                yield line, what
            tokens = []
        line += token.count("\n")
    for at, what in _directives(directives):
        yield at, what


def _rules(tokens):
    """Of one line."""
    for (_, before), (kind, token), (_, after) in zip([("", ""), *tokens], tokens, [*tokens[1:], ("", "")]):
        if kind == "name" and token in msl_words.UNUSED_KEYWORDS:
            yield f"`{token}` is not of the subset"
        elif kind == "name" and msl_words.foreign(token):
            yield f"`{token}` is a word of MSL or of its library, and the kernels use no such thing"
        elif kind == "name" and re.match("__|_[A-Z]", token) and token not in ("__METAL_VERSION__", "_Pragma"):
            yield f"`{token}` is the compiler's own"
        elif token == "metal" and (before, after) != ("namespace", ";") and after != "::":
            yield "`metal` is the library's namespace"
        elif token in msl_words.QUALIFIERS and after in (",", ")", ">", "=", ";", "[", "{", ":"):
            yield f"`{token}` says where a type's data lies, and here a name"
        elif token == "##" or token == "#" and before:
            yield "a name or a string that macros put together"
        elif kind == "string" and token != '"unroll"' and ("name", "static_assert") not in tokens:
            yield f"the string {token}"
        elif kind == "other":
            yield f"{token!r} outside of comments"


def _directives(directives):
    texts = [text for _, text in directives]
    math = [i for i in range(len(texts)) if texts[i:i + 3] == MATH]
    if len(math) != 1:
        yield 1, f"#{MATH[1]} must be said once, in #{MATH[0]}"
    for i, (line, text) in enumerate(directives):
        word, _, rest = text.partition(" ")
        if word == "define":
            for name in re.findall(r"\w+", re.match(r"\w+(\([^)]*\))?", rest)[0]):
                if msl_words.reserved(name) or msl_words.in_library(name):
                    yield line, f"`{name}` is a word of MSL or of its library, and here a macro's"
        elif word in ("ifdef", "ifndef"):
            if rest not in TARGETS:
                yield line, f"`{rest}`: no target of ours defines it"
        elif not (text in ("else", "endif", "include <metal_stdlib>") or any(0 <= i - at < 3 for at in math)):
            yield line, f"#{text}"
