"""Any call, however it is cut over devices, gives what one device gives, and raises only where its jnp form does."""

import os

import jax
import numpy as np
import pytest

import sharding_draws
from ops import assert_trees_close

pytestmark = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")
SEED = int(os.environ.get("JAX_FUSEDNORM_TEST_SEED", "0"))
CHUNKS, SLOW_CHUNKS, PROGRAMS, CALLS = 9, 100, 6, 6  # a program holds several calls, for its compilation costs more than they do


def raised(draw, f, placed):
    """What tracing the call raises, or None."""
    with jax.set_mesh(draw.mesh):
        try:
            jax.eval_shape(draw.program(f), *placed)
        except Exception as error:  # pylint: disable=broad-except
            return error
    return None


def check(draw, got):
    assert_trees_close(jax.tree.map(np.asarray, got), draw.want(), rtol=2e-4, atol=2e-4)


def run_alone(draw, program, args):
    """The result; None where XLA does not compile the jnp form either."""
    try:
        return jax.jit(program)(*args)
    except Exception as error:  # pylint: disable=broad-except
        try:
            jax.jit(draw.program(draw.case.plain()))(*args)
        except type(error):
            return None
        raise AssertionError(f"{draw}: {error}") from error


def run_together(draws, placed, mesh):
    """All in one program; where it fails, one by one."""
    with jax.set_mesh(mesh):
        programs = [draw.program(draw.case.bound("auto")) for draw in draws]
        try:
            return jax.jit(lambda all_args: [p(*args) for p, args in zip(programs, all_args)])(placed)
        except Exception:  # pylint: disable=broad-except
            return [run_alone(draw, p, args) for draw, p, args in zip(draws, programs, placed)]


def checked(rng):
    """Draws calls over one mesh and checks them. How many of them neither form takes."""
    mesh = sharding_draws.draw_mesh(rng)
    refused, together = 0, []
    for _ in range(CALLS):
        draw = sharding_draws.draw(rng, mesh)
        placed = draw.placed()
        # what Auto axes alone cut raises in no form
        error = raised(draw, draw.case.bound("auto"), placed) if sharding_draws.EXPLICIT in mesh.axis_types else None
        if error is not None:
            of_form = raised(draw, draw.case.plain(), placed)
            assert type(of_form) is type(error), f"{draw}: {error!r}, and the jnp form: {of_form!r}"
            refused += 1
        elif draw.mode == "eager":
            with jax.set_mesh(mesh):
                try:
                    check(draw, draw.program(draw.case.bound("auto"))(*placed))
                except Exception as wrong:
                    raise AssertionError(f"{draw}: {wrong}") from wrong
        else:
            together.append((draw, placed))
    if together:
        draws, placed = map(list, zip(*together))
        for draw, got in zip(draws, run_together(draws, placed, mesh)):
            try:
                if got is None:
                    refused += 1
                else:
                    check(draw, got)
            except AssertionError as wrong:
                raise AssertionError(f"{draw}: {wrong}") from wrong
    return refused


def run_chunk(chunk, record_property):
    record_property("drawn", f"{PROGRAMS * CALLS} cuts, seed {SEED}, chunk {chunk}")
    refused = sum(checked(np.random.default_rng((SEED, chunk, program))) for program in range(PROGRAMS))
    assert refused < PROGRAMS * CALLS / 2  # what jnp refuses proves little


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_any_cut_is_that_of_one_device(host_kernel, chunk, record_property):
    run_chunk(chunk, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS, SLOW_CHUNKS))
def test_many_cuts_are_those_of_one_device(host_kernel, chunk, record_property):
    run_chunk(chunk, record_property)
