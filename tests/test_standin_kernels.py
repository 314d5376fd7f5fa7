"""The stand-in for Metal's driver: it complains of every broken kernel there is a checker for, and of nothing else."""

import re

import metal_calls
import pytest
import test_standin
from metal_driver import COMPLETED, FAILED, checkers_of

NORM = ("rms_norm", ("float", "float", "false"))
COTANGENT = ("rms_norm_cotangent", ("float", "false", "false", "true"))
FIRST_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody still reads the last sum"
SECOND_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n    float total"
FIRST_BARRIER_OF_TWO = "threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (rank % SIMD_WIDTH == 0) {"
NARROW, PARTIALS_OF_TWO, READ_AGAIN = 64, 400, 2051

# kernel, variant, width, the text to replace, its replacement, who complains
BROKEN = {
    "one pack too many": (*NORM, NARROW, "(n - rank + size() - 1)", "(n - rank + size())", {"bounds"}),
    "one row too many": (*NORM, NARROW, "if (row >= p.rows)", "if (row > p.rows)", {"bounds"}),
    "before the array": (*NORM, NARROW, "start = long(row) * p.width", "start = long(row) * p.width - V", {"bounds"}),
    "past the threadgroup memory": (*NORM, PARTIALS_OF_TWO, "total += partial[s]", "total += partial[s + 4 * SG]", {"bounds"}),
    "a pack that starts between packs": (*NORM, NARROW, "  x += start;", "  x += start + 1;", {"alignment"}),
    "a write to what is const": (*NORM, NARROW, "store_pack<V>(normed, i", "store_pack<V>(const_cast<device T*>(x), i", {"readonly"}),
    "a sum without its first barrier": (
        *COTANGENT, PARTIALS_OF_TWO, FIRST_BARRIER_OF_TWO, "if (rank % SIMD_WIDTH == 0) {", {"race"}),
    "a sum without its second barrier": (*NORM, PARTIALS_OF_TWO, SECOND_BARRIER, "float total", {"race", "uninitialised"}),
    "a barrier for the other memory": (
        *NORM, PARTIALS_OF_TWO, SECOND_BARRIER, SECOND_BARRIER.replace("mem_threadgroup", "mem_device"), {"race"}),
    "a slot that a whole simdgroup writes": (*NORM, PARTIALS_OF_TWO, "if (rank % SIMD_WIDTH == 0) partial", "partial", {"race"}),
    "a pack that two lanes write": (*NORM, NARROW, "return rank + c * size()", "return rank / 2 * 2 + c * size()", {"race"}),
    "a neighbour's totals": (*COTANGENT, READ_AGAIN, "load_pack<V>(gain_bar, i)", "load_pack<V>(gain_bar, i > 0 ? i - 1 : 0)", {"race"}),
    "a row that two threadgroups write": (*NORM, PARTIALS_OF_TWO, "normed += start;", "normed += long(row / 2) * p.width;", {"race"}),
    "a row that another threadgroup reads": (
        *NORM, PARTIALS_OF_TWO, "xs = fetch<V, R>(x, team", "xs = fetch<V, R>(normed + (row ? 0 : p.width), team", {"race"}),
    "one partial too many": (*NORM, PARTIALS_OF_TWO, "s < SG; ++s) total +=", "s <= SG; ++s) total +=", {"uninitialised"}),
    "a barrier for some": (*NORM, PARTIALS_OF_TWO, FIRST_BARRIER, f"if (rank < 32) {FIRST_BARRIER}", {"barrier"}),
    "a simdgroup that returns": (*NORM, PARTIALS_OF_TWO, "if (row >= p.rows)", "if (simdgroup == 1)", {"barrier"}),
    "a simd function for some": (*NORM, NARROW, "x = simd_sum(x);", "if (rank % 2 == 0) x = simd_sum(x);", {"simdgroup"}),
    "a lane that returns": (*NORM, NARROW, "if (row >= p.rows)", "if (row >= p.rows || lane == 5)", {"simdgroup"}),
}


def run_broken(standin, what, off, seed=1, switch_every=0):
    kernel, variant, width, old, new, _ = BROKEN[what]
    text = metal_calls.text_of(kernel)
    assert text.count(old) == 1, "the table is about another text"
    standin.reset(off={"source", *off})
    call = metal_calls.call(kernel, variant, 3, width)
    standin.seed(seed, switch_every)
    [pipeline] = standin.pipelines(text.replace(old, new), [call.instantiation(standin)])
    messages, _alive = call.messages(standin, pipeline)
    known = standin.run(messages)
    complaints = standin.complaints()
    standin.send(pipeline, "release")
    return known, complaints


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_complained_of(standin, what):
    checkers = BROKEN[what][-1]
    for order in ((1, 0), (2, 0), (3, 5)):  # whatever order the lanes run in
        known, complaints = run_broken(standin, what, (), *order)
        assert checkers_of(complaints) and checkers_of(complaints) <= checkers, complaints
        assert known["$status"] == FAILED and known["$words"].splitlines() == complaints
    known, complaints = run_broken(standin, what, checkers)
    assert (known["$status"], complaints) == (COMPLETED, [])


def test_a_complaint_names_the_line(standin):
    _, [complaint] = run_broken(standin, "a write to what is const", ())
    assert re.match(r"readonly: rms_norm<float, float, false, 4, 2, 1, 4> at dtypes.h:\d+: write of 16 bytes to buffer\(0\)", complaint)


# Changes that are right: the same numbers, and nothing to complain of.
RIGHT = {
    "a constant table": (("// T: storage.", "constant float table[] = {0.5f, 0.5f};\n// T: storage."),
                         ("offset = p.scale_offset;", "offset = table[lane % 2];")),
    "a sum by shuffles": (("x = simd_sum(x);", "for (ushort mask = 1; mask < SIMD_WIDTH; mask *= 2) x += simd_shuffle_xor(x, mask);"),),
}


@pytest.mark.parametrize("what", RIGHT)
def test_another_right_kernel_is_not_complained_of(standin, what):
    standin.reset(off={"source"})
    text = metal_calls.text_of("rms_norm")
    for old, new in RIGHT[what]:
        assert text.count(old) == 1, "the table is about another text"
        text = text.replace(old, new)
    call = metal_calls.call(*NORM, 3, NARROW)
    [pipeline] = standin.pipelines(text, [call.instantiation(standin)])
    messages, arrays = call.messages(standin, pipeline)
    assert standin.run(messages)["$status"] == COMPLETED
    assert standin.complaints() == []
    call.check([a.values for a in arrays])
    standin.send(pipeline, "release")


def test_every_checker_is_proven(standin):
    proven = [row[-1] for table in (test_standin.SEQUENCES, test_standin.MORE, BROKEN) for row in table.values()]
    assert set().union(*proven) == set(standin.checkers)
