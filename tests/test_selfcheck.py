"""A kernel that is not to be trusted is found out before it runs, said once with numbers, and passed over: the result is right."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from jax_fusednorm import add_rms_norm, explain, rms_norm
from jax_fusednorm.cli import calls, selftest
from jax_fusednorm.core import lowering, selfcheck
from jax_fusednorm.core.lowering import METAL_VARIABLE

TESTS = pathlib.Path(__file__).parent
needs_standin = pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")

# Each fault of sys.argv befalls one width. Prints {fault: [error of the result, what runs, warnings, what is said of the kernel by name]}.
FAULTS = """
import json, os, sys, warnings
import jax, jax.numpy as jnp, numpy as np
from jax_fusednorm import explain, rms_norm
from jax_fusednorm.cli import calls, selftest
from jax_fusednorm.core import lowering
from metal_driver import Standin

lowering.on_apple_silicon = lambda: True
standin, said = Standin(os.environ["JAX_FUSEDNORM_METAL_DRIVER"]), {}
for number, how in enumerate(sys.argv[1:]):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, 40 + 8 * number)), jnp.float32)
    if how != "nothing":
        standin.misbehave(how, "" if "wrapper" in how else "rms_norm<float, ones")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = [jax.jit(lambda x: rms_norm(x))(x) for _ in range(2)]
    runs = str(explain(rms_norm, x)["cpu"])
    try:
        named = jax.block_until_ready(rms_norm(x, implementation="metal")) is None
    except NotImplementedError as error:
        named = str(error)
    if how not in ("hang", "nothing"):
        standin.misbehave(how, None)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    said[how] = [max(float(np.abs(g - want).max()) for g in got), runs, [str(w.message) for w in warned], named]
