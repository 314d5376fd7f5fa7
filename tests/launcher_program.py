"""The Metal launcher's sources and metal_launcher.cc as a program of their own, with no XLA beside them; and runs of it."""

import functools
import os
import pathlib
import re
import shutil
import subprocess

import jax

TESTS = pathlib.Path(__file__).parent
SOURCES = TESTS.parent / "metal_src"
LAUNCHER = SOURCES / "launch" / "metal"


class Built:
    """The program under compiler flags of its own. One of the launcher's sources, or a header that launchers share, may be changed."""

    def __init__(self, folder, standin, *flags):
        self.folder, self.standin = folder, standin
        self.compiler = os.environ.get("CXX", "g++")
        self.flags = ["-g", *flags, "-D_GNU_SOURCE", f"-I{SOURCES}", f"-I{LAUNCHER}", f"-I{pathlib.Path(standin.path).parent}",
                      "-isystem", jax.ffi.include_dir()]
        self.objects = [self.compile(path) for path in (TESTS / "metal_launcher.cc", *sorted(LAUNCHER.glob("*.c*")))]

    def compile(self, path, *first):
        made = self.folder / f"{path.name}.o"
        language = ["-x", "c", "-std=gnu11"] if path.suffix == ".c" else ["-std=c++17"]
        subprocess.run([self.compiler, *language, *first, *self.flags, "-c", path, "-o", made], check=True)
        return made

    def program(self, changed=None):
        """run(*arguments, **environment) -> (exit status, what it printed). changed: (file, old text, new text)."""
        made = list(self.objects)
        if changed:
            name, old, new = changed
            source = SOURCES / "launch" / name if name.endswith(".h") else LAUNCHER / name
            text = source.read_text()
            assert old in text
            path = self.folder / "changed" / source.relative_to(SOURCES)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new))
            name, path = ("launcher.cc", LAUNCHER / "launcher.cc") if name.endswith(".h") else (name, path)
            made[[o.name for o in made].index(f"{name}.o")] = self.compile(path, f"-I{self.folder / 'changed'}")
            shutil.rmtree(self.folder / "changed")
        program = self.folder / "program"
        subprocess.run([self.compiler, *self.flags, *made, "-o", program, "-ldl", "-pthread"], check=True)
        return functools.partial(self.run, program)

    def run(self, program, *arguments, **environment):
        suppressed = self.folder / "suppressed"
        # the stand-in, by whatever name, never frees an object, so that one that is gone is known
        suppressed.write_text("leak:libstandin\nleak:Metal.framework\n")
        environment = {"LSAN_OPTIONS": f"suppressions={suppressed}:print_suppressions=0", "STANDIN": self.standin.path,
                       "JAX_FUSEDNORM_METAL_DRIVER": self.standin.path, "JAX_FUSEDNORM_SELF_CHECK": "300", **environment}
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        # the stand-in's lanes are such functions' work, and AddressSanitizer says once that it may see things
        return done.returncode, re.sub(r".*ASan doesn't fully support makecontext/swapcontext.*\n", "", done.stdout + done.stderr)


def misbehaving(*how):
    return dict(STANDIN_MISBEHAVE=";".join(one if ":" in one else f"{one}:" for one in how))


COPIES, UNCHECKED = misbehaving("nil wrapper"), dict(JAX_FUSEDNORM_SELF_CHECK="0")
ONE = ("call", "rms_norm", 20, 300)  # arrays of two pages
INSTANCE = r"rms_norm<float, ones, false, 4, 2, 2, 1>"

# Runs that end well.
RIGHT = {
    "two dispatches": (("chain",), {}),
    "two dispatches on copies": (("chain",), COPIES),
    "two dispatches on copies of some": (("chain",), misbehaving("region wrapper")),
    "many threads": (("threads", 8, 100), {}),
    "many threads, unchecked": (("threads", 8, 20), UNCHECKED),
    "many threads on copies": (("threads", 8, 100), COPIES),
    "many threads on copies, unchecked": (("threads", 8, 20), {**COPIES, **UNCHECKED}),
    "more threads than buffers are kept": (("threads", 40, 2), {**COPIES, **UNCHECKED}),
    "more bytes than are kept": (("large",), COPIES),
    "a call": (ONE, {}),
    "a call over nothing": (("call", "rms_norm", 0, 300), {}),
    "short wrappers": (ONE, misbehaving("short wrapper")),
    "wrappers without a length": (ONE, misbehaving("nil:length")),
    "wrappers longer than buffers may be": (("call", "rms_norm", 4, 512), {**misbehaving("longest buffer:16384"), **UNCHECKED}),
    "macOS 14": (ONE, misbehaving("macOS 14")),
}

