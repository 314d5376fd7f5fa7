"""Calls of the kernel of qk_rms_norm_rope_paged as launchers make them, on data that may mean harm, and what must come of each.

    python paged_calls.py LIBRARY LEVEL Guarded|Plain SEED ...

runs some on the host kernels in LIBRARY: with every array between pages of memory that nobody may touch, first against the one in front
of it and then against the one behind; or in plain memory, for AddressSanitizer to watch.
"""

import ctypes
import dataclasses
import itertools
import mmap
import struct
import sys

import ml_dtypes
import numpy as np

import oracle

DTYPES = {"float": np.float32, "bfloat": ml_dtypes.bfloat16, "half": np.float16}
ARGUMENTS = ("false", "true", *DTYPES, "ones", "halves", "adjacent", "apart")  # launch.h's
FORMS = ("in its slots", "keys", "keys and values", "packed")
ENDS = (-2**31, -1, 2**31 - 1)
EPSILON, OFFSET, STORAGE_SCALE = 1e-6, 0.5, 2
CASTS = ((True, True), (True, False), (False, True))  # multiply before the cast, round before the rotation


PAGES_IN_PARAMS = 4 * (24 + 2 + 6)  # of metal_src/kernels/params.h, in bytes


@dataclasses.dataclass
class Call:
    arrays: list      # by buffer. One that is absent is another, bound again
    params: bytes
    variant: tuple    # of words
    tokens: int
    arguments: tuple  # the oracle's
    options: dict

    @property
    def shared(self):
        """Whether two tokens have one slot."""
        return any(len(tokens) > 1 for tokens in oracle.qk_rms_norm_rope_paged(*self.arguments, **self.options)[1].values())

    def check(self, after):
        """Right values where there must be some, and no other bit of the pages changed. Returns how many (slots, rows of zeros) there were."""
        (want, size), slots, (keys, key_size, values) = oracle.qk_rms_norm_rope_paged(*self.arguments, **self.options)
        q_out, pages, before = *after[10:12], self.arrays[11].copy()
        dtype, rounded = q_out.dtype, self.options["round_before_rope"]
        oracle.assert_rotated_close(q_out, want, size, dtype, rounded_before=rounded, what="q")
        for (page, layer, row), tokens in slots.items():
            got = pages[page, :, layer, row]
            if len(tokens) == 1:
                oracle.assert_rotated_close(got[0], keys[tokens[0]], key_size[tokens[0]], dtype, rounded_before=rounded, what="k")
            if values is not None:  # each element is of one of the tokens that share the slot
                assert (bits(got[1]) == bits(values[tokens])).any(0).all(), "v"
            before[page, :2 if values is not None else 1, layer, row] = pages[page, :2 if values is not None else 1, layer, row]
        assert before.tobytes() == pages.tobytes(), "what should not change in the pages"
        return len(slots), int((oracle.wide(want) == 0).all((1, 2)).sum())


def bits(a):
    return np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")


def hostile(rng, shape, least, most, often=0.1):
    """Integers of [least, most], among them some that are beyond, and the ends of int32."""
    beyond = np.array([least - 1, most + 1, *ENDS])
    return np.where(rng.random(shape) < often, rng.choice(beyond, shape), rng.integers(least, most + 1, shape)).astype(np.int32)


def offsets_of(rng, sequences, tokens):
    """Sorted, and then some of them anything."""
    offsets = np.sort(rng.integers(0, tokens + 1, sequences + 1))
    offsets[[0, -1]] = 0, tokens
    anything = hostile(rng, sequences + 1, 0, tokens)
    return np.where(rng.random(sequences + 1) < rng.choice([0, 0, 0.2, 1]), anything, offsets).astype(np.int32)