print(json.dumps(said))
"""


def said_of(*faults, **environment):
    environment = {selfcheck.VARIABLE: "60", METAL_VARIABLE: "0", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **environment}
    done = subprocess.run([sys.executable, "-c", FAULTS, *faults], capture_output=True, text=True, check=False, timeout=240,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_standin
def test_a_fault_is_found_warned_of_once_and_passed_over(host_kernel):
    words = {"refuse source": "Metal does not compile rms_norm<float, ones.*: the source is refused, as asked for",
             "refuse pipeline": "Metal does not compile rms_norm<float, ones.*: the pipeline is refused, as asked for",
             "fail": "rms_norm<float, ones.* fails, as asked for",
             "wrong": r"result 0: 1 of \d+ elements are off by more than 0.0001, the worst at \[0, 0\]: \S+ where -?[0-9.]+ was wanted"}
    found = said_of(*words, "nil wrapper", "short wrapper", "nothing")
    for how, (error, runs, warned, named) in found.items():
        assert error < 1e-5, how
        if how in words:
            assert runs.startswith("host: ") and re.search(words[how], runs, re.S), how
            [warning] = warned
            assert re.search(r"the self-check of the metal kernel of rms_norm failed.*On operands float32\[33, \d+\]: .*" + words[how], warning, re.S)
            assert named.startswith("rms_norm: implementation='metal' was asked for, but ") and re.search(words[how], named, re.S), how
        else:
            assert runs.startswith("metal: ") and not warned and named is False, how
    # after the kernels above are compiled, and kept: the time is the hang's alone
    error, runs, warned, named = said_of("hang", "nothing", **{selfcheck.VARIABLE: "2"})["hang"]
    words = r"Metal did not finish rms_norm<float, ones.*> of width 40 in 2 seconds, and runs nothing new in this process"
    assert error < 1e-5 and runs.startswith("host: ") and re.search(words, runs)
    assert len(warned) == 1 and re.search(words, warned[0]) and re.search(words, named)


@pytest.fixture
def on_a_mac(standin, host_kernel, monkeypatch):
    """As if it were one, on which nothing is known yet."""
    for owner, name, value in ((lowering, "on_apple_silicon", lambda: True), (lowering, "METAL_MIN_BYTES", 0), (selfcheck, "ENABLED", True),
                               (selfcheck, "_found", {}), (selfcheck, "_started", {}), (selfcheck, "failures", [])):
        monkeypatch.setattr(owner, name, value)
    return standin


@needs_standin
def test_every_result_is_compared(on_a_mac):
    on_a_mac.misbehave("wrong last", "add_rms_norm<float, ones")
    x = jax.ShapeDtypeStruct((50, 72), jnp.float32)
    with pytest.warns(UserWarning, match=r"On operands float32\[33, 72\], float32\[33, 72\]: result 1: 1 of 2376 elements are off"):
        assert explain(add_rms_norm, x, x)["cpu"].runs == "host"


@needs_standin
@pytest.mark.parametrize("wrong_first", (False, True))
def test_kernels_of_other_options_and_dtypes_are_checked_apart(on_a_mac, recwarn, wrong_first):
    """Of operands of one shape: who is found out says nothing of the others, nor they of it."""
    on_a_mac.misbehave("wrong", "rms_norm<bfloat, bfloat, true")
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((50, 72), (72,)))
    for cast_first in (wrong_first, not wrong_first, wrong_first):
        assert explain(rms_norm, x, scale, multiply_before_cast=not cast_first)["cpu"].runs == ("host" if cast_first else "metal")
    for dtypes in ((jnp.float16, jnp.bfloat16), (jnp.bfloat16, jnp.float32)):
        operands = [a.update(dtype=dtype) for a, dtype in zip((x, scale), dtypes)]
        assert explain(rms_norm, *operands, multiply_before_cast=False)["cpu"].runs == "metal"
    assert len(recwarn) == 1


@needs_standin
def test_a_distrusted_kernel_does_not_run_where_any_kernel_is_asked_for(on_a_mac, recwarn):
    on_a_mac.misbehave("wrong", "rms_norm<float, ones")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, 72)), jnp.float32)
    got, wide = jax.jit(lambda x: rms_norm(x, implementation="kernel"))(x), np.asarray(x, np.float64)
    np.testing.assert_allclose(got, wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6), rtol=1e-5)
    assert explain(rms_norm, x, implementation="kernel")["cpu"].runs == "host"
    assert explain(rms_norm, x, implementation="metal")["cpu"].runs is None
    assert len(recwarn) == 1


@needs_standin
def test_selftest_finds_it_too(tmp_path):
    path = tmp_path / "report.txt"
    done = subprocess.run([sys.executable, "-m", "jax_fusednorm", "selftest", "--ops", "rms_norm", "--dtypes", "float32", "--implementations",
                           "metal", "--report", path], capture_output=True, text=True, check=False, timeout=240,
                          env={**os.environ, selfcheck.VARIABLE: "60", "STANDIN_MISBEHAVE": "wrong:rms_norm_cotangent<float"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^rms_norm, float32, metal: the self-check of the metal kernel of rms_norm_cotangent failed.*: result 0: 1 of \d+ elements",
                     path.read_text(), re.M)


def test_what_every_op_declares_is_enough_to_check_it(host_kernel, monkeypatch):
    """By the host's kernels, which are trusted otherwise."""
    monkeypatch.setattr(selfcheck, "LAUNCHERS", ("host",))
    monkeypatch.setattr(selfcheck, "ENABLED", True)
    monkeypatch.setattr(selfcheck, "_found", found := {})
    for call in calls.CALLS:
        last = call.options(call.small)[-1:]
        call = dataclasses.replace(call, options=lambda width, last=last: last)
        operands = jax.tree.map(lambda o: o.update(dtype=jnp.float32) if o.ndim == 1 and o.dtype == jnp.bfloat16 else o,  # scales
                                calls.shapes(call, 64, call.small, "bfloat16"))
        out = jax.tree.leaves(jax.eval_shape(functools.partial(call.op, implementation="jnp", **last[0]), *operands))
        jax.jit(lambda o, c, call=call: selftest.results_and_gradients(call, call.small, "host", o, c)).lower(operands, out)
    checked = {primitive.name for primitive, *_ in found}
    assert {call.name for call in calls.CALLS} <= checked and {"rms_norm_cotangent", "gated_group_rms_norm_cotangent"} <= checked
    assert set(found.values()) == {None}


