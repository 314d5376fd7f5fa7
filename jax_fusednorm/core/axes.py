"""The strings that name the axes of an op's arrays, and what follows from the mesh axes that they are cut over."""

import jax
from jax.sharding import PartitionSpec


def is_row(axes):
    return axes.startswith("*")


def dims_of(axes, ndim):
    """The names of an array's dimensions: "*d" with ndim 3 is ["*0", "*1", "d"]."""
    letters = axes.lstrip("*")
    return [f"*{i}" for i in range(ndim - len(letters))] * is_row(axes) + list(letters)


def spec_of(on, axes, ndim):
    """The PartitionSpec of an array whose dimensions are cut over the mesh axes on[dimension]."""
    return PartitionSpec(*(on.get(dim) for dim in dims_of(axes, ndim)))


def summed(primitive, results, operand_axes, result_axes, on):
    """Results shared by all rows are sums over those they share an axis with, or over all, and those without a parted axis over its parts: add
    up the devices'."""
    if not any(map(is_row, operand_axes)):
        return results
    rows = [axes for axes in operand_axes if is_row(axes)]
    def added(result, axes):
        of = "".join([row for row in rows if set(row) & set(axes)] or rows)
        others = tuple(name for dim, names in on.items() for name in names
                       if dim not in axes and (dim in primitive.parted or not is_row(axes) and (dim.startswith("*") or dim in of)))
        return jax.lax.psum(result, others) if others else result
    return list(map(added, results, result_axes))
