"""Mesh axes in their prime parts: a partitioner may cut one dimension over a part of an axis, and another over the rest of it.

Channels that are cut over four devices and reshaped to two heads are such: each head over half of the axis, its channels over the other
half. No PartitionSpec of the mesh says so. One of the same devices with an axis of two in place of each half does.
"""

import itertools

import numpy as np
from jax.sharding import Mesh


def _primes(n):
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def _refinements(mesh):
    """The mesh with its axes in prime parts, in each of their orders: an axis of 6 may be halves of thirds or thirds of halves."""
    orders = (sorted(set(itertools.permutations(_primes(n)))) for n in mesh.devices.shape)
    for sizes in itertools.product(*orders):
        names = [f"{axis}.{i}" for axis, parts in enumerate(sizes) for i in range(len(parts))]
        yield Mesh(mesh.devices.reshape(list(itertools.chain(*sizes))), names)


def _spec(mesh, sharding, ndim):
    """For each dimension the axes it is cut over, major first; or None where no axes of this mesh say that."""
    size, shape = mesh.devices.size, mesh.devices.shape
    # with as many elements as devices, every number of parts divides
    where = sharding.devices_indices_map((size,) * ndim)
    starts = np.array([[s.indices(size)[0] for s in where[device]] for device in mesh.devices.flat], int).reshape(size, ndim)
    steps = np.array([starts[np.ravel_multi_index(unit, shape)] for unit in np.eye(len(shape), dtype=int)])
    if not np.array_equal(np.indices(shape).reshape(len(shape), size).T @ steps, starts):
        return None
    return [tuple(mesh.axis_names[axis] for axis in np.argsort(-column, kind="stable") if column[axis]) for column in steps.T]


def decoded(mesh, arrays):
    """(the mesh in parts, for each array and dimension the parts it is cut over). An array that no parts fit counts as whole."""
    best = None
    for parts in _refinements(mesh):
        specs = [_spec(parts, a.sharding, len(a.shape)) for a in arrays]
        if best is None or specs.count(None) < best[1].count(None):
            best = parts, specs
    return best[0], [[()] * len(a.shape) if spec is None else spec for spec, a in zip(best[1], arrays)]


def axis_of(part):
    """Which axis of the mesh it is a part of."""
    return part.split(".")[0]