@needs_standin
def test_auto_on_a_mac_is_metal_for_calls_that_move_enough(host_kernel, monkeypatch, standin):
    def runs(rows, implementation="auto", op=rms_norm):
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
        return str(explain(op, *[x] * (1 + (op is add_rms_norm)), implementation=implementation)["cpu"])

    assert runs(2**14).startswith("host") and METAL_VARIABLE not in runs(2**14)  # not here
    monkeypatch.setattr(lowering, "on_apple_silicon", lambda: True)
    few, many = 2**13 - 1, 2**13  # 64 MiB read and written
    assert runs(many).startswith("metal: ")
    assert re.search(rf"host: .*; metal is for calls that move 6.71e\+07 bytes \({METAL_VARIABLE}\), and this one moves 6.71e\+07", runs(few))
    assert runs(few // 2, op=add_rms_norm).startswith("host") and runs(few // 2 + 1, op=add_rms_norm).startswith("metal")
    assert runs(few, "kernel").startswith("host") and runs(many, "kernel").startswith("metal")
    assert runs(few, "metal").startswith("metal") and runs(many, "host").startswith("host")
    monkeypatch.setattr(lowering, "METAL_MIN_BYTES", 0)
    assert runs(1).startswith("metal")
    monkeypatch.setattr(lowering, "METAL_MIN_BYTES", np.inf)
    assert runs(many).startswith("host")
    assert standin.count("sent commit") == 0


@pytest.mark.parametrize("value, bytes_, warned", ((None, 2**26, False), ("1e6", 1e6, False), ("many", 2**26, True)))
def test_the_fewest_bytes_come_from_the_environment(monkeypatch, recwarn, value, bytes_, warned):
    monkeypatch.delenv(METAL_VARIABLE, raising=False)
    if value:
        monkeypatch.setenv(METAL_VARIABLE, value)
    assert lowering._metal_min_bytes() == bytes_
    assert [METAL_VARIABLE in str(w.message) for w in recwarn] == [True] * warned


def test_what_is_checked_is_the_call_with_fewer_rows():
    def small(primitive, operand_axes, *avals, uncut=""):
        primitive = type("", (), dict(axes=lambda self, params: (operand_axes, ()), whole="d", uncut=uncut))()
        return tuple(shape for shape, _ in selfcheck._small(primitive, [jax.ShapeDtypeStruct(a, jnp.float32) for a in avals], {}))

    assert small(None, ("*d", "d"), (4096, 300), (300,)) == ((33, 300), (300,))
    assert small(None, ("*d", "*d", "d"), (2, 7, 4096, 300), (2, 7, 4096, 300), (300,)) == ((2, 7, 2, 300), (2, 7, 2, 300), (300,))
    assert small(None, ("*d",), (0, 300)) == ((0, 300),)
    assert small(None, ("*thd", "*t", "pc"), (2048, 32, 128), (2048,), (64, 2)) == ((5, 5, 128), (5,), (64, 2))
    assert small(None, ("*k", "nk", "d"), (64, 300), (500, 300), (20,), uncut="kn") == ((33, 300), (500, 300), (20,))
    [tokens] = jax.export.symbolic_shape("t")
    assert small(None, ("td",), (tokens, 300), uncut="t") == ((5, 300),)


def test_a_difference_is_told_from_a_rounding():
    want = np.linspace(0.5, 2, 300).reshape(3, 100)
    for dtype in cases.DTYPES:
        rounded = np.asarray(jnp.asarray(want, dtype))
        allowed = selfcheck.tolerance([np.arange(3), rounded, np.ones(3, np.float32)])
        assert allowed == {"float32": 1e-4, "float16": 2.0**-8, "bfloat16": 2.0**-5}[dtype]
        assert selfcheck.difference(rounded, want, allowed) is None
        for wrong in (np.nan, 0, 3):
            broken = rounded.copy()
            broken[1, 7] = wrong
            assert f"1 of 300 elements are off by more than {allowed:.1g}, the worst at [1, 7]: {wrong:.6g} where" in (
                selfcheck.difference(broken, want, allowed))
        assert selfcheck.difference(np.roll(rounded, 1, -1), want, allowed) is not None
    assert "its shape is [2, 100] where [3, 100] was wanted" in selfcheck.difference(rounded[:2], want, allowed)
    assert selfcheck.difference(rounded[:0], want[:0], allowed) is None
