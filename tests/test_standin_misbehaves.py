"""The stand-in for Metal's driver: what a driver may do that no launcher can prevent, on demand."""

import ctypes
import mmap
import os
import re
import subprocess
import sys

import metal_calls
import pytest
from metal_driver import COMPLETED, FAILED, PAGE, Refused, checkers_of
from test_standin import ROWS, SEQUENCES, WIDTH, WRAP, call, messages, position, text  # noqa: F401, some of them fixtures


def test_the_environment_lowers_the_threads_allowed(standin, messages, monkeypatch):
    monkeypatch.setenv("STANDIN_MAX_THREADS", "32")
    pipeline = messages[position(messages, "setComputePipelineState:")][3]
    assert standin.send(pipeline, "maxTotalThreadsPerThreadgroup") == 32
    standin.run(messages)
    assert checkers_of(standin.complaints()) == {"limits"}


def test_a_command_buffer_that_fails_has_written_what_is_wrong(standin, text, call):
    [pipeline] = standin.pipelines(text, [call.instantiation(standin)])
    messages, arrays = call.messages(standin, pipeline)
    standin.misbehave("fail")
    assert standin.run(messages)["$status"] == FAILED
    with pytest.raises(AssertionError, match="1 of 6000 elements"):
        call.check([a.values for a in arrays])
    standin.send(pipeline, "release")


def test_a_command_buffer_that_fails(standin, messages):
    standin.misbehave("fail", "rms_norm<float")
    known = standin.run(messages)
    assert known["$status"] == FAILED and "rms_norm<float, float, false" in known["$words"] and "as asked for" in known["$words"]
    standin.misbehave("fail", "rms_norm<half")  # another kernel's
    assert standin.run(messages)["$status"] == COMPLETED
    standin.misbehave("fail", None)
    assert standin.run(messages)["$status"] == COMPLETED
    assert standin.complaints() == []


def test_a_complaint_of_a_kernel_fails_its_command_buffer(standin, messages):
    SEQUENCES["a no-copy buffer a page too short"][0](messages)
    known = standin.run(messages)
    assert known["$status"] == FAILED and known["$words"].startswith("bounds: ")


def test_a_command_buffer_that_hangs(standin, messages):
    wait = position(messages, "waitUntilCompleted")
    standin.misbehave("hang")
    known = standin.run([*messages[:wait], ["$status", "$command", "status"]])
    assert known["$status"] not in (COMPLETED, FAILED)
    standin.misbehave("hang", None)
    assert standin.run(messages[wait:], known)["$status"] == COMPLETED
    assert standin.complaints() == []


def test_memory_that_is_in_use_is_not_to_be_read(standin, messages):
    wait = position(messages, "waitUntilCompleted")
    standin.misbehave("hang")
    known = standin.run([*messages[:wait], ["$memory", "$b0", "contents"]])
    standin.misbehave("hang", None)
    standin.run([messages[wait], ["$memory", "$b0", "contents"], *messages[wait + 1:]], known)
    assert standin.complaints() == ["order: contents of a buffer that a command buffer under way uses"]


def test_the_last_result_alone_is_wrong(standin):
    call = metal_calls.call("add_rms_norm", ("float", "float", "false", "false", "true"), ROWS, WIDTH)
    [pipeline] = standin.pipelines(metal_calls.text_of("add_rms_norm"), [call.instantiation(standin)])
    messages, arrays = call.messages(standin, pipeline)
    standin.run(messages)
    right = [a.values.copy() for a in arrays]
    standin.misbehave("wrong last")
    standin.run(messages)
    assert [int((a.values != r).sum()) for a, r in zip(arrays, right)] == [0, 0, 0, 0, 1]
    standin.send(pipeline, "release")


def test_a_kernel_that_computes_wrong(standin, text, call):
    [pipeline] = standin.pipelines(text, [call.instantiation(standin)])
    messages, arrays = call.messages(standin, pipeline)
    standin.misbehave("wrong")
    assert standin.run(messages)["$status"] == COMPLETED
    with pytest.raises(AssertionError, match="1 of 6000 elements"):
        call.check([a.values for a in arrays])
    assert standin.complaints() == []
    standin.send(pipeline, "release")


@pytest.mark.parametrize("how", ["refuse source", "refuse pipeline"])
def test_a_compiler_that_refuses(standin, text, call, how):
    name = call.instantiation(standin)
    standin.misbehave(how, name)
    with pytest.raises(Refused, match=re.escape(name) + ".*as asked for"):
        standin.pipelines(text, [name])
    standin.misbehave(how, None)
    standin.pipelines(text, [name])
    assert standin.complaints() == []


def test_no_bfloat_before_metal_3_1(standin, text, call):
    with pytest.raises(Refused, match="unknown type 'bfloat'"):
        standin.pipelines(text, [call.instantiation(standin)], version=3 << 16)


