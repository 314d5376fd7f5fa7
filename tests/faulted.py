"""Planted faults: a copy of this checkout that one patch of tests/faults is applied to, built, and tested.

A patch's first line says what goes wrong, its second which tests must then fail ("run: tests/test_x.py -k part"); a third may say which native
code is to be built ("build: host", or none), which otherwise is all that the patch reaches. Then comes the difference, as git writes it.
"""

import dataclasses
import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "faults"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", ".pytest_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "out", "faults", "lib")
BUILDS = ("all", "host", "standin", "metal-launcher", "none")
MINUTES = 15  # that a run may take


class Stale(Exception):
    """Why a patch fits this checkout no more."""


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    sentence: str
    run: str
    build: str
    edits: tuple  # (path, ((line, old text, new text), ...))

    def applied(self, root):
        """{path: its text with the fault}, None for a file that is taken away."""
        return {path: _edited(root / path, hunks) for path, hunks in self.edits}


def read(path):
    text = path.read_text()
    head, _, difference = text.partition("\n\n")
    sentence, run, *more = head.splitlines()
    build = more[0].removeprefix("build: ") if more else None
    edits = tuple(_edits(difference))
    native = any(name.startswith("metal_src/") for name, _ in edits)
    return Fault(path.stem, sentence, run.removeprefix("run: "), build or ("all" if native else "none"), edits)


