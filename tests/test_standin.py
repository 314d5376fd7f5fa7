"""The stand-in for Metal's driver: it complains of every wrong use of Metal there is a checker for, and of nothing else."""

import concurrent.futures
import contextlib
import ctypes
import mmap
import threading

import metal_calls
import pytest
from metal_driver import COMPLETED, FAILED, PAGE, Refused, Size, checkers_of

ROWS, WIDTH = 20, 300  # several simdgroups a row, two pages an array


@pytest.fixture(scope="module")
def text():
    return metal_calls.text_of("rms_norm")


@pytest.fixture
def call():
    return metal_calls.call("rms_norm", ("float", "float", "false"), ROWS, WIDTH)


@pytest.fixture
def messages(standin, text, call):
    [pipeline] = standin.pipelines(text, [call.instantiation(standin)])
    messages, _alive = call.messages(standin, pipeline)
    yield messages
    standin.send(pipeline, "release")


def test_a_right_sequence_is_right(standin, messages, call):
    def live():
        return [standin.count(f"live {kind}") for kind in ("MTLBuffer", "MTLCommandBuffer", "MTLComputeCommandEncoder", "NSString")]

    before = live()  # the launcher, if it ran in this process, keeps buffers for copies
    known = standin.run(messages)
    assert (known["$status"], known["$words"]) == (COMPLETED, None)
    assert standin.complaints() == []
    assert live() == before
    assert standin.count("sent commit") == 1 and standin.dispatched(1) is None


# ---- wrong sequences of messages: what is changed in the right one, and who complains

def position(messages, selector):
    return next(i for i, m in enumerate(messages) if m[2] == selector)


def without(selector):
    def change(messages):
        del messages[position(messages, selector)]
    return change


def again(selector):
    def change(messages):
        messages.insert(position(messages, selector), list(messages[position(messages, selector)]))
    return change


def with_argument(selector, number, value):
    def change(messages):
        message = messages[position(messages, selector)]
        message[3 + number] = value(message[3 + number]) if callable(value) else value
    return change


def moved(selector, after):
    def change(messages):
        message = messages.pop(position(messages, selector))
        messages.insert(position(messages, after) + 1, message)
    return change


def after(selector, *more):
    def change(messages):
        at = position(messages, selector) + 1
        messages[at:at] = [list(m) for m in more]
    return change


def in_place_of(selector, *more):
    def change(messages):
        at = position(messages, selector)
        messages[at:at + 1] = [list(m) for m in more]
    return change


def second_dispatch(barrier):
    """The result becomes the operand of a second dispatch into the first operand, through other wrappers of the same pages."""
    def change(messages):
        wraps = [m for m in messages if m[2].startswith("newBufferWithBytes")]
        twins = [[f"{m[0]}again", *m[1:]] for m in (wraps[0], wraps[-1])]
        offset = next(m[4] for m in messages if m[2] == "setBuffer:offset:atIndex:")
        at = position(messages, "endEncoding")
        dispatch = messages[at - 1]
        messages[at:at] = [
            *([[None, "$encoder", "memoryBarrierWithScope:", barrier]] if barrier else []),
            *twins,
            [None, "$encoder", "setBuffer:offset:atIndex:", twins[1][0], offset, 0],
            [None, "$encoder", "setBuffer:offset:atIndex:", twins[0][0], offset, 2],
            dispatch,
        ]
        messages[-1:-1] = [[None, t[0], "release"] for t in twins]
    return change


BUFFER, BYTES, SCRATCH = "setBuffer:offset:atIndex:", "setBytes:length:atIndex:", "setThreadgroupMemoryLength:atIndex:"
WRAP, DISPATCH = "newBufferWithBytesNoCopy:length:options:deallocator:", "dispatchThreadgroups:threadsPerThreadgroup:"

