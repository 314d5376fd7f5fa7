"""How a row primitive is lowered where its operands are, or may be, cut over several devices.

Rows are independent, so a kernel can run on each device's own rows, if nobody gathers them first, which is what XLA does
for a custom call it knows nothing of. Where axes are Explicit the cut is known and a shard_map says it; where they are Auto
the partitioner says it later, to a custom_partitioning. The axis that is reduced runs the reference when it is cut.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_NO_MESH = jax.sharding.AbstractMesh((), ())


def is_row(axes):
    return axes.startswith("*")


def dims_of(axes, ndim):
    """The names of an array's dimensions: "*d" with ndim 3 is ["*0", "*1", "d"]."""
    letters = axes.lstrip("*")
    return [f"*{i}" for i in range(ndim - len(letters))] * is_row(axes) + list(letters)


def _names(entry):
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


@dataclasses.dataclass(frozen=True)
class Placed:
    """What to lower, in which context; or why not, in `why`."""

    body: object = None
    ctx: object = None
    why: str | None = None


def place(primitive, body, ctx, params):
    """`body`, the kernel on whole operands, made right for the devices of `ctx`."""
    axes = ctx.module_context.axis_context
    inside = isinstance(axes, mlir.SPMDAxisContext)
    mesh = _mesh(ctx)
    cut = {n: t for n, t, size in zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes) if size > 1}
    explicit = frozenset(n for n, t in cut.items() if t == AxisType.Explicit)
    auto = frozenset(n for n, t in cut.items() if t == AxisType.Auto)
    if inside and not explicit and all(axes.mesh.shape[n] == 1 for n in set(axes.mesh.axis_names) - set(axes.manual_axes)):
        return Placed(body, ctx)
    if not inside and axes.num_devices == 1:
        return Placed(body, ctx)
    operand_axes, result_axes = primitive.axes(params)
    if not any(map(is_row, operand_axes)) and set(primitive.uncut).issuperset("".join((*operand_axes, *result_axes))):
        return Placed(why="nothing of it can be cut")
    if not jax.config.jax_use_shardy_partitioner:
        return Placed(why="the Shardy partitioner is off")
    if explicit and not auto:
        return _in_shard_map(primitive, ctx, params, mesh, explicit)
    if inside:
        return Placed(why="shard_map leaves Auto axes, whose shardings cannot be seen inside")
    if axes.device_assignment is None:
        return Placed(why="the devices are not known while lowering")
    if axes.abstract_mesh is None:
        # custom_partitioning reads shardings with the context's mesh, which jit has only from NamedSharding arguments
        if mesh.empty or mesh.size != axes.num_devices:
            return Placed(why=f"the call is cut over {axes.num_devices} devices without a mesh")
        axes = dataclasses.replace(axes, abstract_mesh=mesh)
        ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))
    return Placed(_in_custom_partitioning(primitive, ctx, params), ctx)


def _mesh(ctx):
    """The operands' own mesh: the ambient one is not set while jax 0.10 lowers under shard_map."""
    for aval in ctx.avals_in:
        if not aval.sharding.mesh.empty:
            return aval.sharding.mesh
    return jax.sharding.get_abstract_mesh()


def _summed(primitive, results, operand_axes, result_axes, on):
    """Results shared by all rows are sums over those they share an axis with, or over all, and those without a parted axis over its parts: add
    up the devices'."""
    if not any(map(is_row, operand_axes)):
        return results
    rows = [axes for axes in operand_axes if is_row(axes)]
    def summed(result, axes):
        of = "".join([row for row in rows if set(row) & set(axes)] or rows)
        others = tuple(name for dim, names in on.items() for name in names
                       if dim not in axes and (dim in primitive.parted or not is_row(axes) and (dim.startswith("*") or dim in of)))
        return jax.lax.psum(result, others) if others else result
    return list(map(summed, results, result_axes))


def whole(x, axes=(-1,)):
    """x, gathered where an Explicit mesh cuts one of `axes`, by default its last."""
    own = jax.typeof(x).sharding
    gathered = [axis % x.ndim for axis in axes]
    kept = [None if axis in gathered else entry for axis, entry in enumerate(own.spec)]
    return x if kept == list(own.spec) else _resharded(x, own.mesh, kept)


def broadcast_rows(a, x, ndim):
    """`a` broadcast to the first `ndim` axes of x, and cut as an Explicit mesh cuts them."""
    own = jax.typeof(x).sharding
    a = jnp.broadcast_to(a, x.shape[:ndim])
    return _resharded(a, own.mesh, own.spec[:ndim]) if any(own.spec[:ndim]) else a


def take_rows(table, index):
    """table[index], cut as an Explicit mesh cuts the index."""
    own = jax.typeof(index).sharding
    cut = NamedSharding(own.mesh, PartitionSpec(*own.spec, None)) if any(own.spec) else None
    return table.at[index].get(out_sharding=cut)


def _resharded(a, mesh, spec):
    return jax.sharding.reshard(a, NamedSharding(mesh, PartitionSpec(*spec)))


