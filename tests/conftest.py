"""Options, the `implementation` fixture, and eight CPU devices for the sharding tests."""

import fcntl
import functools
import os
import pathlib
import platform
import subprocess
import sys

import pytest

REQUIRE_KERNELS = os.environ.get("JAX_FUSEDNORM_REQUIRE_KERNELS") == "1"


def pytest_addoption(parser):
    parser.addoption("--implementations", default="jnp,host", help="comma-separated: jnp, host, metal, cuda")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--faults", action="store_true", help="run the tests marked faults too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: large sizes; run with --slow")
    config.addinivalue_line("markers", "faults: planted faults; run with --faults (`make faults`)")
    # before any test module imports jax
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if "cuda" in _implementations(config) else "cpu")
    os.environ.setdefault("JAX_FUSEDNORM_SELF_CHECK", "0")  # the tests are the check; what the package makes of its own: test_selfcheck.py


def pytest_terminal_summary(terminalreporter):
    checked = [count for report in terminalreporter.getreports("passed") for name, count in report.user_properties if name == "checked by msl_lint"]
    if checked:
        terminalreporter.write_line(f"the language check: {len(checked)} kernel texts, {sum(checked)} instantiations")


def _implementations(config):
    return tuple(name.strip() for name in config.getoption("--implementations").split(",") if name.strip())


def pytest_generate_tests(metafunc):
    names = _implementations(metafunc.config)
    kernels = [name for name in names if name != "jnp"]
    if "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", kernels, indirect=True)
    elif "one_kernel" in metafunc.fixturenames:
        metafunc.parametrize("one_kernel", kernels[:1], indirect=True)
    elif "jnp_or_one_kernel" in metafunc.fixturenames:
        metafunc.parametrize("jnp_or_one_kernel", [name for name in names if name == "jnp"] + kernels[:1], indirect=True)
    elif "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", names, indirect=True)


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items for mark in ("slow", "faults") if item.get_closest_marker(mark) and not config.getoption(f"--{mark}")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_terminal_summary(terminalreporter, config):
    """How many planted faults were caught; what random tests drew, from every process of the tests."""
    if config.getoption("--faults"):
        caught, missed = ([r for r in terminalreporter.stats.get(kind, ()) if "test_the_fault_is_caught" in r.nodeid] for kind in ("passed", "failed"))
        terminalreporter.write_line(f"{len(caught)} of {len(caught) + len(missed)} planted faults caught")
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "drawn" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {value}")


@functools.cache
def why_not(implementation):
    """None where `implementation` can run here, else the package's own reason."""
    import jax.numpy as jnp
    from jax_fusednorm import rms_norm

    try:
        rms_norm(jnp.ones((1, 8)), implementation=implementation)
    except NotImplementedError as error:
        return str(error)
    return None


def _present(name):
    if reason := why_not(name):
        (pytest.fail if REQUIRE_KERNELS else pytest.skip)(reason)
    return name


def _watched(request):
    """The implementation, which a stand-in driver that runs it must have nothing to complain of."""
    name = _present(request.param)
    standin = request.getfixturevalue("standin") if name == "metal" and "JAX_FUSEDNORM_METAL_DRIVER" in os.environ else None
    yield name
    assert standin is None or standin.settled() == []


@pytest.fixture
def implementation(request):
    """Every test that takes it runs once per entry of --implementations."""
    yield from _watched(request)


@pytest.fixture
def kernel(request):
    """`implementation`, for tests of what only a kernel promises."""
    yield from _watched(request)


@pytest.fixture
def one_kernel(request):
    """`kernel`, for tests of what is decided before a launcher is chosen: the first of them stands for all."""
    yield from _watched(request)


@pytest.fixture
def jnp_or_one_kernel(request):
    """`implementation`, for the same tests of the reference too."""
    yield from _watched(request)


@pytest.fixture
def host_kernel():
    """For tests of the choice between the host kernels and the reference."""
    return _present("host")


@pytest.fixture
def host_library(host_kernel):
    """The host kernels' library itself."""
    from jax_fusednorm.core import ffi

    return ffi.library("host").handle


@pytest.fixture(scope="session")
def standin_driver():
    """The stand-in for Apple's Metal driver, built from the sources as they are."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the stand-in for Metal runs on x86-64 Linux only")
    from metal_driver import Standin

    root = pathlib.Path(__file__).parent.parent
    with open(root / "Makefile") as lock:  # several test processes build in one folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(["make", "-s", "standin", f"PYTHON={sys.executable}"], cwd=root, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return Standin(built.stdout.strip())


@pytest.fixture
def standin(standin_driver):
    standin_driver.reset()
    yield standin_driver
    standin_driver.reset()


@pytest.fixture(scope="session", autouse=True)
def poisoned_outputs():
    """Kernel outputs start as NaN, so that an element that is never written cannot pass for a zero."""
    from jax_fusednorm.core import ffi

    ffi.poison_outputs(True)
    yield
    ffi.poison_outputs(False)
