"""The libraries for Apple silicon, cross-compiled: what the loader of macOS would find in them. Nothing of them runs here."""

import os
import pathlib
import struct
import subprocess
import sys

import pytest

from jax_fusednorm.core import ffi

pytest.importorskip("ziglang", reason="the cross-compiler for macOS, ziglang, is not installed")
SOURCES = pathlib.Path(__file__).parent.parent / "metal_src"
WEAK = 4  # a flag of an export: another library's definition may take its place


class MachO:
    """Of a 64-bit Mach-O library: the machine, what it loads and exports, the oldest macOS it is for, and whether it is signed."""

    def __init__(self, data):
        magic, self.machine, _, self.kind, commands, *_ = struct.unpack_from("<8I", data)
        assert magic == 0xFEEDFACF
        self.loads, self.exports, self.signed, at = [], {}, False, 32
        for _ in range(commands):
            command, size = struct.unpack_from("<2I", data, at)
            body = data[at:at + size]
            if command & 0x7FFFFFFF in (0x0C, 0x18, 0x1F, 0x23):                    # LC_LOAD_DYLIB, weak, reexported, upward
                self.loads.append(body[struct.unpack_from("<I", body, 8)[0]:].rstrip(b"\0").decode())
            elif command == 0x0D:                                                   # LC_ID_DYLIB
                self.name = body[struct.unpack_from("<I", body, 8)[0]:].rstrip(b"\0").decode()
            elif command == 0x32:                                                   # LC_BUILD_VERSION
                self.platform, self.oldest = struct.unpack_from("<2I", body, 8)
            elif command == 0x1D:                                                   # LC_CODE_SIGNATURE
                self.signed = True
            elif command & 0x7FFFFFFF in (0x22, 0x33):                              # LC_DYLD_INFO, LC_DYLD_EXPORTS_TRIE
                start, length = struct.unpack_from("<2I", body, 40 if command & 0x7FFFFFFF == 0x22 else 8)
                self._read_exports(data[start:start + length])
            at += size

    def _read_exports(self, trie, at=0, prefix=""):
        length, at = _number(trie, at)
        if length:
            self.exports[prefix], _ = _number(trie, at)
        at += length
        children, at = trie[at], at + 1
        for _ in range(children):
            end = trie.index(0, at)
            child, after = _number(trie, end + 1)
            self._read_exports(trie, child, prefix + trie[at:end].decode())
            at = after


def _number(data, at):
    """An unsigned LEB128 number, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the cross-compiled Metal launcher."""
    folder = tmp_path_factory.mktemp("macos")
    environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    for command in (["cmake", "-G", "Ninja", "-S", SOURCES, "-B", folder, "--toolchain", "macos.cmake", f"-DPython_EXECUTABLE={sys.executable}"],
                    ["cmake", "--build", folder, "--target", "jax_fusednorm_metal"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_metal_launcher_for_macos(built):
    data = (built / "libjax_fusednorm_metal.dylib").read_bytes()
    library = MachO(data)
    arm64, dynamic_library, macos = 0x0100000C, 6, 1
    assert (library.machine, library.kind, library.platform, library.oldest >> 16, library.signed) == (arm64, dynamic_library, macos, 14, True)
    assert library.name == "@rpath/libjax_fusednorm_metal.dylib"
    assert library.loads == ["/usr/lib/libSystem.B.dylib"]
    handlers = {f"_{ffi.target('metal', kernel)}" for kernel in ffi.library("metal").targets}  # this machine's
    described = {f"_jax_fusednorm_{name}" for name in ("describe", "poison_outputs", "status")}
    exported = {name for name, flags in library.exports.items() if not flags & WEAK} - {"__mh_dylib_header", "___dso_handle"}
    assert handlers and exported == handlers | described
    # the C++ library is linked in; its allocation functions may be replaced by the process's own, as C++ has it
    assert all(name.startswith(("__Zn", "__Zd")) for name, flags in library.exports.items() if flags & WEAK)
    assert str(SOURCES.parent).encode() not in data and str(built).encode() not in data
    for framework in (b"Metal.framework/Metal", b"CoreGraphics.framework/CoreGraphics", b"/usr/lib/libobjc.A.dylib"):
        assert framework in data
