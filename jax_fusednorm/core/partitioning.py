"""Auto meshes: the partitioner says how operands are cut when it comes to the call, and is answered here."""

import math

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from .axes import dims_of, is_row, spec_of, summed
from .parts import axis_of, decoded

_NO_MESH = jax.sharding.AbstractMesh((), ())


def in_custom_partitioning(primitive, ctx, params, report):
    """The call, cut when the partitioner comes to it. report(why): called then where the reference runs."""
    operand_axes, result_axes = primitive.axes(params)
    cuts = _Cuts(primitive, operand_axes, result_axes, ctx)

    def partition(mesh, operands, results):
        mesh, specs = decoded(mesh, operands)
        on = cuts.chosen(mesh, operands, specs)
        joined, parted = ({dim: on[dim] for dim in dims if dim in on} for dims in (primitive.joined, primitive.parted))
        across = tuple(name for dim in primitive.whole for name in on.get(dim, ()))
        if across:
            report("the normalized axis is cut over devices")
        elif joined or parted:
            report("an axis is cut over devices of which the kernel needs the whole")

        def local(*values):
            # This may run in another thread or under the caller's mesh; it must see neither
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                if across or parted or joined:
                    def mean(v):
                        v = jnp.mean(v, axis=-1, keepdims=True)
                        return jax.lax.pmean(v, across) if across else v
                    part = {dim: (jax.lax.axis_index(names), _product(mesh, names)) for dim, names in parted.items()}
                    told = {**({"part": part} if part else {}), **({"cut": joined} if joined else {})}
                    out = primitive.reference(*values, mean=mean, **told, **params)
                else:
                    out = primitive.bind(*values, **params)
                return tuple(summed(primitive, out, operand_axes, result_axes, on))

        def sharding(on, axes, value):
            return NamedSharding(mesh, spec_of(on, axes, len(value.shape)))

        given_back = {dim: names for dim, names in on.items() if dim not in joined}
        return (mesh, local, tuple(sharding(given_back, *each) for each in zip(result_axes, results)),
                tuple(sharding(on, *each) for each in zip(operand_axes, operands)))

    whole = custom_partitioning(lambda *operands: tuple(primitive.reference(*operands, **params)))
    # the mesh's own axes may not say how operands are cut: parts of them do
    whole.def_partition(partition=partition, decode_shardings=False, sharding_rule=_rule(operand_axes, result_axes, ctx))
    return lambda *operands: whole(*operands)


def _product(mesh, names):
    return math.prod(mesh.shape[name] for name in names)


class _Cuts:
    """How a call is cut, given how its operands are."""

    def __init__(self, primitive, operand_axes, result_axes, ctx):
        self.primitive = primitive
        self.operand_axes = operand_axes
        self.rows_decide = any(map(is_row, operand_axes))
        self.arrays = [dims_of(axes, aval.ndim) for axes, aval in zip((*operand_axes, *result_axes), (*ctx.avals_in, *ctx.avals_out))]
        self.results = self.arrays[len(operand_axes):]

    def _clash(self, dim, names, on):
        """Whether another dimension of an array with `dim` is cut over one of these mesh axes."""
        return any(set(names) & set(on.get(other, ())) for dims in self.arrays if dim in dims for other in dims if other != dim)

    def _even(self, mesh, dim, size, names):
        """Whether the devices' parts hold nothing but the array, or nobody adds up what pads them."""
        p = self.primitive
        added_up = dim in p.whole + p.parted + p.joined or any(dim not in dims for dims in self.results)
        return not added_up or size % _product(mesh, names) == 0

    def chosen(self, mesh, operands, specs):
        """{dimension: the mesh axes it is cut over} while the call runs."""
        p, on = self.primitive, {}
        cuts = [(dim, size, names, is_row(axes) or not self.rows_decide) for axes, operand, spec in zip(self.operand_axes, operands, specs)
                for dim, size, names in zip(dims_of(axes, len(operand.shape)), operand.shape, spec)]
        for dim, size, names, decides in cuts:
            if names and (dim in p.joined or decides and dim not in p.uncut) and self._even(mesh, dim, size, names):
                if not self._clash(dim, names, on):
                    on.setdefault(dim, names)
        if not self.rows_decide or any(dim in on for dim in p.parted):
            return on
        rows = {dim: size for dim, size, _, decides in cuts if decides and dim not in p.whole + p.uncut}
        for dim, _, names, decides in cuts:
            if decides and dim in p.uncut and dim not in p.joined and not self._clash(dim, names, on):
                on = self._recut(mesh, on, names, rows) or on
        # Heads that several devices share get a device each for a part of their rows; where the axis cuts nothing else, the reference sends less
        shared = {axis_of(name) for dim in rows for name in on.get(dim, ())}
        for dim in p.whole:
            if shared.intersection(map(axis_of, on.get(dim, ()))):
                on = self._recut(mesh, {d: names for d, names in on.items() if d != dim}, on[dim], rows) or on
        return on

    def _recut(self, mesh, on, names, rows):
        """`on`, with rows cut over `names` too: each device gets whole rows, fewer of them. None where none divide.

        One dimension takes all the names, for XLA gathers what it would have to send to two."""
        for row, size in rows.items():
            parts = (*on.get(row, ()), *names)
            if not self._clash(row, names, on) and size % _product(mesh, parts) == 0:
                return {**on, row: parts}
        return None


def _rule(operand_axes, result_axes, ctx):
    """Shardy's rule, e.g. "n0 d, n0 d, dp -> n0 d". A shared operand gets factors of its own: a scale cut over the rows' mesh axis,
    as FSDP does, must neither fight with the rows nor spread to them."""
    marks, rows_decide = iter("pqrstuvwxyz"), any(map(is_row, operand_axes))

    def factors(axes, aval):
        mark = next(marks) if rows_decide and not is_row(axes) else ""
        return " ".join(dim.replace("*", "n") + mark for dim in dims_of(axes, aval.ndim))

    return (", ".join(map(factors, operand_axes, ctx.avals_in)) + " -> " + ", ".join(map(factors, result_axes, ctx.avals_out)))
