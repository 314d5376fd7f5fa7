"""How a row primitive is lowered where its operands are, or may be, cut over several devices.

Rows are independent, so a kernel can run on each device's own rows, if nobody gathers them first, which is what XLA does
for a custom call it knows nothing of. Where axes are Explicit the cut is known and a shard_map says it; where they are Auto
the partitioner says it later, to a custom_partitioning. The axis that is reduced runs the reference when it is cut.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .axes import dims_of, is_row, spec_of, summed
from .partitioning import in_custom_partitioning


def _names(entry):
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


@dataclasses.dataclass(frozen=True)
class Placed:
    """What to lower, in which context; or why not, in `why`. asked: the platform whose partitioner has yet to say how the call is cut."""

    body: object = None
    ctx: object = None
    why: str | None = None
    asked: str | None = None


def place(primitive, body, ctx, params, report):
    """`body`, the kernel on whole operands, made right for the devices of `ctx`.

    report(why): called while XLA compiles, where it runs the reference.
    """
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
        return _in_shard_map(primitive, ctx, params, mesh, inside)
    if inside:
        return Placed(why="shard_map leaves Auto axes, whose shardings cannot be seen inside")
    if axes.device_assignment is None:
        return Placed(why="the devices are not known while lowering")
    if ctx.module_context.lowering_parameters.for_export:
        return Placed(why="an exported program cannot ask how Auto axes cut the call")
    if axes.abstract_mesh is None:
        # jit has the mesh only from NamedSharding arguments; any other of as many devices can be named by its parts, too
        mesh = mesh if mesh.size == axes.num_devices else jax.sharding.AbstractMesh((axes.num_devices,), ("devices",))
        axes = dataclasses.replace(axes, abstract_mesh=mesh)
        ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))
    platform = axes.device_assignment[0].platform
    return Placed(in_custom_partitioning(primitive, ctx, params, report), ctx, asked="cuda" if platform == "gpu" else platform)


def _mesh(ctx):
    """The operands' own mesh: the ambient one is not set while jax 0.10 lowers under shard_map."""
    for aval in ctx.avals_in:
        if not aval.sharding.mesh.empty:
            return aval.sharding.mesh
    return jax.sharding.get_abstract_mesh()


def whole(x, axes=(-1,)):
    """x, gathered where an Explicit mesh cuts one of `axes`, by default its last."""
    own = jax.typeof(x).sharding
    gathered = [axis % x.ndim for axis in axes]
    kept = [None if axis in gathered else entry for axis, entry in enumerate(own.spec)]
    return cut_as(x, kept, own.mesh)


def _split(a, groups):
    """The spec of a [..., I] as [..., groups, I / groups] where an Explicit mesh cuts it; None where whole axes cannot say that."""
    own, over = jax.typeof(a).sharding, 1
    over_groups, names = [], list(_names(own.spec[-1]))
    while names and groups % (over * own.mesh.shape[names[0]]) == 0:
        over_groups.append(names.pop(0))
        over *= own.mesh.shape[over_groups[-1]]
    return None if names and over < groups else (*own.spec[:-1], tuple(over_groups) or None, tuple(names) or None)