def test_a_text_that_does_not_compile_says_where(standin, text, call):
    standin.reset(off={"source"})
    with pytest.raises(Refused, match=r"rms_norm.metal:\d+:.*error"):
        standin.pipelines(text.replace("p.epsilon", "p.nothing"), [call.instantiation(standin)])


@pytest.mark.parametrize("how, length", [("nil wrapper", None), ("short wrapper", PAGE)])
def test_a_wrapper_that_is_not_what_was_asked_for(standin, messages, how, length):
    standin.misbehave(how)
    release = [[None, "$b0", "release"]] if length else []
    known = standin.run([messages[0], messages[1], ["$length", "$b0", "length"], *release, messages[-1]])
    assert (known["$b0"] is None) == (length is None) and (known["$length"] or None) == length
    assert standin.complaints() == []


def test_a_buffer_may_be_as_long_as_the_device_says(standin):
    standin.misbehave("longest buffer", str(3 * PAGE))
    assert standin.send(standin.device, "maxBufferLength") == 3 * PAGE
    standin.send(standin.send(standin.device, "newBufferWithLength:options:", 3 * PAGE, 0), "release")
    assert standin.complaints() == []
    assert standin.send(standin.device, "newBufferWithLength:options:", 3 * PAGE + 1, 0) is None
    assert standin.complaints()
    standin.reset()
    assert standin.send(standin.device, "maxBufferLength") > 2**32


def test_any_answer_may_be_nil(standin, messages):
    for what in ("commandBuffer", "newBufferWithLength:options:", "MTLCompileOptions"):
        standin.misbehave("nil", what)
        assert (standin.run(messages[:1] + messages[-1:] + [["$c", "$queue", "commandBuffer"]])["$c"] is None) == (what == "commandBuffer")
        assert (standin.send(standin.device, "newBufferWithLength:options:", PAGE, 0) is None) == (what == "newBufferWithLength:options:")
        assert (standin.class_named("MTLCompileOptions") is None) == (what == "MTLCompileOptions")
        standin.reset()


def test_a_bool_is_one_byte_of_a_register(standin):
    """What lies above it is no zero."""
    for family, answer in ((1009, 1), (1010, 0)):
        assert standin.send(standin.device, "supportsFamily:", family, result=ctypes.c_bool) == bool(answer)
        assert standin.send(standin.device, "supportsFamily:", family) & 0xff == answer
        assert standin.send(standin.device, "supportsFamily:", family) > 0xff
    standin.misbehave("separate memory")
    assert not standin.send(standin.device, "hasUnifiedMemory", result=ctypes.c_bool)
    assert standin.send(standin.device, "respondsToSelector:", standin.library.sel_registerName(b"maxBufferLength"), result=ctypes.c_bool)
    assert not standin.send(standin.device, "respondsToSelector:", standin.library.sel_registerName(b"contents"), result=ctypes.c_bool)


def test_no_copy_buffers_over_one_mapping_of_its_own(standin):
    def wrapped(first, pages):
        buffer = standin.send(standin.device, WRAP, first, pages * PAGE, 0, None)
        if buffer:
            standin.send(buffer, "release")
        return buffer is not None

    memory = mmap.mmap(-1, 16 * PAGE)
    first = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // PAGE) * PAGE
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.mprotect.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    heap = (libc.sbrk(0) - 1) // PAGE * PAGE - PAGE
    assert wrapped(first, 8) and wrapped(heap, 1)
    standin.misbehave("region wrapper")
    assert wrapped(first, 8) and not wrapped(heap, 1)
    libc.mprotect(first + 4 * PAGE, PAGE, mmap.PROT_READ)  # now it is three mappings
    assert wrapped(first, 4) and not wrapped(first, 8) and not wrapped(first, 5)
    assert standin.complaints() == []


def test_the_width_of_a_simdgroup_is_asked_for(standin, messages):
    pipeline = messages[position(messages, "setComputePipelineState:")][3]
    assert standin.send(pipeline, "threadExecutionWidth") == 32
    standin.misbehave("simd width", "16")
    assert standin.send(pipeline, "threadExecutionWidth") == 16


def test_the_environment_asks_for_misbehaviours_which_outlast_a_reset(standin):
    program = (f"from metal_driver import Standin; s = Standin({standin.path!r}); print(s.device)\n"
               "for _ in range(2): print(s.send(None, 'no'), s.class_named('NSString')); s.reset()")
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "STANDIN_MISBEHAVE": "nil:NSString;no device:"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"] * 5


def test_names_are_checked(standin):
    assert not standin.library.standin_check(b"nonsense", 0)
    assert not standin.library.standin_misbehave(b"nonsense", b"")
