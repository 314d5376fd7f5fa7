"""The Metal launcher as a program over the stand-in: every answer that a driver may give, where it is loaded from, threads and memory."""

import re
import shutil
import subprocess

import cases
import pytest
from launcher_program import COPIES, ONE, RIGHT, UNCHECKED, WRONG, Built, misbehaving

pytestmark = pytest.mark.skipif(not cases.STAND_IN, reason="no stand-in for Metal's driver: `make test` brings one")


def words(what):
    """A test's name that -k can select by."""
    return what.replace(",", "").replace(" ", "_")


@pytest.fixture(scope="module")
def checked(standin_driver, tmp_path_factory):
    """The program with the compiler's checks of memory and of arithmetic."""
    return Built(tmp_path_factory.mktemp("checked"), standin_driver, "-fsanitize=address,undefined")


@pytest.fixture(scope="module")
def raced(standin_driver, tmp_path_factory):
    return Built(tmp_path_factory.mktemp("raced"), standin_driver, "-fsanitize=thread")


@pytest.fixture(scope="module")
def run(checked):
    return checked.program()


@pytest.mark.parametrize("what", RIGHT, ids=words)
def test_what_a_driver_may_do_and_be_used_all_the_same(run, what):
    arguments, environment = RIGHT[what]
    assert run(*arguments, **environment) == (0, "right\n")


@pytest.mark.parametrize("what", WRONG, ids=words)
def test_what_a_driver_does_wrong_is_an_error_that_says_it(run, what):
    arguments, environment, error = WRONG[what]
    status, said = run(*arguments, **environment)
    assert status == 1 and re.fullmatch(error, said.strip()), said


def test_a_first_run_that_fails_leaves_the_arrays_as_they_were(run):
    """Later ones need not: what XLA makes of an error reads no result."""
    assert "touched" not in run(*ONE, **misbehaving("fail"))[1]
    assert "touched" in run(*ONE, **misbehaving("fail"), **UNCHECKED)[1]


@pytest.mark.parametrize("changed, about", (
    ((), "a stand-in for Metal, Apple GPU family 9, unified memory, up to 32768 bytes of threadgroup memory, buffers of up to 17179869184 bytes, "
         "pages of 16384 bytes, arrays of up to 17179869184 bytes"),
    (("longest buffer:40000",), ".* buffers of up to 40000 bytes, .*, arrays of up to 32768 bytes"),
    (("no device",), "there is no Metal device, arrays of up to 0 bytes"),
    (("separate memory",), ".* family 9, separate memory, .*"),
    (("nil:name",), "a device without a name, .*"),
))
def test_what_is_said_of_a_device(run, changed, about):
    status, said = run("status", **misbehaving(*changed))
    assert status == 0 and re.fullmatch(f"{about}\nright\n", said)


# ---- where Apple's libraries lie, in a folder that stands for the root of a Mac's disk

PLACES = ("System/Library/Frameworks/CoreGraphics.framework/CoreGraphics", "System/Library/Frameworks/Metal.framework/Metal",
          "usr/lib/libobjc.A.dylib")


@pytest.fixture
def disk(standin_driver, tmp_path):
    """Metal and libobjc are the stand-in, which answers for a device once CoreGraphics has been loaded."""
    graphics, metal, objective_c = (tmp_path / place for place in PLACES)
    for path in (graphics, metal, objective_c):
        path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", graphics], check=True)
    for path in (metal, objective_c):
        path.symlink_to(standin_driver.path)
    return tmp_path


def from_disk(run, disk):
    return run(*ONE, JAX_FUSEDNORM_METAL_DRIVER=f"{disk}/", STANDIN=disk / PLACES[1])


def test_the_driver_is_loaded_from_where_it_lies_on_a_mac(run, disk):
    assert from_disk(run, disk) == (0, "right\n")


@pytest.mark.parametrize("place", PLACES)
def test_a_library_that_is_not_there_is_named(run, disk, place):
    (disk / place).unlink()
    status, said = from_disk(run, disk)
    assert status == 1 and re.search(f"the Metal driver cannot be loaded: {disk}/+{place}: cannot open shared object", said)


@pytest.mark.parametrize("place, function", ((PLACES[1], "MTLCreateSystemDefaultDevice"), (PLACES[2], "objc_msgSend")))
def test_a_function_that_is_not_there_is_named(run, disk, place, function):
    (disk / place).unlink()
    shutil.copy(disk / PLACES[0], disk / place)
    status, said = from_disk(run, disk)
    assert status == 1 and f"the Metal driver cannot be loaded: it has no {function}\n" in said


# ---- threads and memory, under the compiler's sanitizers

CHANGES = {
    "raced": (
        (("buffers.c", "pthread_mutex_lock(&kept.lock);\n  for", "for"), "data race", ("threads", 8, 200), COPIES),
        (("text.h", "std::lock_guard<std::mutex> guard(lock);", ""), "data race", ("threads", 8, 200), {}),
        (("trial.cc", "    std::lock_guard<std::mutex> guard(trial->lock);", ""), "data race", ("threads", 8, 5), {}),
    ),
    "checked": (
        (("buffers.c", "array->data, array->memory, array->bytes)", "array->data, array->memory, array->bytes + 4096)"),
         "heap-buffer-overflow", ("threads", 1, 5), COPIES),
        (("trial.cc", "if (trial->error.success()) trial->write_back();", ""), "a wrong value", ("threads", 1, 5), {}),
        (("metal.c", "  free(bound);\n", ""), "detected memory leaks", ("threads", 2, 5), {}),
        (("metal.c", "if (i) SEND", "if (i > 1) SEND"), "hazard: ", ("chain",), {}),
        (("metal.c", "send(encoder, \"endEncoding\");", ""), "order: ", ("chain",), {}),
        (("metal.c", "driver.pool_pop(pool);\n  free", "free"), "leak: ", ("chain",), {}),
        (("buffers.c", "send(array->buffer, \"release\");\n    return;", "return;"), "leak: ", ("chain",), {}),
    ),
}


@pytest.mark.parametrize("what", [what for what in RIGHT if "threads" in what], ids=words)
def test_threads_do_not_race(raced, what):
    arguments, environment = RIGHT[what]
    assert raced.program()(*arguments, **environment) == (0, "right\n")


@pytest.mark.parametrize("sanitizer", CHANGES)
def test_the_sanitizers_see_what_is_not_clean(sanitizer, request):
    built = request.getfixturevalue(sanitizer)
    for change, complaint, arguments, environment in CHANGES[sanitizer]:
        run = built.program(change)
        # threads need not meet in one run
        answers = (run(*arguments, **environment) for _ in range(10))
        assert any(status != 0 and complaint in text for status, text in answers), f"{change} is not seen"
