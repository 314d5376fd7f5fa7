"""What the CUDA launcher is told: where NVRTC lies, where compiled kernels are kept, and which call is about to be made."""

import importlib.util
import os
import pathlib
import sys

import numpy as np

CACHE_VARIABLE = "JAX_FUSEDNORM_CACHE_DIR"
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")  # of the versions that can be used, the newest first
_WORDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "uint32": "ui32", "int64": "i64", "bool": "i1"}


def nvrtc_paths():
    """Where NVRTC may be, best first: NVIDIA's wheels, conda's environment, a toolkit, and last wherever the loader looks itself."""
    spec = importlib.util.find_spec("nvidia")
    folders = [folder for root in (spec.submodule_search_locations or () if spec else ()) for folder in sorted(pathlib.Path(root).glob("*/lib"))]
    for root in (os.environ.get("CONDA_PREFIX"), sys.prefix, os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        folders += [pathlib.Path(root, "lib"), pathlib.Path(root, "lib64")] if root else []
    return [str(path) for name in _NAMES for path in dict.fromkeys(folder / name for folder in folders) if path.exists()] + list(_NAMES)


def cache_folder():
    """Where compiled kernels are kept: JAX_FUSEDNORM_CACHE_DIR, which may be empty for nowhere, else in the user's folder of caches."""
    given = os.environ.get(CACHE_VARIABLE)
    if given is not None:
        return os.path.expanduser(given)
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "jax_fusednorm")


def configure(handle):
    """Tell the library, before anything is asked of it."""
    handle.jax_fusednorm_configure("\n".join(nvrtc_paths()).encode(), os.fsencode(cache_folder()))


def _word(array):
    return _WORDS.get(array.dtype.name, array.dtype.name)


def line_of(target, operands, results, attributes):
    """A call as launch/cuda/frame.h reads it."""
    arrays = [f"{kind}:{_word(a)}:{'x'.join(map(str, a.shape))}:" for kind, group in (("in", operands), ("out", results)) for a in group]
    scalars = [f"attr:{name}:{_word(np.asarray(value))}:{str(value).lower()}" for name, value in sorted(attributes.items())]
    return " ".join([target, *arrays, *scalars])