# Runs that end with an error: what the launcher says, and nothing else: a stand-in would complain of what is left behind.
NO_REASON = "and Metal gave no reason"
WRONG = {
    "no such kernel": (("call", "nonsense", 2, 8), {}, r"the Metal library has no kernel nonsense<.*"),
    "no driver": (ONE, dict(JAX_FUSEDNORM_METAL_DRIVER=""), r".*: this is not macOS, and JAX_FUSEDNORM_METAL_DRIVER names no stand-in for it"),
    "a driver that is not there": (ONE, dict(JAX_FUSEDNORM_METAL_DRIVER="/nonexistent"), r".* cannot be loaded: /nonexistent: cannot open .*"),
    "another library": (ONE, dict(JAX_FUSEDNORM_METAL_DRIVER="libc.so.6"), r".* cannot be loaded: it has no MTLCreateSystemDefaultDevice"),
    "no device": (ONE, misbehaving("no device"), "rms_norm<.*>: there is no Metal device"),
    "no queue": (ONE, misbehaving("nil:newCommandQueue"), "rms_norm<.*>: the Metal device gives no command queue"),
    "no class of options": (ONE, misbehaving("nil:MTLCompileOptions"), f"Metal does not compile {INSTANCE}: Metal gives no options to compile with"),
    "no options": (ONE, misbehaving("nil:new"), f"Metal does not compile {INSTANCE}: Metal gives no options to compile with"),
    "no string": (ONE, misbehaving("nil:stringWithUTF8String:"), f"Metal does not compile {INSTANCE}: Metal refused the source and gave no reason"),
    "no library": (ONE, misbehaving("nil:newLibraryWithSource:options:error:"), f".* {INSTANCE}: Metal refused the source and gave no reason"),
    "a refused source": (ONE, misbehaving("refuse source"), f"Metal does not compile {INSTANCE}: {INSTANCE}: the source is refused, as asked for"),
    "a source refused without words": (ONE, misbehaving("refuse source", "nil:localizedDescription"), ".* refused the source and gave no reason"),
    "no function": (ONE, misbehaving("nil:newFunctionWithName:"), ".*: the source defines no kernel named rms_norm_float__ones__false__4__2__2__1_"),
    "no pipeline": (ONE, misbehaving("nil:newComputePipelineStateWithFunction:error:"), ".*: Metal made no pipeline and gave no reason"),
    "a refused pipeline": (ONE, misbehaving("refuse pipeline"), f"Metal does not compile {INSTANCE}: {INSTANCE}: the pipeline is refused, .*"),
    "narrow simdgroups": (ONE, misbehaving("simd width:16"), f".* {INSTANCE}: simdgroups are 16 threads wide here, and the kernels need 32"),
    "wide simdgroups": (ONE, misbehaving("simd width:64"), f".* {INSTANCE}: simdgroups are 64 threads wide here, and the kernels need 32"),
    "no threads": (ONE, misbehaving("nil:maxTotalThreadsPerThreadgroup"), f"{INSTANCE}: Metal allows it 0 threads"),
    "no command buffer": (ONE, misbehaving("nil:commandBufferWithUnretainedReferences"), f"{INSTANCE}: Metal gives no command buffer"),
    "no encoder": (ONE, misbehaving("nil:computeCommandEncoder"), f"{INSTANCE}: Metal gives no encoder"),
    "no buffer": (ONE, misbehaving("nil wrapper", "nil:newBufferWithLength:options:"), f"{INSTANCE}: Metal gives no buffer of 32768 bytes"),
    "no memory of a buffer": (ONE, misbehaving("nil wrapper", "nil:contents"), f"{INSTANCE}: Metal gives no buffer of 32768 bytes"),
    "short buffers": (ONE, misbehaving("longest buffer:16384"), f"{INSTANCE}: an array takes 32768 bytes, and Metal's buffers have at most 16384"),
    "buffers of no length": (ONE, misbehaving("nil:maxBufferLength"), f"{INSTANCE}: an array takes 32768 bytes, and .* have at most 0"),
    "a failure": (ONE, misbehaving("fail"), f"{INSTANCE}: {INSTANCE} fails, as asked for"),
    "a failure on copies": (ONE, {**misbehaving("fail", "nil wrapper"), **UNCHECKED}, f"{INSTANCE}: {INSTANCE} fails, as asked for\nthe arrays .*"),
    "a failure without an error": (ONE, misbehaving("fail", "nil:error"), f"{INSTANCE}: the command buffer did not complete, {NO_REASON}"),
    "a failure without words": (ONE, misbehaving("fail", "nil:localizedDescription"), f".*: the command buffer did not complete, {NO_REASON}"),
    "no status": (ONE, misbehaving("nil:status"), f"{INSTANCE}: the command buffer did not complete, {NO_REASON}"),
    "a hang": ((*ONE, 3, 64), {**misbehaving("hang"), "JAX_FUSEDNORM_SELF_CHECK": "0.5"},
               r"(Metal did not finish rms_norm<.*> of width 300 in 0.5 seconds, and runs nothing new in this process\n){2}"
               r"leak: 2 of MTLBuffer .*\nleak: 1 of MTLCommandBuffer (.*\n?)*"),
}