def split_last(a, groups):
    """a [..., I] as [..., groups, I / groups], cut alike."""
    own, shape = jax.typeof(a).sharding, (*a.shape[:-1], groups, a.shape[-1] // groups)
    return jax.lax.reshape(a, shape, out_sharding=NamedSharding(own.mesh, PartitionSpec(*_split(a, groups)))) if own.spec[-1] else a.reshape(shape)


def merged_last(a, like):
    """What split_last made, in the shape of `like` and cut as it is."""
    own, (*rows, groups, channels) = jax.typeof(like).sharding, jax.typeof(a).sharding.spec
    merged = (*_names(groups), *_names(channels))
    a = jax.lax.reshape(a, like.shape, out_sharding=NamedSharding(own.mesh, PartitionSpec(*rows, merged))) if merged else a.reshape(like.shape)
    return cut_as(a, own.spec, own.mesh)


def splittable(groups, split, others=()):
    """Operands, of which split_last takes the first ones. Where an Explicit mesh has groups straddle devices that share them, all are cut as the
    first: it by rows in place of its last axis, where they divide."""
    if all(_split(a, groups) is not None for a in split):
        return *split, *others
    first, mesh = split[0], next(m for m in (jax.typeof(a).sharding.mesh for a in split) if not m.empty)
    *rows, last = map(_names, jax.typeof(first).sharding.spec)
    fitting = [i for i, n in enumerate(first.shape[:-1]) if n % math.prod(mesh.shape[axis] for axis in (*rows[i], *last)) == 0]
    if fitting:
        rows[fitting[0]] += last
    wanted = [*(names or None for names in rows), None]
    return [cut_as(a, wanted, mesh) if a.ndim == first.ndim else whole(a) for a in (*split, *others)]


def broadcast_rows(a, x, ndim):
    """`a` broadcast to the first `ndim` axes of x, and cut as an Explicit mesh cuts them."""
    own = jax.typeof(x).sharding
    return cut_as(jnp.broadcast_to(a, x.shape[:ndim]), own.spec[:ndim], own.mesh)


def cut_as(a, spec, mesh):
    """`a`, cut over an Explicit mesh as `spec` says."""
    return a if tuple(jax.typeof(a).sharding.spec) == tuple(spec) else jax.sharding.reshard(a, NamedSharding(mesh, PartitionSpec(*spec)))


def cut_alike(a, b):
    """Whether an Explicit mesh cuts the tokens of both [..., T, H, D] alike, and inside shard_map both vary over the same axes."""
    def axes(t):
        return tuple(t.sharding.spec[:-2]), t.mat.varying
    return axes(jax.typeof(a)) == axes(jax.typeof(b))


def take_rows(table, index):
    """table[index], cut as an Explicit mesh cuts the index."""
    own = jax.typeof(index).sharding
    cut = NamedSharding(own.mesh, PartitionSpec(*own.spec, None)) if any(own.spec) else None
    return table.at[index].get(out_sharding=cut)


def tangent_of(out, *tangents):
    """The sum of what may be symbolic zeros, cut as an Explicit mesh cuts `out`, whose tangent it is."""
    terms, own = [t for t in tangents if type(t) is not ad.Zero], jax.typeof(out).sharding
    if not terms:
        return ad.Zero(jax.typeof(out).to_tangent_aval())
    total = functools.reduce(jax.lax.add, terms)
    return cut_as(total, own.spec, own.mesh)


def _in_shard_map(primitive, ctx, params, mesh, inside):
    operand_axes, result_axes = primitive.axes(params)
    on = {}  # dimension -> the mesh axes it is cut over
    for axes, aval in zip(operand_axes, ctx.avals_in):
        for dim, entry in zip(dims_of(axes, aval.ndim), aval.sharding.spec):
            if _names(entry):
                on.setdefault(dim, _names(entry))
    in_specs = tuple(spec_of(on, a, v.ndim) for a, v in zip(operand_axes, ctx.avals_in))
    out_specs = [spec_of(on, a, v.ndim) for a, v in zip(result_axes, ctx.avals_out)]
    if any(dim in on for dim in primitive.whole):
        return Placed(why="the normalized axis is cut over devices")
    if any(dim in on for dim in primitive.uncut + primitive.parted):
        return Placed(why="an axis is cut over devices of which the kernel needs the whole")
    as_they_are = [tuple(map(_names, v.sharding.spec)) for v in ctx.avals_in]
    if as_they_are != [tuple(map(_names, s)) for s in in_specs]:
        return Placed(why="the operands are cut in different ways")
    unlike = any(is_row(axes) and not set(on).issubset(dims_of(axes, v.ndim)) for axes, v in zip(result_axes, ctx.avals_out))
    if inside and unlike:  # the outer shard_map must know what each result varies over
        return Placed(why="the operands are cut in different ways")

    explicit = frozenset(n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit)

    def local(*operands):
        return summed(primitive, primitive.bind(*operands, **params), operand_axes, result_axes, on)

    # keys beside queries whose heads are cut are the same on those devices, which JAX cannot tell
    return Placed(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=explicit, check_vma=inside), ctx)
