"""The kernel of qk_rms_norm_rope_paged: at every level of the host between guarded pages and under AddressSanitizer, and lane by lane as a
GPU would run it, on data that may mean harm."""

import dataclasses
import functools
import mmap
import os
import pathlib
import struct
import subprocess
import sys

import jax
import numpy as np
import pytest

import cases
import metal_calls
import paged_calls
from jax_fusednorm import qk_rms_norm_rope_paged, rope_table
from metal_driver import COMPLETED, FAILED, Array, checkers_of, launch
from paged_op_calls import make

TESTS = pathlib.Path(__file__).parent
SOURCES = TESTS.parent / "metal_src"
NAME = "qk_rms_norm_rope_paged"
NORESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python does not know by name


def enough(printed, calls):
    """Whether that many calls met slots and padding often enough to mean something."""
    slots, zeros = map(int, printed.split())
    return slots > 4 * calls and zeros > 8 * calls


# ---- the host

def host_calls(library, level, memory, seeds, **environment):
    return subprocess.run([sys.executable, "paged_calls.py", library, level, memory, *map(str, seeds)], cwd=TESTS, capture_output=True, text=True,
                          check=False, env={**os.environ, **environment})


def one_token_short(library, memory, **environment):
    """A call whose result has no room for the last token."""
    program = ("import ctypes, paged_calls as p; made = p.call(1, 'float'); made.arrays[10] = made.arrays[10][:-1].copy();"
               f"p.run_on_host(ctypes.CDLL({library!r}), 'v2', made, p.{memory})")
    return subprocess.run([sys.executable, "-c", program], cwd=TESTS, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize("level", ("v2", "v3", "v4"))
def test_no_level_of_the_host_touches_what_is_not_its_own(host_library, level):
    """Against float64, every array between pages of memory whose touch would end the process."""
    done = host_calls(host_library._name, level, "Guarded", range(60))
    if "there is no" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0 and enough(done.stdout, 60), done.stderr
    assert one_token_short(host_library._name, "Guarded").returncode < 0


def test_offsets_have_64_bits(host_library):
    """Pages of a cache of more than 2^32 elements, of which hardly any is real memory, are those of a small one."""
    slots = 0
    for made in paged_calls.host_calls(range(0, 60, 3)):
        small, table = made.arrays[11], made.arrays[3]
        page, elements = small[0].size, (1 << 32) + (1 << 20)
        count = elements // page
        places = np.array([0, (1 << 31) // page - 1, (1 << 31) // page, (1 << 31) // page + 1, (1 << 32) // page - 1, (1 << 32) // page, count - 1])
        memory = mmap.mmap(-1, elements * small.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
        large = np.frombuffer(memory, small.dtype, count * page).reshape(count, *small.shape[1:])
        large[places] = small
        valid = (table >= 0) & (table < len(small))
        arrays = list(made.arrays)
        arrays[3] = np.where(valid, places[np.where(valid, table, 0)], np.where(table == len(small), count, table)).astype(np.int32)
        arrays[11] = large
        params = bytearray(made.params)
        struct.pack_into("I", params, paged_calls.PAGES_IN_PARAMS, count)
        after = paged_calls.run_on_host(host_library, "v2", dataclasses.replace(made, arrays=arrays, params=bytes(params)), paged_calls.InPlace)
        slots += made.check([*after[:11], after[11][places]])[0]
    assert slots > 40, "these calls have lost their teeth"


def test_address_sanitizer_has_nothing_to_say(tmp_path):
    compiler = os.environ.get("CXX", "g++")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip(f"{compiler} has no AddressSanitizer that a process can load")
    library = str(tmp_path / "kernels.so")
    subprocess.run([compiler, "-std=c++17", "-O1", "-fsanitize=address", "-fPIC", "-shared", "-fopenmp-simd", "-w", "-DLEVEL=V2",
                    f'-DVARIANTS="variants/{NAME}.h"', *(f"-I{SOURCES / folder}" for folder in (".", "kernels", "compat/include", "launch/host")),
                    "-isystem", jax.ffi.include_dir(), *(SOURCES / f"launch/host/{name}.cc" for name in ("kernels", "launcher")), "-o", library],
                   check=True)
    environment = dict(LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")
    done = host_calls(library, "v2", "Plain", range(60), **environment)
    assert done.returncode == 0 and enough(done.stdout, 60), done.stderr
    assert "AddressSanitizer: heap-buffer-overflow" in one_token_short(library, "Plain", **environment).stderr


# ---- a GPU, lane by lane

# (width, rope_dim, style, placement): what a thread of a simdgroup has of the pairs, in registers or not
ROPES = ((64, 64, "neox", "prefix"), (64, 24, "interleaved", "suffix"), (128, 64, "neox", "prefix"), (128, 48, "neox", "suffix"),
         (24, 8, "neox", "suffix"), (13, 6, "interleaved", "prefix"), (528, 130, "neox", "suffix"))


def pairs_of(shape, width, rope_dim, style, itemsize):
    """Of heads that their threads fill."""
    v, r, _, _ = shape
    if style == "interleaved":
        return "adjacent" if v % 2 == 0 else "apart"
    in_blocks = itemsize == 2 and width % rope_dim == 0 and rope_dim // 2 in (v << n for n in range(10))
    return "halves" if r % 2 == 0 and (rope_dim == width or in_blocks) else "apart"


def gpu_calls(standin, dtype, rope, seeds):
    """(the instantiation, a call) for each seed."""
    width, rope_dim, style, placement = rope
    itemsize = np.dtype(paged_calls.DTYPES[dtype]).itemsize
    shape = standin.shape(width, itemsize, head=True)
    lanes = width // (shape[0] * shape[1]) if shape[1] else 0
    full = lanes > 0 and width == shape[0] * shape[1] * lanes and lanes in ((1, 2, 4, 8, 16, 32) if itemsize == 2 else (32,))
    lanes = lanes if full else 32
    pairs = pairs_of(shape, width, rope_dim, style, itemsize) if full else "adjacent" if style == "interleaved" and shape[0] % 2 == 0 else "apart"
    for seed in seeds:
        made = paged_calls.call(seed, dtype, width=width, rope_dim=rope_dim, style=style, placement=placement, lanes=lanes, at_once=32 // lanes,
                                parts=1 + seed % 3, pairs=pairs)
        yield f"{NAME}<{', '.join([*made.variant, *map(str, shape)])}>", made


class Gpu:
    """The stand-in with pipelines of one text."""

    def __init__(self, standin, text):
        self.standin, self.text, self.pipelines = standin, text, {}

    def run(self, name, made, *, seed=1, switch_every=0, off=()):
        """(the status, the complaints, the arrays afterwards)"""
        self.standin.reset(off=off)
        self.standin.seed(seed, switch_every)
        if name not in self.pipelines:
            [self.pipelines[name]] = self.standin.pipelines(self.text, [name])
        placed = {id(a): Array(a) for a in made.arrays}
        arrays = [placed[id(a)] for a in made.arrays]
        teams = made.tokens * struct.unpack_from("14I", made.params)[13]
        at_once = int(name.rstrip(">").split(", ")[-1])
        known = self.standin.run(launch(self.pipelines[name], arrays, made.params, -(-teams // at_once), 32 * at_once, 16))
        return known["$status"], self.standin.complaints(), [a.values for a in arrays]

    def close(self):
        for pipeline in self.pipelines.values():
            self.standin.send(pipeline, "release")


@pytest.mark.parametrize("dtype", paged_calls.DTYPES)
def test_every_way_that_pairs_lie(standin, dtype):
    """Against float64, the same bits in any order of the lanes, and nothing to complain of: but that two tokens share a slot, where they do."""
    gpu, slots, zeros, count = Gpu(standin, metal_calls.text_of(NAME)), 0, 0, 0
    for i, rope in enumerate(ROPES):
        for name, made in gpu_calls(standin, dtype, rope, (4 * (3 * n + i) + n for n in range(4))):  # every form, in one order of casts
            off = {"race"} if made.shared else ()
            status, complaints, after = gpu.run(name, made, off=off)
            assert (status, complaints) == (COMPLETED, []), name
            found = made.check(after)
            slots, zeros, count = slots + found[0], zeros + found[1], count + 1
            again = gpu.run(name, made, seed=2, switch_every=5, off=off)[2]
            assert made.shared or [a.tobytes() for a in again] == [a.tobytes() for a in after], name
    gpu.close()
    assert slots > count and zeros > 4 * count, "these calls have lost their teeth"


@pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
@pytest.mark.parametrize("form", ("in its rows", "keys", "keys and values", "packed"))
def test_one_dispatch_that_reads_and_writes_each_head_once(standin, form):
    """However many teams share a token: with 700 tokens a team has all heads of one, with a few some. They fill its threads: spare ones would
    read a head once more."""
    for prompts in ((2, 3), (300, 400)):
        made = make("bfloat16", width=64, heads=(16, 8), layers=1, prompts=prompts, lengths=(1, 0), page_size=64, form=form)
        args, arrays, options = made.arguments()
        args = (*args[:4], rope_table(512, 64), args[5])
        op = functools.partial(qk_rms_norm_rope_paged, layer=0, implementation="metal", **options)
        standin.reset()
        q_out, _ = jax.block_until_ready(jax.jit(lambda args, arrays: op(*args, **arrays))(args, arrays))
        assert standin.dispatched(1) is None and standin.complaints() == []
        done = standin.dispatched()
        k, v = made.k.nbytes, made.v.nbytes * ("values" in form or form == "packed")
        assert (done.barriers, done.threadgroup_memory.read, done.threadgroup_memory.written) == (0, 0, 0)
        assert (done.buffers[10].written, done.buffers[10].unique_written, done.buffers[11].written, done.buffers[11].unique_written) == (
            q_out.nbytes, q_out.nbytes, k + v, k + v)
        operands = [done.buffers[i] for i in (0, 1, 2, 11)]
        assert sum(b.read for b in operands) == sum(b.unique_read for b in operands) == q_out.nbytes + k + v


# the text, its replacement, who complains; nobody, where only the numbers are wrong
BROKEN = {
    "a head that is turned before it is summed": ("simdgroup_barrier(mem_flags::mem_device);", "", {"race"}),
    "a barrier for the other memory": ("simdgroup_barrier(mem_flags::mem_device);", "simdgroup_barrier(mem_flags::mem_threadgroup);", {"race"}),
    "a barrier for some": ("simdgroup_barrier(mem_flags::mem_device);", "if (width > 0) simdgroup_barrier(mem_flags::mem_device);", {"simdgroup"}),
    "a page id that is taken on trust": ("if (uint(place.page) < p.pages)", "", {"bounds", "race"}),
    "an entry that is taken on trust": ("page_of_sequence >= p.table_width || ", "", {"bounds", "race"}),
    "a layer that is taken on trust": (" || uint(layer) >= p.layers", "", {"bounds", "race"}),
    "a position that is taken on trust": ("!rope.table || uint(position) < p.table_rows", "true", {"bounds", "race"}),
    "a sequence that is taken on trust": ("if (sequence < 0 || sequence >= count) return place;", "", {"bounds", "race"}),
    "offsets as they are": ("start = offsets[i] > start ? offsets[i] : start;", "start = offsets[sequence];", {"race"}),
    "the offsets of one lane": ("simd_min(-start)", "(-start)", {"race", "simdgroup"}),
    "values among the keys": ("slot + long(p.layers) * p.page_size", "slot + long(p.layers - 1) * p.page_size", {"bounds", "race"}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_found_out(standin, what):
    """By a complaint or by its numbers."""
    old, new, checkers = BROKEN[what]
    text = metal_calls.text_of(NAME)
    assert text.count(old) == 1, "the table is about another text"
    gpu, found = Gpu(standin, text.replace(old, new)), False
    for name, made in gpu_calls(standin, "bfloat", ROPES[2], (4 * 3 * n + n % 4 for n in range(60))):
        status, complaints, after = gpu.run(name, made, off={"source", *(["race"] if made.shared else [])})
        if complaints:
            assert status == FAILED and checkers_of(complaints) <= checkers, complaints
        try:
            assert status == COMPLETED
            made.check(after)
        except AssertionError:
            found = True
            break
    gpu.close()
    assert found