SEQUENCES = {
    "a buffer that is not bound": (without(BUFFER), {"binding"}),
    "a nil buffer": (with_argument(BUFFER, 0, None), {"binding"}),
    "an offset past the buffer": (with_argument(BUFFER, 1, 1 << 30), {"binding"}),
    "an index past 30": (after(BUFFER, [None, "$encoder", BUFFER, "$b0", 0, 31]), {"binding"}),
    "no params": (without(BYTES), {"binding"}),
    "params cut short": (with_argument(BYTES, 1, 12), {"binding"}),
    "no pipeline": (without("setComputePipelineState:"), {"binding"}),
    "no threadgroup memory": (without(SCRATCH), {"binding"}),
    "threadgroup memory at another index": (after(SCRATCH, [None, "$encoder", SCRATCH, 16, 1]), {"binding"}),
    "more than 4 KiB of params": (in_place_of(BYTES, [None, "$encoder", BYTES, bytes(4097), 4097, 3]), {"limits"}),
    "threadgroup memory that is no multiple of 16": (with_argument(SCRATCH, 0, 140), {"limits"}),
    "more than 32 KiB of threadgroup memory": (with_argument(SCRATCH, 0, 32768 + 16), {"limits"}),
    "an empty grid": (with_argument(DISPATCH, 0, Size(0, 1, 1)), {"limits"}),
    "a grid of two dimensions": (with_argument(DISPATCH, 0, Size(5, 2, 1)), {"limits"}),
    "half a simdgroup": (with_argument(DISPATCH, 1, Size(48, 1, 1)), {"limits"}),
    "more threads than the pipeline allows": (with_argument(DISPATCH, 1, Size(2048, 1, 1)), {"limits"}),
    "no whole pages": (with_argument(WRAP, 1, lambda n: n - 4096), {"pages", "binding"}),
    "a pointer inside a page": (with_argument(WRAP, 0, lambda p: p + 64), {"pages", "binding"}),
    "a no-copy buffer of private storage": (with_argument(WRAP, 2, 32), {"pages", "binding"}),
    "a no-copy buffer a page too short": (with_argument(WRAP, 1, lambda n: n - PAGE), {"bounds"}),
    "no endEncoding": (without("endEncoding"), {"order"}),
    "endEncoding twice": (again("endEncoding"), {"order"}),
    "a binding after endEncoding": (moved(SCRATCH, "endEncoding"), {"order", "binding"}),
    "a second encoder before endEncoding": (again("computeCommandEncoder"), {"order"}),
    "an encoder after commit": (after("commit", ["$e", "$command", "computeCommandEncoder"], [None, "$e", "endEncoding"]), {"order"}),
    "commit twice": (again("commit"), {"order"}),
    "a wait before commit": (moved("commit", "waitUntilCompleted"), {"order"}),
    "a wrapper that is not released": (without("release"), {"leak"}),
    "a pool that is not popped": (without("pop"), {"leak"}),
    "a wrapper released twice": (again("release"), {"object"}),
    "a message to what is gone": (after("release", [None, "$b0", "length"]), {"object"}),
    "a wrapper released before the dispatch": (moved("release", WRAP), {"object", "binding"}),
    "a wrapper released before the end, which nothing retains": (
        lambda m: (in_place_of("commandBuffer", ["$command", "$queue", "commandBufferWithUnretainedReferences"])(m),
                   moved("release", DISPATCH)(m)), {"object"}),
    "no pool": (lambda m: (without("push")(m), without("pop")(m)), {"pool", "leak"}),
    "a pool popped twice": (again("pop"), {"pool"}),
    "a selector that does not exist": (after(DISPATCH, [None, "$encoder", "setBuffer:atIndex:", "$b0", 0]), {"selector"}),
    "a dependent dispatch without a memoryBarrier": (second_dispatch(None), {"hazard"}),
    "a memoryBarrier for textures": (second_dispatch(2), {"hazard"}),
}


# The same checkers on what the messages above do not show.

def compiled(**options):
    return lambda standin, text, instantiation: standin.pipelines(text, [instantiation], **options)


def older_fast_math(standin, text, instantiation):
    standin.misbehave("macOS 14")
    standin.pipelines(text, [instantiation], fast_math=None, math_mode=None, functions=None)


def a_mode_that_older_systems_have_not(standin, text, instantiation):
    standin.misbehave("macOS 14")
    standin.pipelines(text, [instantiation])


