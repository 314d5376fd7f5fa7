"""The kernels of matmul_partial_rms_norm: lane by lane as a GPU would run them, and at every level of the host, wherever buffers lie."""

import ctypes
import functools
import struct

import jax
import metal_calls
import ml_dtypes
import numpy as np
import pytest

import cases
import oracle
from jax_fusednorm import matmul_partial_rms_norm
from metal_driver import COMPLETED, Array, launch
from plain import draw, placed
from test_metal import all_dispatched, metal, moved, names  # noqa: F401 (a fixture)

DTYPES = {"float": np.float32, "bfloat": ml_dtypes.bfloat16, "half": np.float16}
EPSILON, OFFSET, STRIP = 1e-6, 0.5, 16
# (rows, width, outputs): whole packs of one simdgroup and of several, what is more than threads keep, and what nothing divides
SIZES = ((1, 64, 8), (3, 512, 36), (2, 2048, 20), (5, 33, 17), (2, 300, 50), (1, 20000, 4))
LEFT_OVER = tuple((2, width, 17) for width in (7, 15, 23, 31, 55))  # one row short of as many as vecmat reads at once, of 1 to 8 that take turns


def product_of(x, weight, transpose_b):
    return oracle.rounded(oracle.wide(x) @ (oracle.wide(weight).T if transpose_b else oracle.wide(weight)), x.dtype)


def assert_product(got, x, weight, transpose_b):
    size = np.sqrt(np.max(oracle.wide(x) ** 2 @ (oracle.wide(weight).T if transpose_b else oracle.wide(weight)) ** 2))
    oracle.assert_close(got, product_of(x, weight, transpose_b), x.dtype, rtol=float(ml_dtypes.finfo(x.dtype).eps), atol=2e-6 * size)


