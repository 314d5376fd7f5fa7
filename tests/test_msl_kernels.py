"""Every kernel lane by lane, as a GPU would run it: right numbers, exactly the bytes it must move, and nothing to complain of."""

import metal_calls
import numpy as np
import pytest
from metal_driver import COMPLETED

def run(standin, pipeline, call, *, seed=1, switch_every=0):
    standin.reset()
    standin.seed(seed, switch_every)
    messages, arrays = call.messages(standin, pipeline)
    known = standin.run(messages)
    assert standin.complaints() == []
    assert known["$status"] == COMPLETED
    return [a.values for a in arrays]


def check_counts(standin, call):
    """Each operand is read as often as it must be, each result is written once, and the rows of one simdgroup need no barrier."""
    _, r, simdgroups, teams = standin.shape(call.width, call.dtype.itemsize)
    done = standin.dispatched()
    assert done.kernel.decode() == call.instantiation(standin)
    assert (done.groups, done.threads) == (-(-call.teams // teams), 32 * simdgroups * teams)
    for buffer, moved in call.moved(1 if 0 < r <= call.most_kept else 2).items():
        assert (done.buffers[buffer].read, done.buffers[buffer].written) == moved, f"{call.instantiation(standin)}: buffer {buffer}"
    memory = done.threadgroup_memory
    assert done.exchanges == call.rows * call.sums * simdgroups
    assert done.barriers == (2 * call.rows if simdgroups > 1 else 0)
    partials = 4 * call.sums * simdgroups if simdgroups > 1 else 0
    assert (memory.read, memory.written) == (call.rows * partials * done.threads, call.rows * partials)
    assert (memory.unique_read, memory.unique_written) == (partials, partials)


def check_all(standin, calls):
    names = list(dict.fromkeys(call.instantiation(standin) for call in calls))
    pipelines = dict(zip(names, standin.pipelines(metal_calls.text_of(calls[0].kernel), names)))
    for call in calls:
        pipeline = pipelines[call.instantiation(standin)]
        results = run(standin, pipeline, call)
        call.check(results)
        check_counts(standin, call)
        again = run(standin, pipeline, call, seed=2, switch_every=3)
        for first, second in zip(results, again):
            assert first.tobytes() == second.tobytes(), f"{call.instantiation(standin)}: another order of the lanes, other bits"
    for pipeline in pipelines.values():
        standin.send(pipeline, "release")


def of_dtype(host_library, name, dtype):
    return [v for v in metal_calls.variants(host_library, name) if v[0] == dtype]


def widths_of_shapes(standin, dtype):
    return list(metal_calls.widths_of_shapes(standin, np.dtype(metal_calls.DTYPES[dtype]).itemsize).values())


@pytest.mark.parametrize("dtype", metal_calls.DTYPES)
@pytest.mark.parametrize("name", metal_calls.KERNELS)
def test_every_variant(standin, host_library, name, dtype):
    """Each with another shape; the last with a row that is read again, too."""
    variants, widths = of_dtype(host_library, name, dtype), widths_of_shapes(standin, dtype)
    calls = [metal_calls.call(name, variant, 6, widths[i % len(widths)][0]) for i, variant in enumerate(variants)]
    check_all(standin, calls + [metal_calls.call(name, variants[-1], 3, widths[-1][1])])


@pytest.mark.parametrize("dtype", metal_calls.DTYPES)
@pytest.mark.parametrize("name", [n if n == "rms_norm" else pytest.param(n, marks=pytest.mark.slow) for n in metal_calls.KERNELS])
def test_every_shape(standin, host_library, name, dtype):
    """With its narrowest row and its widest."""
    [*_, variant] = of_dtype(host_library, name, dtype)
    check_all(standin, [metal_calls.call(name, variant, 5, width) for pair in widths_of_shapes(standin, dtype) for width in pair])


# Nothing in memory is wrong with these: only the numbers tell.
WRONG = {
    "epsilon left out": (" + p.epsilon)", ")"),
    "the sum of squares for their mean": ("team.sum(squares) / float(p.width)", "team.sum(squares)"),
    "one simdgroup left out": ("s < SG; ++s) total +=", "s < SG - 1; ++s) total +="),
    "no offset": ("offset = p.scale_offset", "offset = 0.0f"),
    "no rounding before the scale": ("rounded<T>(unit) * rounded<T>(gain)", "unit * gain"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_numbers_are_seen(standin, what):
    old, new = WRONG[what]
    text = metal_calls.text_of("rms_norm")
    assert text.count(old) == 1, "the table is about another text"
    standin.reset(off={"source"})
    call = metal_calls.call("rms_norm", ("bfloat", "bfloat", "true"), 6, 2048)
    [pipeline] = standin.pipelines(text.replace(old, new), [call.instantiation(standin)])
    with pytest.raises(AssertionError, match="^value: "):
        call.check(run(standin, pipeline, call))
    standin.send(pipeline, "release")
