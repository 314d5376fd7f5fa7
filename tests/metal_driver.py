"""Launches kernels through a Metal driver with nothing but its Objective-C entry points, message by message."""

import contextlib
import ctypes
import mmap
import time

import numpy as np

PAGE = 16384  # Apple silicon's
LANGUAGE_3_1 = 3 << 16 | 1
COMPLETED, FAILED = 4, 5


class Size(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulong) for name in ("width", "height", "depth")]


class Bytes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("read", "written", "unique_read", "unique_written")]


class Dispatch(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_char * 128),
                *((name, ctypes.c_uint64) for name in ("groups", "threads", "threadgroup_bytes", "barriers", "exchanges")),
                ("buffers", Bytes * 31), ("threadgroup_memory", Bytes)]


class Refused(Exception):
    """An NSError's words."""


class Standin:
    """The stand-in driver: its messages as a launcher sends them, and what tests ask it (metal_src/emulator/standin.h)."""

    def __init__(self, path):
        self.path = path
        self.library = ctypes.CDLL(path)
        for name, result in {"standin_complaints": ctypes.c_char_p, "standin_checkers": ctypes.c_char_p, "standin_count": ctypes.c_long,
                             "objc_getClass": ctypes.c_void_p, "sel_registerName": ctypes.c_void_p,
                             "objc_autoreleasePoolPush": ctypes.c_void_p, "MTLCreateSystemDefaultDevice": ctypes.c_void_p}.items():
            getattr(self.library, name).restype = result
        self.library.standin_dispatched.restype = ctypes.POINTER(Dispatch)
        self.library.objc_autoreleasePoolPop.argtypes = [ctypes.c_void_p]
        self.library.standin_seed.argtypes = [ctypes.c_uint64, ctypes.c_uint]
        self.msg_send = ctypes.cast(self.library.objc_msgSend, ctypes.c_void_p).value
        self.checkers = self.library.standin_checkers().decode().split(",")
        self.device = self.library.MTLCreateSystemDefaultDevice()
        self.queue = self.send(self.device, "newCommandQueue")

    # What a launcher does.

    def send(self, to, selector, *arguments, result=ctypes.c_void_p):
        kinds = {int: ctypes.c_ulong, bytes: ctypes.c_char_p, Size: Size}
        types = [kinds.get(type(a), ctypes.c_void_p) for a in arguments]
        method = ctypes.CFUNCTYPE(result, ctypes.c_void_p, ctypes.c_void_p, *types)(self.msg_send)
        return method(to, self.library.sel_registerName(selector.encode()), *arguments)

    @contextlib.contextmanager
    def pool(self):
        pool = self.library.objc_autoreleasePoolPush()
        try:
            yield
        finally:
            self.library.objc_autoreleasePoolPop(pool)

    def class_named(self, name):
        return self.library.objc_getClass(name.encode())

    def string(self, text):
        return self.send(self.class_named("NSString"), "stringWithUTF8String:", text.encode())

    def words(self, error):
        return self.send(self.send(error, "localizedDescription"), "UTF8String", result=ctypes.c_char_p).decode()

    def pipelines(self, text, kernels, *, version=LANGUAGE_3_1, fast_math=0, math_mode=0, functions=1):
        """A pipeline for each instantiation, "rms_norm<float, ...>", of a text."""
        lines = "".join(f'template [[host_name("{k}")]] [[kernel]] decltype({k}) {k};\n' for k in kernels)
        error = ctypes.c_void_p()
        with self.pool(), contextlib.ExitStack() as stack:
            def owned(answer):
                if not answer:
                    raise Refused(self.words(error.value))
                stack.callback(self.send, answer, "release")
                return answer

            options = owned(self.send(self.class_named("MTLCompileOptions"), "new"))
            for setter, value in (("setLanguageVersion:", version), ("setFastMathEnabled:", fast_math), ("setMathMode:", math_mode),
                                  ("setMathFloatingPointFunctions:", functions)):
                if value is not None:
                    self.send(options, setter, value)
            library = owned(self.send(self.device, "newLibraryWithSource:options:error:", self.string(text + lines), options,
                                      ctypes.byref(error)))
            functions = [owned(self.send(library, "newFunctionWithName:", self.string(k))) for k in kernels]
            made = [self.send(self.device, "newComputePipelineStateWithFunction:error:", f, ctypes.byref(error)) for f in functions]
            if not all(made):
                raise Refused(self.words(error.value))
            return made

    def run(self, messages, known=None):
        """Sends messages [name of the result, receiver, selector, *arguments], where "$name" stands for an earlier result.

        "push" and "pop", sent to nobody, are the autorelease pool's. Returns the results; `known`: those of messages sent before.
        """
        known = known or {"$device": self.device, "$queue": self.queue}
        for name, receiver, selector, *arguments in messages:
            arguments = [known[a] if isinstance(a, str) else a for a in arguments]
            if selector == "push":
                known[name] = self.library.objc_autoreleasePoolPush()
            elif selector == "pop":
                self.library.objc_autoreleasePoolPop(*arguments)
            elif selector == "words":
                known[name] = known[receiver] and self.words(known[receiver])
            else:
                known[name] = self.send(known[receiver], selector, *arguments)
        return known

    # What tests ask.

    def reset(self, off=()):
        """Forgets everything; the checkers named in `off` are off until the next reset."""
        self.library.standin_reset()
        for checker in off:
            assert self.library.standin_check(checker.encode(), 0), checker

    def run_some(self, first, count):
        """Until the next reset dispatches run only `count` of their threadgroups."""
        self.library.standin_run_some(first, count)

    def seed(self, seed, switch_every=0):
        self.library.standin_seed(seed, switch_every)

    def complaints(self):
        return self.library.standin_complaints().decode().splitlines()

    def settled(self, seconds=10):
        """The complaints once no call is under way: a replica whose result nobody reads may still be running when its test is done."""
        until = time.monotonic() + seconds
        while (complaints := self.complaints()) and time.monotonic() < until:
            time.sleep(0.01)
        return complaints

    def misbehave(self, how, of=""):
        assert self.library.standin_misbehave(how.encode(), of if of is None else of.encode())

    def count(self, what):
        return self.library.standin_count(what.encode())

    def shape(self, width, itemsize, head=False):
        """V, R, SG, TEAMS, of a row or a head."""
        shape = (ctypes.c_int * 4)()
        self.library.standin_shape(width, itemsize, head, shape)
        return tuple(shape)

    def dispatched(self, number=0):
        """A Dispatch, or None."""
        ran = self.library.standin_dispatched(number)
        return ran.contents if ran else None


