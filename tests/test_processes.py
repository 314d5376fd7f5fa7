"""Pickles, the persistent compilation cache, and several processes that share one program."""

import os
import pathlib
import pickle
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_fusednorm
from jax_fusednorm.ops import add_rms_norm, rms_norm

TESTS = pathlib.Path(__file__).parent


def start(program, *arguments, devices=1, **environment):
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], cwd=TESTS, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={**os.environ, **environment,
                                                         "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"})


def finish(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def test_functions_and_options_pickle():
    for f in (jax_fusednorm.rms_norm, jax_fusednorm.add_rms_norm, jax.tree_util.Partial(jax_fusednorm.rms_norm, epsilon=1e-5)):
        x = np.ones((2, 8), np.float32)
        args = (x, x) if f is jax_fusednorm.add_rms_norm else (x,)
        again = pickle.loads(pickle.dumps(f))
        np.testing.assert_array_equal(jax.tree.leaves(again(*args))[0], jax.tree.leaves(f(*args))[0])
    for spec in (rms_norm.Spec(1e-6, 0.0, True, "auto"), add_rms_norm.Spec(1e-6, 0.0, True, "auto", "storage", True)):
        again = pickle.loads(pickle.dumps(spec))
        assert again == spec and hash(again) == hash(spec)


CACHED = """
import sys, jax, jax.numpy as jnp, numpy as np, jax_fusednorm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
seen = []
jax.monitoring.register_event_listener(lambda name, **kw: seen.append(name))
for key, value in dict(jax_compilation_cache_dir=sys.argv[1], jax_persistent_cache_min_compile_time_secs=0,
                       jax_persistent_cache_min_entry_size_bytes=-1).items():
    jax.config.update(key, value)
kind, implementation = sys.argv[2:]
x = np.ones((8, 24), np.float32)
if kind != "one device":
    mesh = jax.make_mesh((4,), ("b",), axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,))
    x = jax.device_put(x, NamedSharding(mesh, P("b")))
del seen[:]
f = jax.jit(jax.grad(lambda x: (jax_fusednorm.rms_norm(x, jnp.arange(24.0), implementation=implementation) ** 2).sum()))
out = f(x)
print("hit" if seen.count("/jax/compilation_cache/cache_hits") else "miss", float(np.asarray(out).sum()))
"""


@pytest.mark.parametrize("kind", ("one device", "explicit"))
def test_the_persistent_compilation_cache_is_hit(implementation, kind, tmp_path):
    first, second = (finish(start(CACHED, tmp_path, kind, implementation, devices=4)).split() for _ in range(2))
    assert (first[0], second[0]) == ("miss", "hit")
    assert first[1] == second[1]


TRAIN = """
import sys, jax, jax.numpy as jnp, numpy as np
port, count, rank, implementation, path = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:]
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, rank)
import jax_fusednorm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
x, y = (rng.standard_normal((16, 24)).astype(np.float32) for _ in range(2))
weights = {"w": 0.3 * rng.standard_normal((24, 24)).astype(np.float32), "scale": np.ones(24, np.float32)}
cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
place = lambda a, s: jax.make_array_from_callback(a.shape, s, lambda index: a[index])

def loss(weights, x, y):
    normed, total = jax_fusednorm.add_rms_norm(x @ weights["w"], x, weights["scale"], implementation=implementation)
    return ((normed + total - y) ** 2).mean()

@jax.jit
def step(weights, x, y):
    value, gradient = jax.value_and_grad(loss)(weights, x, y)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)

x, y, weights = place(x, cut), place(y, cut), jax.tree.map(lambda a: place(a, whole), weights)
losses = []
for _ in range(5):
    value, weights = step(weights, x, y)
    losses.append(float(value))
if rank == 0:
    np.savez(path, losses=losses, **{k: np.asarray(v.addressable_data(0)) for k, v in weights.items()})
"""


def test_two_processes_train_as_one(implementation, tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    paths = [tmp_path / "one.npz", tmp_path / "two.npz"]
    finish(start(TRAIN, port, 1, 0, implementation, paths[0], devices=4))
    for process in [start(TRAIN, port, 2, rank, implementation, paths[1], devices=2) for rank in (0, 1)]:
        finish(process)
    one, two = map(np.load, paths)
    assert one["losses"][-1] < one["losses"][0]
    for name in one.files:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