def _spec(on, axes, ndim):
    return PartitionSpec(*(on.get(dim) for dim in dims_of(axes, ndim)))


def _in_shard_map(primitive, ctx, params, mesh, explicit):
    operand_axes, result_axes = primitive.axes(params)
    on = {}  # dimension -> the mesh axes it is cut over
    for axes, aval in zip(operand_axes, ctx.avals_in):
        for dim, entry in zip(dims_of(axes, aval.ndim), aval.sharding.spec):
            if _names(entry):
                on.setdefault(dim, _names(entry))
    in_specs = tuple(_spec(on, a, v.ndim) for a, v in zip(operand_axes, ctx.avals_in))
    out_specs = [_spec(on, a, v.ndim) for a, v in zip(result_axes, ctx.avals_out)]
    if any(dim in on for dim in primitive.whole):
        return Placed(why="the normalized axis is cut over devices")
    if any(dim in on for dim in primitive.uncut + primitive.parted):
        return Placed(why="an axis is cut over devices of which the kernel needs the whole")
    as_they_are = [tuple(map(_names, v.sharding.spec)) for v in ctx.avals_in]
    if as_they_are != [tuple(map(_names, s)) for s in in_specs]:
        return Placed(why="the operands are cut in different ways")

    def local(*operands):
        return _summed(primitive, primitive.bind(*operands, **params), operand_axes, result_axes, on)

    # keys beside queries whose heads are cut are the same on those devices, which JAX cannot tell
    return Placed(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=explicit, check_vma=False), ctx)


def _in_custom_partitioning(primitive, ctx, params):
    operand_axes, result_axes = primitive.axes(params)
    rows_decide = any(map(is_row, operand_axes))
    arrays = [dims_of(axes, aval.ndim) for axes, aval in zip((*operand_axes, *result_axes), (*ctx.avals_in, *ctx.avals_out))]

    def clash(dim, names, on):
        """Whether another dimension of an array with `dim` is cut over one of these mesh axes."""
        return any(set(names) & set(on.get(other, ())) for dims in arrays if dim in dims for other in dims if other != dim)

    def even(mesh, dim, size, names):
        """Whether the devices' parts hold nothing but the array, or nobody adds up what pads them."""
        summed = dim in primitive.whole + primitive.parted + primitive.joined or any(dim not in dims for dims in arrays[len(operand_axes):])
        return not summed or size % math.prod(mesh.shape[name] for name in names) == 0

    def partition(mesh, operands, results):
        on = {}
        for axes, operand in zip(operand_axes, operands):
            for dim, size, entry in zip(dims_of(axes, len(operand.shape)), operand.shape, operand.sharding.spec):
                names, decides = _names(entry), dim in primitive.joined or dim not in primitive.uncut and (is_row(axes) or not rows_decide)
                if names and decides and not clash(dim, names, on) and even(mesh, dim, size, names):
                    on.setdefault(dim, names)
        joined = {dim: on[dim] for dim in primitive.joined if dim in on}
        across, parts = (tuple(name for dim in dims for name in on.get(dim, ())) for dims in (primitive.whole, primitive.parted))

        def local(*values):
            # This may run in another thread or under the caller's mesh; it must see neither
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                if across or parts or joined:
                    def mean(v):
                        v = jnp.mean(v, axis=-1, keepdims=True)
                        return jax.lax.pmean(v, across) if across else v
                    told = {**({"part": jax.lax.axis_index(parts)} if parts else {}), **({"cut": joined} if joined else {})}
                    out = primitive.reference(*values, mean=mean, **told, **params)
                else:
                    out = primitive.bind(*values, **params)
                return tuple(_summed(primitive, out, operand_axes, result_axes, on))

        def sharding(on, axes, value):
            return NamedSharding(mesh, _spec(on, axes, len(value.shape)))

        whole = {dim: names for dim, names in on.items() if dim not in joined}
        return (mesh, local, tuple(sharding(whole, *each) for each in zip(result_axes, results)),
                tuple(sharding(on, *each) for each in zip(operand_axes, operands)))

    whole = custom_partitioning(lambda *operands: tuple(primitive.reference(*operands, **params)))
    whole.def_partition(partition=partition, sharding_rule=_rule(operand_axes, result_axes, ctx, rows_decide))
    return lambda *operands: whole(*operands)


def _rule(operand_axes, result_axes, ctx, rows_decide):
    """Shardy's rule, e.g. "n0 d, n0 d, dp -> n0 d". A shared operand gets factors of its own: a scale cut over the rows' mesh axis,
    as FSDP does, must neither fight with the rows nor spread to them."""
    marks = iter("pqrstuvwxyz")

    def factors(axes, aval):
        mark = next(marks) if rows_decide and not is_row(axes) else ""
        return " ".join(dim.replace("*", "n") + mark for dim in dims_of(axes, aval.ndim))

    return (", ".join(map(factors, operand_axes, ctx.avals_in)) + " -> " + ", ".join(map(factors, result_axes, ctx.avals_out)))