def run(standin, kernel, variant, shape, arrays, params, teams, seed, switch_every):
    """(the arrays afterwards, what was dispatched)"""
    standin.reset()
    standin.seed(seed, switch_every)
    name = f"{kernel}<{', '.join([*variant, *map(str, shape)])}>"
    [pipeline] = standin.pipelines(metal_calls.text_of(kernel), [name])
    placed = [Array(a) for a in arrays]
    _, _, simdgroups, at_once = shape
    known = standin.run(launch(pipeline, placed, params, -(-teams // at_once), 32 * simdgroups * at_once, 16 * simdgroups))
    assert standin.complaints() == [] and known["$status"] == COMPLETED
    done = standin.dispatched()
    standin.send(pipeline, "release")
    return [a.values for a in placed], done


def check_products(standin, kernel, dtype):
    rng, itemsize = np.random.default_rng(1), np.dtype(DTYPES[dtype]).itemsize
    for rows, width, outputs in SIZES + LEFT_OVER * (kernel == "vecmat"):
        if kernel == "vecmat" and width > 10000:
            continue
        of_weight = (outputs, width) if kernel == "matvec" else (width, outputs)
        x, weight = (rng.standard_normal(s).astype(DTYPES[dtype]) for s in ((rows, width), of_weight))
        product = np.full((rows, outputs), np.nan, DTYPES[dtype])
        shape = standin.shape(of_weight[1], itemsize)
        teams = -(-outputs // (4 if kernel == "matvec" else STRIP))
        call = functools.partial(run, standin, kernel, (dtype,), shape, [x, weight, product], struct.pack("IIII", rows, width, outputs, STRIP), teams)
        (_, _, got), done = call(1, 0)
        assert_product(got, x, weight, kernel == "matvec")
        times = rows if kernel == "vecmat" else -(-rows // 2)  # all but the first time from the cache
        vector, kept, simdgroups, _ = shape
        of_row = max(width, vector * kept * simdgroups * 32) * itemsize  # a thread that has fewer packs than others reads the row's last one
        read = weight.nbytes if kernel == "vecmat" else (outputs + -outputs % 4) * of_row  # and after the last row comes the last one again
        assert done.buffers[1].unique_read == weight.nbytes and done.buffers[1].read == read * times
        assert (done.buffers[2].written, done.buffers[2].unique_written) == (product.nbytes, product.nbytes)
        assert got.tobytes() == call(2, 3)[0][2].tobytes(), (rows, width, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("matvec", "vecmat"))
def test_products(standin, name, dtype):
    """Right numbers, the same in any order of the lanes; the weight is read exactly once for two rows of x."""
    check_products(standin, name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_norms(standin, host_library, dtype):
    rng, storage = np.random.default_rng(2), DTYPES[dtype]
    variants = [v for v in metal_calls.variants(host_library, "partial_rms_norm") if v[0] == dtype]
    assert len(variants) == (1 if dtype == "float" else 4)
    sizes = [(5, width, columns) for width, columns in ((64, 96), (1536, 2112), (5, 17), (64, 67), (257, 257), (2056, 2060))]
    for i, (rows, width, columns) in enumerate(sizes):
        for _, scale_dtype, in_t in variants if i < 2 else variants[i % len(variants):][:1]:
            y = rng.standard_normal((rows, columns))
            y[1] = 0
            y[2] *= 1e-4
            y, scale = y.astype(storage), rng.standard_normal(width).astype(DTYPES[scale_dtype])
            normed, rest = np.full((rows, width), np.nan, storage), np.full((rows, columns - width), np.nan, storage)
            aligned = columns * y.itemsize % 16 == 0
            shape = standin.shape(width if aligned else width | 1, y.itemsize)  # an odd width has the shapes of what is not aligned
            arrays, done = run(standin, "partial_rms_norm", (dtype, scale_dtype, in_t), shape, [y, scale, normed, rest],
                               struct.pack("IIIff", rows, width, columns, EPSILON, OFFSET), rows, 1, 5)
            want = oracle.rms_norm(y[:, :width], scale, epsilon=EPSILON, scale_offset=OFFSET, multiply_before_cast=in_t == "false")
            oracle.assert_close(arrays[2], want, storage)
            oracle.assert_same_bits(arrays[3], y[:, width:])
            again = 0 if shape[1] else width * rows * y.itemsize
            assert [moved(b)[:2] for b in done.buffers[:4]] == [
                (y.nbytes + again, 0), (rows * scale.nbytes, 0), (0, normed.nbytes), (0, rest.nbytes)]


# Nothing in memory is wrong with these: only the numbers tell.
WRONG = {"one output for another": ("sums[i] = part(a, w,", "sums[i ^ 1] = part(a, w,"),
         "one row of x for all": ("PAIR ? x + p.width : x,", "x,"),
         "a pack that is another thread's": ("R == 0 || c < mine ?", "c >= 0 ?"),
         "one simdgroup's rows": ("k += together * step)", "k += 2 * together * step)")}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_numbers_are_seen(standin, what, monkeypatch):
    old, new = WRONG[what]
    kernel = "vecmat" if "step" in old else "matvec"
    text = metal_calls.text_of(kernel)
    assert text.count(old) == 1, "the table is about another text"
    monkeypatch.setattr(metal_calls, "text_of", lambda _: text.replace(old, new))
    standin.reset(off={"source"})
    monkeypatch.setattr(standin, "reset", lambda: None)
    with pytest.raises(AssertionError, match="^value: "):
        check_products(standin, kernel, "float")


# ---- as the launcher calls them

@pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")
@pytest.mark.parametrize("transpose_b", (True, False))
def test_few_rows_are_two_dispatches_and_a_barrier_in_one_command_buffer(metal, transpose_b):  # noqa: F811
    x, weight, scale = draw(1, (2, 512), "bfloat16"), draw(2, (80, 512) if transpose_b else (512, 80), "bfloat16"), draw(3, (48,))
    op = functools.partial(matmul_partial_rms_norm, transpose_b=transpose_b, implementation="metal")
    results = jax.block_until_ready(jax.jit(op)(x, weight, scale))
    assert names(metal) == ["matvec" if transpose_b else "vecmat", "partial_rms_norm"]
    assert metal.count("sent commit") == metal.count("sent memoryBarrierWithScope:") == 1
    multiply, norm = all_dispatched(metal)
    assert moved(multiply.buffers[1])[2:] == (weight.nbytes, 0)
    if transpose_b:
        assert moved(multiply.buffers[1]) == (weight.nbytes, 0, weight.nbytes, 0)
    assert sum(norm.buffers[i].written for i in (2, 3)) == sum(r.nbytes for r in results) == multiply.buffers[2].written


# ---- the host

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", ("v2", "v3", "v4"))
def test_the_hosts_bits_depend_on_no_other_row_and_not_on_where_buffers_lie(host_library, level, dtype):
    rng, strip = np.random.default_rng(3), 24

    def products(kernel, x, weight, offset=0):
        (rows, width), outputs = x.shape, weight.shape[kernel == "vecmat"]
        arrays = [placed(x, offset), placed(weight, 3 * offset % 64), placed(np.full((rows, outputs), np.nan, x.dtype), 5 * offset % 64)]
        params, scratch = (ctypes.c_uint * 4)(rows, width, outputs, strip), np.empty(rows * outputs, np.float32)
        buffers = (ctypes.c_void_p * 4)(*(a.ctypes.data for a in arrays), ctypes.addressof(params))
        if not host_library.jax_fusednorm_run_host_kernel(
                kernel.encode(), (ctypes.c_ubyte * 8)(metal_calls.ARGUMENTS.index(dtype)), level.encode(), buffers,
                scratch.ctypes.data_as(ctypes.c_void_p), -(-outputs // (4 if kernel == "matvec" else strip))):
            pytest.skip(f"this processor has no {level}")
        return arrays[2]

    for (rows, width, outputs), kernel in ((s, k) for s in SIZES[:5] + LEFT_OVER for k in ("matvec", "vecmat")):
        of_weight = (outputs, width) if kernel == "matvec" else (width, outputs)
        x, weight = (rng.standard_normal(s).astype(DTYPES[dtype]) for s in ((rows, width), of_weight))
        together = products(kernel, x, weight)
        assert_product(together, x, weight, kernel == "matvec")
        for offset in (x.itemsize, 6 * x.itemsize):
            oracle.assert_same_bits(products(kernel, x, weight, offset), together)
        for row in range(rows):
            oracle.assert_same_bits(products(kernel, x[row:row + 1], weight), together[row:row + 1])