def call(seed, dtype, *, width=16, rope_dim=8, style="neox", placement="prefix", lanes=1, at_once=1, parts=1, pairs="apart"):
    """A call of few tokens. lanes, at_once, parts, pairs: as a launcher that runs these teams would say."""
    rng = np.random.default_rng(seed)
    storage, form = DTYPES[dtype], FORMS[seed % len(FORMS)]
    tokens, heads, k_heads, num_pages, layers = 11, 3, 2, 7, 2
    sequences, entries, page_size, max_positions = map(rng.choice, ([0, 1, 2, 3, 5, 40], [0, 3, 4, 5], [1, 3, 4], [1, 9, 20, 20]))
    has_k, has_v = form != "in its slots", form in ("keys and values", "packed")
    sides = 2 if has_v else rng.integers(1, 3)
    multiply_before_cast, round_before_rope = CASTS[seed // len(FORMS) % len(CASTS)]

    def normal(*shape, of=storage):
        return rng.standard_normal(shape).astype(of)

    offsets, table = offsets_of(rng, sequences, tokens), hostile(rng, (sequences, entries), 0, num_pages - 1)
    lengths, layer = hostile(rng, sequences, 0, 8), hostile(rng, (), 0, layers - 1, often=0.25)
    pages, angles = normal(num_pages, sides, layers, page_size, k_heads, width), normal(max_positions, rope_dim, of=np.float32)
    q, k, v = (normal(tokens, count, width) for count in (heads, k_heads, k_heads))
    scales = normal(width), normal(width)
    for token, (position, _) in enumerate(oracle.paged_places(tokens, table, lengths, offsets, layer, pages.shape, max_positions)):
        if position is None:
            q[token] = k[token] = v[token] = np.nan
    arrays, columns = _columns(q, k, v, packed=form == "packed")
    params = struct.pack(
        "24I2f10I", tokens, 0, heads, k_heads, width, *columns[:4], lanes, at_once, *(-(-count // at_once) for count in (heads, k_heads)), parts,
        rope_dim // 2, (width - rope_dim) * (placement == "suffix"),
        1 if style == "interleaved" else rope_dim // 2, style == "interleaved", 1, max_positions, STORAGE_SCALE, 0, 0, 0, EPSILON, OFFSET,
        *columns[4:], has_k, has_v, sequences, entries, num_pages, sides, layers, page_size)
    casts = (not multiply_before_cast, round_before_rope) if storage != np.float32 else (False, False)
    return Call([arrays[0], arrays[1] if has_k else arrays[0], arrays[2] if has_v else arrays[0], table, lengths, offsets, layer, angles, *scales,
                 np.full_like(q, np.nan), pages], params, (dtype, *("true" if cast else "false" for cast in casts), pairs), tokens,
                (q, pages.copy(), table, lengths, *scales, angles, offsets, layer, k if has_k else None, v if has_v else None),
                dict(style=style, placement=placement, epsilon=EPSILON, scale_offset=OFFSET, multiply_before_cast=multiply_before_cast,
                     round_before_rope=round_before_rope))


def _columns(*arrays, packed):
    """(q, k and v as a kernel gets them, the columns and the first one of each). Packed: between columns that nobody reads."""
    if not packed:
        return arrays, [n for a in arrays for n in (a[0].size, 0)]
    first, *_, last = parts = [a.reshape(len(a), -1) for a in arrays]
    whole = np.concatenate([np.full_like(first[:, :8], np.nan), *parts, np.full_like(last[:, :8], np.nan)], 1)
    starts = np.cumsum([8, *(part.shape[1] for part in parts)])
    return [whole] * 3, [n for start in starts[:3] for n in (whole.shape[1], start)]


# ---- on the host

class Guarded:
    """A copy of an array in memory of its own, that ends (or begins) where nobody may touch any."""

    libc = ctypes.CDLL(None)

    def __init__(self, array, at_end):
        inside = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, inside + 2 * mmap.PAGESIZE)
        self.first = np.frombuffer(self.memory, np.uint8).ctypes.data
        start = mmap.PAGESIZE + (inside - array.nbytes) * at_end
        self.address = self.first + start
        self.values = np.frombuffer(self.memory, array.dtype, array.size, start).reshape(array.shape)
        self.values[...] = array
        for guard in (self.first, self.first + mmap.PAGESIZE + inside):
            assert self.libc.mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0


class InPlace:
    def __init__(self, array, _):
        self.values, self.address = array, array.ctypes.data


class Plain(InPlace):
    def __init__(self, array, _):
        super().__init__(array.copy(), _)


def run_on_host(library, level, made, place, at_end=True):
    """The arrays afterwards, or None where there is no such level."""
    placed = {id(a): place(a, at_end) for a in made.arrays}
    arrays = [placed[id(a)] for a in made.arrays]
    width = made.arrays[10].shape[-1]
    params, scratch = place(np.frombuffer(made.params, np.uint8), at_end), place(np.zeros(4 * width, np.float32), at_end)
    variant = (ctypes.c_ubyte * 8)(*map(ARGUMENTS.index, made.variant))
    ran = library.jax_fusednorm_run_host_kernel(b"qk_rms_norm_rope_paged", variant, level.encode(),
                                                (ctypes.c_void_p * 13)(*(a.address for a in arrays), params.address),
                                                ctypes.c_void_p(scratch.address), made.tokens)
    return [a.values for a in arrays] if ran else None


def host_calls(seeds):
    """Every dtype, and heads whose channels turn in every way."""
    ropes = ((16, 16, "neox", "prefix"), (24, 8, "neox", "suffix"), (13, 6, "interleaved", "prefix"), (32, 20, "interleaved", "suffix"))
    for seed, dtype in itertools.product(seeds, DTYPES):
        width, rope_dim, style, placement = ropes[seed // 3 % len(ropes)]
        yield call(seed, dtype, width=width, rope_dim=rope_dim, style=style, placement=placement,
                   pairs="adjacent" if style == "interleaved" else "apart")


def main(library, level, memory, *seeds):
    library = ctypes.CDLL(library)
    slots = zeros = 0
    for made in host_calls(map(int, seeds)):
        for at_end in (False, True):
            after = run_on_host(library, level, made, {"Guarded": Guarded, "Plain": Plain}[memory], at_end)
            if after is None:
                sys.exit(f"there is no {level}")
            more = made.check(after)
            slots, zeros = slots + more[0], zeros + more[1]
    print(slots, zeros)


if __name__ == "__main__":
    main(*sys.argv[1:])
