"""The wheel for Apple silicon, cross-compiled: what pip and the loader of macOS would find in it. Nothing of it runs here."""

import hashlib
import os
import pathlib
import re
import struct
import subprocess
import sys
import zipfile

import pytest

import embed
from jax_fusednorm.core import ffi

pytest.importorskip("ziglang", reason="the cross-compiler for macOS, ziglang, is not installed")
lief = pytest.importorskip("lief", reason="lief, which reads Mach-O, is not installed")
ROOT = pathlib.Path(__file__).parent.parent
SOURCES = ROOT / "metal_src"
DYLIB, MACOS, WEAK, AD_HOC = 6, 1, 4, 2


def run(*command, **environment):
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(command, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def signed_pages(data, at):
    """(the flags of an embedded signature, whether every page has the hash that it says). macOS ends a process that touches another."""
    _, _, count = struct.unpack_from(">3I", data, at)
    offsets = [struct.unpack_from(">2I", data, at + 12 + 8 * i)[1] for i in range(count)]
    [directory] = [at + o for o in offsets if struct.unpack_from(">I", data, at + o) == (0xFADE0C02,)]
    flags, hashes, _, _, slots, limit, size, _, _, page = struct.unpack_from(">6I4B", data, directory + 12)
    pages = [hashlib.sha256(data[start:min(start + (1 << page), limit)]).digest() for start in range(0, limit, 1 << page)]
    stored = [data[directory + hashes + size * i:directory + hashes + size * (i + 1)] for i in range(slots)]
    return flags, pages == stored and limit == at


def check(launcher, data, *no_paths):
    """One library for macOS 14 on Apple silicon, with the handlers that this machine's has too."""
    library = lief.MachO.parse(list(data)).at(0)
    name = f"libjax_fusednorm_{launcher}.dylib"
    assert library.header.cpu_type == lief.MachO.Header.CPU_TYPE.ARM64 and library.header.file_type.value == DYLIB
    assert library.build_version.platform.value == MACOS and library.build_version.minos[0] == 14
    assert [each.name for each in library.libraries] == [f"@rpath/{name}", "/usr/lib/libSystem.B.dylib"]
    trie = library.dyld_exports_trie if library.has_dyld_exports_trie else library.dyld_info
    exports = {export.symbol.name: export.flags for export in trie.exports}
    handlers = {f"_{ffi.target(launcher, kernel)}" for kernel in ffi.library(launcher).targets}
    ours = {"describe", "poison_outputs", "status", *{"host": ("run_host_kernel", "run_host_teams"), "metal": ("longest_array",)}[launcher]}
    exported = {e for e, flags in exports.items() if not flags & WEAK} - {"__mh_dylib_header", "___dso_handle"}
    assert handlers and exported == handlers | {f"_jax_fusednorm_{each}" for each in ours}
    # the C++ library is linked in; its allocation functions may be replaced by the process's own, as C++ has it
    assert all(e.startswith(("__Zn", "__Zd")) for e, flags in exports.items() if flags & WEAK)
    flags, right = signed_pages(data, library.code_signature.data_offset)
    assert flags & AD_HOC and right
    broken = bytearray(data)
    broken[len(data) // 2] ^= 1
    assert not signed_pages(broken, library.code_signature.data_offset)[1]
    for path in (SOURCES.parent, *no_paths):
        assert str(path).encode() not in data
    if launcher == "metal":
        for framework in (b"Metal.framework/Metal", b"CoreGraphics.framework/CoreGraphics", b"/usr/lib/libobjc.A.dylib"):
            assert framework in data
        for text in map(embed.assemble, embed.FILES):
            assert text.encode() + b"\0" in data  # what Metal's compiler will get


def test_the_metal_launcher_for_macos(tmp_path):
    run("cmake", "-G", "Ninja", "-S", SOURCES, "-B", tmp_path, "--toolchain", "macos.cmake", f"-DPython_EXECUTABLE={sys.executable}")
    run("cmake", "--build", tmp_path, "--target", "jax_fusednorm_metal")
    check("metal", (tmp_path / "libjax_fusednorm_metal.dylib").read_bytes(), tmp_path)


@pytest.mark.slow
def test_the_wheel_for_macos(tmp_path):
    """JAX_FUSEDNORM_MACOS_WHEEL: one that is built already."""
    path = os.environ.get("JAX_FUSEDNORM_MACOS_WHEEL")
    if not path:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT, JAX_FUSEDNORM_MACOS="1")
        [path] = tmp_path.glob("*.whl")
    assert re.fullmatch(r"jax_fusednorm-[0-9.]+-py3-none-macosx_14_0_arm64\.whl", pathlib.Path(path).name)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [about] = [wheel.read(n).decode() for n in names if n.endswith(".dist-info/WHEEL")]
        assert "Root-Is-Purelib: false\n" in about and "Tag: py3-none-macosx_14_0_arm64\n" in about
        assert {pathlib.Path(n).name for n in names if "/lib/" in n} == {"libjax_fusednorm_host.dylib", "libjax_fusednorm_metal.dylib"}
        for source in (ROOT / "jax_fusednorm").rglob("*.py"):
            assert wheel.read(str(source.relative_to(ROOT))) == source.read_bytes()
        for launcher in ("host", "metal"):
            check(launcher, wheel.read(f"jax_fusednorm/lib/libjax_fusednorm_{launcher}.dylib"), tmp_path)