def no_source(standin, text, instantiation):
    standin.misbehave("nil", "stringWithUTF8String:")
    with contextlib.suppress(Exception):
        standin.pipelines(text, [instantiation])


def more_than_a_buffer_has(standin, text, instantiation):
    standin.misbehave("longest buffer", str(3 * PAGE))
    memory = mmap.mmap(-1, 8 * PAGE)
    first = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // PAGE) * PAGE
    for selector, *arguments in (("newBufferWithLength:options:", 4 * PAGE, 0), (WRAP, first, 4 * PAGE, 0, None)):
        standin.send(standin.send(standin.device, selector, *arguments), "release")


def another_text(standin, text, instantiation):
    standin.pipelines(text.replace("p.epsilon", "0.0f"), [instantiation])


def other_threads(standin, text, instantiation):
    with standin.pool():
        command = standin.send(standin.queue, "commandBuffer")
        encoder = standin.send(command, "computeCommandEncoder")
        worker = threading.Thread(target=lambda: standin.send(encoder, "endEncoding"))
        worker.start()
        worker.join()


MORE = {
    "fast math": (compiled(fast_math=1), {"math"}),
    "fast math by default": (compiled(fast_math=None), {"math"}),
    "the mode that is the default": (compiled(math_mode=None), {"math"}),
    "relaxed mathematics": (compiled(math_mode=1), {"math"}),
    "the functions that are the default": (compiled(functions=None), {"math"}),
    "fast math, before there were modes": (older_fast_math, {"math"}),
    "a mode where there are none": (a_mode_that_older_systems_have_not, {"selector"}),
    "no language version": (compiled(version=None), {"language"}),
    "another text": (another_text, {"source"}),
    "no text": (no_source, {"source"}),
    "another thread": (other_threads, {"thread"}),
    "more than a buffer has": (more_than_a_buffer_has, {"limits"}),
}


@pytest.mark.parametrize("what", SEQUENCES)
def test_a_wrong_sequence_is_complained_of(standin, messages, what):
    change, checkers = SEQUENCES[what]
    change(messages)
    standin.run(messages)
    complaints = standin.complaints()
    assert checkers_of(complaints) == checkers, complaints
    standin.reset(off=checkers)
    standin.run(messages)
    assert standin.complaints() == []


@pytest.mark.parametrize("what", MORE)
def test_another_wrong_use_is_complained_of(standin, text, call, what):
    act, checkers = MORE[what]
    with pytest.raises(Refused, match="not of this tree") if what == "another text" else contextlib.nullcontext():
        act(standin, text, call.instantiation(standin))
    assert checkers_of(standin.complaints()) == checkers
    standin.reset(off=checkers)
    act(standin, text, call.instantiation(standin))
    assert standin.complaints() == []


def test_what_is_released_later_was_no_leak(standin):
    """Another thread's call may be under way while a test asks."""
    options = standin.send(standin.class_named("MTLCompileOptions"), "new")
    assert checkers_of(standin.complaints()) == {"leak"}
    standin.send(options, "release")
    assert standin.complaints() == []


# ---- what is right

RIGHT = {
    "a memoryBarrier between dependent dispatches": second_dispatch(1),
    "a wrapper released before the end, which the command buffer retains": moved("release", DISPATCH),
    "a binding made again": again(BUFFER),
    "an encoder after the first": after("endEncoding", ["$e", "$command", "computeCommandEncoder"], [None, "$e", "endEncoding"]),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_is_not_complained_of(standin, messages, what):
    RIGHT[what](messages)
    assert standin.run(messages)["$status"] == COMPLETED
    assert standin.complaints() == []


def test_calls_from_several_threads(standin, text, call):
    [pipeline] = standin.pipelines(text, [call.instantiation(standin)])
    made = [call.messages(standin, pipeline) for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        statuses = list(threads.map(lambda m: standin.run(m[0])["$status"], made))
    assert statuses == [COMPLETED] * len(made) and standin.complaints() == []
    for _, arrays in made:
        call.check([a.values for a in arrays])
    standin.send(pipeline, "release")
