"""The native libraries: finding, checking and registering them, and calling their kernels."""

import ctypes
import dataclasses
import functools
import math
import os
import pathlib
import re
import warnings

import jax
import jax.export
import numpy as np

import jax_fusednorm

from . import cuda

HOST_LEVEL = "JAX_FUSEDNORM_HOST_LEVEL"  # read by the host launcher: the instruction set, v2, v3 or v4 of x86-64, where less is wanted than there is
# Counts changes of the handlers' operands, attributes or results; part of every target's name.
ABI = 1
_PLATFORM = {"host": "cpu", "metal": "cpu", "cuda": "CUDA"}  # XLA's name of the platform each launcher's handlers are registered for
_ABSENT = {"cuda": "they are built on Linux only"}
_REBUILD = "reinstall with `pip install --force-reinstall --no-cache-dir jax_fusednorm` (in a checkout: `pip install -e .`)"


@dataclasses.dataclass(frozen=True)
class Library:
    """A launcher's native library: its name, or why there is none, and the kernels it brought."""

    name: str
    targets: frozenset = frozenset()
    handle: ctypes.CDLL | None = None

    def _status(self):
        if self.handle is None:
            return False, self.name
        usable = ctypes.c_int()
        text = self.handle.jax_fusednorm_status(ctypes.byref(usable)).decode()
        return bool(usable), f"{self.name}, {text}" if usable else text

    @property
    def usable(self):
        """Whether its kernels can run here: a driver may be missing."""
        return self._status()[0]

    @property
    def about(self):
        """What runs its kernels, or why nothing does."""
        return self._status()[1]

    @functools.cached_property
    def longest(self):
        """Bytes that one array may have, where a driver sets a limit: Apple's does, of its buffers."""
        if not hasattr(self.handle, "jax_fusednorm_longest_array"):
            return math.inf
        self.handle.jax_fusednorm_longest_array.restype = ctypes.c_uint64
        return self.handle.jax_fusednorm_longest_array()


def target(launcher, kernel):
    return f"jax_fusednorm_{launcher}_{kernel}_v{ABI}"


@dataclasses.dataclass(frozen=True)
class Call:
    """call(kernel, results, *operands, **attributes) emits the custom call of one of a launcher's kernels, while lowering.

    aliases: {operand: result} that share their memory, in which XLA has copied the operand where someone else still needs it.
    """

    launcher: str

    def __call__(self, kernel, results, *operands, aliases=None, **attributes):
        # the handlers' float attributes are float32
        attributes = {name: np.float32(value) if isinstance(value, float) else value for name, value in attributes.items()}
        return self._make(target(self.launcher, kernel), results, operands, aliases, attributes)

    def _make(self, name, results, operands, aliases, attributes):
        return jax.ffi.ffi_call(name, results, input_output_aliases=aliases)(*operands, **attributes)


class Preparation(Call):
    """The same without a call: the launcher compiles and loads what it would launch. Raises Unprepared where it cannot."""

    def _make(self, name, results, operands, aliases, attributes):
        handle = library(self.launcher).handle
        single = not isinstance(results, (list, tuple))
        line = cuda.line_of(name, operands, [results] if single else results, attributes)
        why = handle.jax_fusednorm_prepare(getattr(handle, name), line.encode())
        if why:
            raise Unprepared(why.decode().removeprefix("jax_fusednorm: "))
        return jax.tree.map(lambda r: jax.numpy.zeros(r.shape, r.dtype), results)


class Unprepared(Exception):
    """Why a launcher cannot run a call."""


@functools.cache
def library(launcher):
    """Load, check and register a launcher's library, once. Never raises: a refused one warns, and jnp runs."""
    if launcher not in _PLATFORM:
        return Library(f"this version has no {launcher} kernels")
    folder, path = _find(launcher)
    if path is None:
        return Library(_why_absent(folder, launcher))
    try:
        handle, targets = _load(path)
    except _Refused as refusal:
        about = f"the library of the {launcher} kernels, {path.name}, {refusal}"
        warnings.warn(f"jax_fusednorm: {about}; running jnp instead. To fix it, {_REBUILD}.", stacklevel=2)
        return Library(about)
    if launcher == "cuda":
        cuda.configure(handle)
    for kernel in targets:
        capsule = jax.ffi.pycapsule(getattr(handle, target(launcher, kernel)))
        jax.ffi.register_ffi_target(target(launcher, kernel), capsule, platform=_PLATFORM[launcher])
    return Library(path.name, frozenset(targets), handle)


def _check_host_level():
    value = os.environ.get(HOST_LEVEL)
    if value and value not in ("v2", "v3", "v4"):
        warnings.warn(f"jax_fusednorm: {HOST_LEVEL}={value!r} is none of v2, v3, v4; the best that this processor has is used.", stacklevel=2)


def load_all():
    """Load every library there is. Returns the export checks that its custom calls need disabled."""
    _check_host_level()
    return tuple(jax.export.DisabledSafetyCheck.custom_call(target(launcher, kernel))
                 for launcher in _PLATFORM for kernel in sorted(library(launcher).targets))


class _Refused(Exception):
    """Completes the sentence "the library ...": why it is not used."""


def _find(launcher):
    """(the package's library folder, the library in it or None). An editable install has one folder more than the sources."""
    folders = [pathlib.Path(p) / "lib" for p in jax_fusednorm.__path__]
    for folder in folders:
        for path in sorted(folder.glob(f"libjax_fusednorm_{launcher}.*")):
            return folder, path
    return next((f for f in folders if f.is_dir()), None), None


def _why_absent(folder, launcher):
    note = folder / "not-built.txt" if folder else None
    reason = note.read_text().strip() if note and note.exists() else _ABSENT.get(launcher, "it was installed without them")
    return f"the {launcher} kernels are not built: {reason}"


def _load(path):
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise _Refused(f"cannot be loaded ({error})") from None
    try:
        describe = handle.jax_fusednorm_describe
    except AttributeError:
        raise _Refused("carries no version stamp") from None
    describe.restype = ctypes.c_char_p
    stamp = dict(item.split("=", 1) for item in describe().decode().split(";"))
    wanted = f"{jax_fusednorm.__version__} with ABI {ABI}"
    if (stamp["version"], stamp["abi"]) != (jax_fusednorm.__version__, str(ABI)):
        raise _Refused(f"is of version {stamp['version']} with ABI {stamp['abi']}, but the Python package is {wanted}")
    newest = _runtime_ffi_minor()
    if newest is not None and int(stamp["ffi"]) > newest:
        # registering it would stop JAX's cpu backend from starting
        raise _Refused(f"was built for XLA FFI 0.{stamp['ffi']}, newer than this jaxlib's 0.{newest}")
    try:
        handle.jax_fusednorm_status.restype = ctypes.c_char_p
    except AttributeError:
        raise _Refused("was built from other sources of this version") from None
    if hasattr(handle, "jax_fusednorm_prepare"):
        handle.jax_fusednorm_prepare.restype = ctypes.c_char_p
    return handle, stamp["targets"].split(",")


def _runtime_ffi_minor():
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    found = re.search(r"XLA_FFI_API_MINOR\s+(\d+)", header.read_text()) if header.exists() else None
    return int(found[1]) if found else None


def poison_outputs(on):
    """For tests: from now on every kernel's results are filled with NaN before it runs, so that what it leaves out shows."""
    for launcher in _PLATFORM:
        handle = library(launcher).handle
        if handle is not None:
            handle.jax_fusednorm_poison_outputs(ctypes.c_int(bool(on)))