def every():
    return [read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _edits(difference):
    for part in re.split(r"^(?=--- )", difference, flags=re.M)[1:]:
        before, after = (re.match(r"(?:---|\+\+\+) (?:[ab]/)?(\S+)", line)[1] for line in part.splitlines()[:2])
        hunks = []
        for hunk in re.split(r"^@@ ", part, flags=re.M)[1:]:
            first, *lines = hunk.splitlines()
            lines = [line or " " for line in lines if not line or line[0] in " +-"]
            old, new = ("".join(line[1:] + "\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
            hunks.append((int(re.match(r"-(\d+)", first)[1]), old, new))
        yield (before if after == "/dev/null" else after), tuple(hunks)


def _edited(path, hunks):
    text = path.read_text() if path.exists() else ""
    for number, old, new in reversed(hunks):  # from the end, so that the numbers stay right
        starts = [0] if not old else [m.start() for m in re.finditer(rf"^{re.escape(old)}", text, flags=re.M)]
        if not starts:
            raise Stale(f"{path.name} has no such lines any more (they were at {number}):\n{old}")
        at = min(starts, key=lambda start: abs(text.count("\n", 0, start) + 1 - number))
        text = text[:at] + new + text[at + len(old):]
    return text or None


class Tree:
    """The copy, with an interpreter that imports the package from it, and native code of its own.

    Whoever comes again finds it built: sources that changed are copied anew, and what is built of faults never stays.
    """

    def __init__(self, folder):
        self.folder, self.root = folder, folder / "tree"
        self.native = (self.root / "build", self.root / "jax_fusednorm" / "lib")
        self._copy_sources()
        self.python = folder / "venv" / "bin" / "python"
        if not self.python.exists():
            venv.create(folder / "venv", symlinks=True)
        site = next((folder / "venv").glob("lib/python*/site-packages"))
        # a path in a .pth file brings no .pth files of its own: an editable install does not answer for the package
        (site / "faulted.pth").write_text(f"{self.root}\n{sysconfig.get_path('purelib')}\n")

    def _copy_sources(self):
        fresh = self.folder / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(ROOT, fresh, ignore=LEFT_OUT)
        wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
        for path in [*self.root.rglob("*")] if self.root.exists() else ():
            of = path.relative_to(self.root)
            if path.is_file() and of not in wanted and "__pycache__" not in of.parts and not any(n in path.parents for n in self.native):
                path.unlink()
        for name in wanted:
            there = self.root / name
            if not there.exists() or there.read_bytes() != (fresh / name).read_bytes():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(fresh / name, there)  # and it counts as new: what was built of it is not
        shutil.rmtree(fresh)

    @functools.cached_property
    def clean(self):
        """The native code without a fault, built once."""
        clean = self.folder / "clean"
        if clean.exists():
            self._restore(clean)
        self.build("all")
        shutil.rmtree(clean, ignore_errors=True)
        for part in self.native:
            shutil.copytree(part, clean / part.name)
        return clean

    def _restore(self, clean):
        for part in self.native:
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(clean / part.name, part)

    def environment(self, build="all"):
        environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_FUSEDNORM_REQUIRE_KERNELS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                       "JAX_FUSEDNORM_HOST_LEVEL": "v2", "PATH": os.pathsep.join([str(self.python.parent), sysconfig.get_path("scripts"),
                                                                                os.environ["PATH"]])}
        for name in ("PYTHONPATH", "XLA_FLAGS", "JAX_FUSEDNORM_METAL_DRIVER", "MAKEFLAGS", "MAKELEVEL"):
            environment.pop(name, None)
        environment.update({name: value for name, value in os.environ.items() if name == "JAX_FUSEDNORM_METAL_DRIVER" and not _linux()})
        if _linux() and build != "host":
            environment["JAX_FUSEDNORM_METAL_DRIVER"] = str(self.root / "build" / "standin" / "libstandin.so")
        return environment

    def build(self, what):
        """One level of the host kernels is enough: each is compiled from the same text."""
        build, lib = self.root / "build" / "native", self.native[1]
        metal = "OFF" if sys.platform == "linux" and not _linux() else "ON"
        if not (build / "build.ninja").exists():
            self._call("cmake", "-S", self.root / "metal_src", "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", "-DLEVELS=V2",
                       f"-DJAX_FUSEDNORM_METAL={metal}", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={lib}")
        targets = {"host": ("host",), "metal-launcher": ("metal",), "all": ("host", "metal") if metal == "ON" else ("host",)}.get(what, ())
        if targets:
            self._call("cmake", "--build", build, "--target", *(f"jax_fusednorm_{target}" for target in targets))
        if what in ("all", "standin") and _linux():
            self._call("make", "-s", "standin", f"PYTHON={sys.executable}")

    def _call(self, *command):
        done = subprocess.run(list(map(str, command)), cwd=self.root, env=self.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    def pytest(self, run, build):
        """The exit status of the tests, and the end of what they printed."""
        every = "jnp,host,metal" if _linux() or sys.platform == "darwin" else "jnp,host"
        implementations = {"host": "host", "metal-launcher": "metal"}.get(build, every)  # the rest is as it was
        command = [self.python, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "--tb=line", "--implementations", implementations, *shlex.split(run)]
        try:
            done = subprocess.run(command, cwd=self.root, env=self.environment(build), capture_output=True, text=True, check=False,
                                  timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            return "timeout", f"{MINUTES} minutes"
        return done.returncode, (done.stdout + done.stderr)[-3000:]

    @functools.cache
    def passes(self, run, build):
        """Without a fault."""
        self.clean
        status, said = self.pytest(run, build)
        assert status == 0 and " passed" in said, f"without a fault, pytest {run} ended with {status}:\n{said}"  # not where all are skipped

    def catches(self, fault):
        """That the tests fail with the fault, and pass without it."""
        texts = fault.applied(self.root)
        self.passes(fault.run, fault.build)
        before = {}
        try:
            for name, text in texts.items():
                path = self.root / name
                before[path] = (path.read_bytes(), path.stat()) if path.exists() else None
                if text is None:
                    path.unlink()
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
            if fault.build != "none":
                self.build(fault.build)
            status, said = self.pytest(fault.run, fault.build)
        finally:
            for path, old in before.items():
                if old is None:
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(old[0])
                    os.utime(path, ns=(old[1].st_atime_ns, old[1].st_mtime_ns))
            if fault.build != "none":
                self._restore(self.clean)
        assert status == 1, f"nobody saw: {fault.sentence}\npytest {fault.run} ended with {status}:\n{said}"


def _linux():
    """Where the stand-in for Metal's driver runs."""
    return sys.platform == "linux" and os.uname().machine == "x86_64"