def checkers_of(complaints):
    return {complaint.split(":")[0] for complaint in complaints}


class Array:
    """A copy of an array that starts 64 bytes into a page, with a whole page before and after it."""

    def __init__(self, values):
        self.bytes = values.nbytes
        self.memory = mmap.mmap(-1, values.nbytes + 4 * PAGE)
        start = -np.frombuffer(self.memory, np.uint8).ctypes.data % PAGE + PAGE + 64
        self.values = np.frombuffer(self.memory, values.dtype, values.size, start).reshape(values.shape)
        self.values[...] = values
        self.address = self.values.ctypes.data


def launch(pipeline, arrays, params, groups, threads, threadgroup_bytes):
    """The messages of one call: one dispatch over no-copy buffers, in one command buffer that is waited for."""
    wrap, bind, unwrap = [], [], []
    for i, array in enumerate(arrays):
        first = array.address // PAGE * PAGE
        offset, length = array.address - first, -(-(array.address + array.bytes - first) // PAGE) * PAGE
        wrap += [[f"$b{i}", "$device", "newBufferWithBytesNoCopy:length:options:deallocator:", first, length, 0, None],
                 ["$mark", f"$b{i}", "addDebugMarker:range:", None, offset, array.bytes]]
        bind += [[None, "$encoder", "setBuffer:offset:atIndex:", f"$b{i}", offset, i]]
        unwrap += [[None, f"$b{i}", "release"]]
    return [
        ["$pool", None, "push"],
        *wrap,
        ["$command", "$queue", "commandBuffer"],
        ["$encoder", "$command", "computeCommandEncoder"],
        [None, "$encoder", "setComputePipelineState:", pipeline],
        *bind,
        [None, "$encoder", "setBytes:length:atIndex:", params, len(params), len(arrays)],
        [None, "$encoder", "setThreadgroupMemoryLength:atIndex:", threadgroup_bytes, 0],
        [None, "$encoder", "dispatchThreadgroups:threadsPerThreadgroup:", Size(groups, 1, 1), Size(threads, 1, 1)],
        [None, "$encoder", "endEncoding"],
        [None, "$command", "commit"],
        [None, "$command", "waitUntilCompleted"],
        ["$status", "$command", "status"],
        ["$error", "$command", "error"],
        ["$words", "$error", "words"],
        *unwrap,
        [None, None, "pop", "$pool"],
    ]
