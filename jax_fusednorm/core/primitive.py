"""One declaration makes an op: three primitives with every rule.

`Op(name, reference, ...)` builds `name`, `name_tangent` and `name_cotangent`. The last two are the op's linearization and
its transpose, each the transpose of the other; by default they lower to jax.jvp and jax.vjp of the reference, so that no
derivative is written by hand, and a kernel may be attached to any of the three.

Axes are strings, one per array: "*" stands for any leading (row) axes, then a letter per axis. An array without "*" is
shared by all rows; as a result it is a sum over rows.
"""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import ffi, inspection, lowering, selfcheck, sharding
from .axes import is_row

try:  # there is no public way to have a mesh's devices while lowering, which custom_partitioning needs
    from jax._src.dispatch import prim_requires_devices_during_lowering as _wants_devices
except ImportError:  # pragma: no cover
    _wants_devices = set()  # several Auto devices then run the reference


def same_varying(*args):
    """Give every operand the manual mesh axes that any of them varies over.

    The transpose of this cast is the psum that sums a replicated scale's gradient inside shard_map.
    """
    varying = [jax.typeof(a).mat.varying for a in args]
    union = frozenset().union(*varying)
    return [jax.lax.pcast(a, tuple(sorted(union - v, key=str)), to="varying") if union - v else a
            for a, v in zip(args, varying)]


def _merge(operands, active, values):
    """operands, with the active ones replaced by `values` in turn."""
    values = iter(values)
    return [next(values) if a else o for o, a in zip(operands, active)]


def _only(items, active):
    return [item for item, a in zip(items, active) if a]


def _is_zero(t):
    return type(t) is ad.Zero


def _zeros_like_outputs(outs):
    return [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outs]


@functools.lru_cache(maxsize=None)
def _jitted(primitive, params):
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


@functools.lru_cache(maxsize=4096)
def _out_avals(reference, avals, params, mesh, x64, promotion):
    out = jax.make_jaxpr(functools.partial(reference, **dict(params)))(*avals).out_avals
    return [a.update(weak_type=False) for a in out]


def _broadcasting(reference):
    """A reference broadcasts scales over rows, whatever jax_numpy_rank_promotion says of the caller's code."""
    @functools.wraps(reference)
    def allowed(*operands, **options):
        with jax.numpy_rank_promotion("allow"):
            return reference(*operands, **options)
    return allowed


class _RowPrimitive:
    """A primitive that works row by row, with its abstract eval, impl, batching and lowering rules.

    reference(*operands, mean, **params) -> results; axes(params) -> (operand axes, result axes); whole, uncut, parted, joined: as in Op;
    kernel(call, *operands, **params) -> results, or NotImplemented for what it does not cover; None where the reference is all there is.
    sample, moved: as in Op.

    It is two primitives of one name. The one with kernels asks for its devices while lowering, which JAX refuses to abstract
    meshes among others; so a call that can only run jnp binds the plain one.
    """

    def __init__(self, name, reference, axes, whole, uncut, parted, kernel, strict, joined="", sample=None, moved=None):
        self.name, self.reference, self.axes, self.whole, self.uncut, self.parted = name, reference, axes, whole, uncut, parted
        self.joined, self.kernel, self.strict, self.sample = joined, kernel, strict, sample
        self.moved = moved or (lambda avals_in, avals_out: lowering.bytes_of((*avals_in, *avals_out)))
        self.plain = self._primitive(has_kernels=False)
        self.with_kernels = self.plain if kernel is None else self._primitive(has_kernels=True)
        self.primitives = {self.plain, self.with_kernels}

    def _primitive(self, has_kernels):
        p = Primitive(self.name)
        p.multiple_results = True
        p.def_abstract_eval(self._foreseen if has_kernels else self._abstract)
        p.def_impl(functools.partial(self._impl, p))
        batching.fancy_primitive_batchers[p] = self._batch
        inspection.register(p, self.reference)
        mlir.register_lowering(p, functools.partial(self._lower, None))
        if has_kernels:
            _wants_devices.add(p)
            for platform in lowering.LAUNCHERS:
                mlir.register_lowering(p, functools.partial(self._lower, platform), platform=platform)
        return p

    def bind(self, *operands, **params):
        p = self.with_kernels if lowering.may_use_kernels(params["spec"].implementation) else self.plain
        if any(map(is_row, self.axes(params)[0])):  # without rows no gradient is a sum over them, and a result may vary less than another
            operands = same_varying(*operands)
        return p.bind(*operands, **params)

    def _abstract(self, *avals, **params):
        # The reference's own: shapes, dtypes, shardings and varying axes agree by construction.
        return _out_avals(self.reference, avals, tuple(sorted(params.items())), jax.sharding.get_abstract_mesh(),
                          jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion)

    def _foreseen(self, *avals, **params):
        """On a GPU the kernels of a program are compiled side by side, while the rest of it is traced."""
        if jax.default_backend() == "gpu" and lowering.uncovered(avals) is None:
            for launcher in lowering.launchers_for("cuda", params["spec"].implementation):
                if ffi.library(launcher).usable:
                    selfcheck.start(self, launcher, avals, params)
        return self._abstract(*avals, **params)

    def _impl(self, p, *operands, **params):
        with jax.disable_jit(False):  # under disable_jit the jit below would come back here for ever
            return inspection.refuse_nans(self.name, lambda: _jitted(p, tuple(sorted(params.items())))(*operands))

    def _batch(self, axis_data, operands, dims, **params):
        operand_axes, result_axes = self.axes(params)
        if all(d is None for d in dims):  # happens, and jacfwd needs the unmapped answer
            out = self.bind(*operands, **params)
            return out, [None] * len(out)
        shared_is_mapped = any(not is_row(a) and d is not None for a, d in zip(operand_axes, dims))
        if shared_is_mapped or not all(map(is_row, result_axes)):
            out = jax.vmap(functools.partial(self.reference, **params), in_axes=tuple(dims),
                           axis_size=axis_data.size)(*operands)
        else:
            out = self.bind(*(batching.bdim_at_front(o, d, axis_data.size, axis_data.explicit_mesh_axis) if is_row(a) else o
                              for o, d, a in zip(operands, dims, operand_axes)), **params)
        return out, [0] * len(out)

    def _lower(self, platform, ctx, *operands, **params):
        platforms = (platform,) if platform else tuple(ctx.platforms or ctx.module_context.platforms)

        def place(launcher, report):
            def body(*operands):
                out = self.kernel(ffi.Call(launcher), *operands, **params)
                return self.reference(*operands, **params) if out is NotImplemented else out
            return sharding.place(self, body, ctx, params, report)

        body = functools.partial(self.reference, **params)
        if self.kernel is not None or self.strict:
            decision, placed = lowering.decide(
                self.name, platforms, params["spec"].implementation, ctx, place, self.strict, moved=self.moved(ctx.avals_in, ctx.avals_out),
                distrust=lambda launcher: selfcheck.failure(self, launcher, ctx.avals_in, params))
            if placed is not None:
                body, ctx = placed.body, placed.ctx
        return mlir.lower_fun(body, multiple_results=True)(ctx, *operands)


class Op:
    """An op and its derivatives.

    reference(*operands, spec, mean) -> [results], the op's definition and its lowering where no kernel runs. `mean` is what it takes
        means over the whole axes with.
    operands, results: axes strings; trailing ones may be absent in a call. results may be a function of the spec.
    whole: the axes that are reduced, where `mean` is all that must know of a cut; uncut: axes that mean something only as a whole.
    parted: axes that may be cut, but then the reference runs, told by its keyword `part` which it has:
        {axis: (which, of how many equal parts)}.
    joined: those of `uncut` that Auto meshes may cut; then the reference runs on parts, told by its keyword `cut`, {axis: mesh axes}, and its
        results are whole along them.
    kernel(call, *operands, spec) -> [results]; `call` is the core.ffi.Call of the chosen launcher.
    tangent_kernel, cotangent_kernel(call, *operands, *tangents or *cotangents, spec, active) -> results, optional.
        active[i]: operand i has a tangent / its cotangent is wanted.
    jvp(primals, tangents, spec) -> (results, tangents) or NotImplemented: takes the place of the op's own linearization.
    sample(rng, shapes) -> operands of about these (shape, dtype)s, for the self-check of `kernel`, where tables must hold something sensible.
    moved(operands' avals, results' avals) -> bytes that a call reads and writes, where it is not all of them.
    spec: a frozen, hashable value with a field `implementation`.
    """

    def __init__(self, name, reference, *, operands, results, whole="d", uncut="", parted="", joined="", kernel=None,
                 tangent_kernel=None, cotangent_kernel=None, jvp=None, sample=None, moved=None):
        reference = _broadcasting(reference)
        self.name, self.reference, self._own_jvp = name, reference, jvp
        self._operands, self._results = operands, results if callable(results) else lambda spec: results
        self.op = _RowPrimitive(name, reference, lambda params: (operands, self._results(params["spec"])), whole, uncut, parted, kernel,
                                strict=True, joined=joined, sample=sample, moved=moved)
        self.tangent = _RowPrimitive(f"{name}_tangent", self._tangent_reference, self._tangent_axes, whole, uncut, parted,
                                     tangent_kernel, strict=False)
        self.cotangent = _RowPrimitive(f"{name}_cotangent", self._cotangent_reference, self._cotangent_axes, whole, uncut, parted,
                                       cotangent_kernel, strict=False)
        for p in self.op.primitives:
            ad.primitive_jvps[p] = self._jvp
        for linear, transpose in ((self.tangent, self._transpose_tangent), (self.cotangent, self._transpose_cotangent)):
            for p in linear.primitives:
                ad.primitive_jvps[p] = functools.partial(self._linear_jvp, linear)
                ad.primitive_transposes[p] = transpose

    def bind(self, *operands, spec):
        """Run the op. A None operand is left out."""
        with jax.named_scope(f"jax_fusednorm.{self.name}"):
            return self.op.bind(*(o for o in operands if o is not None), spec=spec)

    # ---- the two derivatives by default: JAX's own of the reference ----

    def _of_active(self, operands, active, **params):
        def f(*values):
            return self.reference(*_merge(operands, active, values), **params)
        return f, _only(operands, active)

    def _tangent_reference(self, *args, active, **params):
        n = len(active)
        f, at = self._of_active(args[:n], active, **params)
        return jax.jvp(f, at, list(args[n:]))[1]

    def _cotangent_reference(self, *args, active, **params):
        n = len(active)
        f, at = self._of_active(args[:n], active, **params)
        return list(jax.vjp(f, *at)[1](list(args[n:])))

    def _tangent_axes(self, params):
        operands = self._operands[:len(params["active"])]
        return (*operands, *_only(operands, params["active"])), self._results(params["spec"])

    def _cotangent_axes(self, params):
        operands = self._operands[:len(params["active"])]
        return (*operands, *self._results(params["spec"])), tuple(_only(operands, params["active"]))

    # ---- differentiation rules ----

    def _jvp(self, primals, tangents, *, spec):
        if self._own_jvp is not None:
            found = self._own_jvp(primals, tangents, spec)
            if found is not NotImplemented:
                return found
        out = self.op.bind(*primals, spec=spec)
        return out, self.push(primals, tangents, out, spec)

    def push(self, primals, tangents, out, spec):
        """The tangents of `out`. Symbolic zeros become a static mask: nothing is made of them."""
        active = tuple(not _is_zero(t) for t in tangents)
        if not any(active):
            return _zeros_like_outputs(out)
        return self.tangent.bind(*primals, *_only(tangents, active), spec=spec, active=active)

    def _linear_jvp(self, linear, args, tangents, *, spec, active):
        """tangent and cotangent are linear in their last operands and smooth in the first: second order runs the reference."""
        n = len(active)
        params = dict(spec=spec, active=active)
        terms = []
        if not all(map(_is_zero, tangents[n:])):
            terms.append(linear.bind(*args[:n], *map(ad.instantiate_zeros, tangents[n:]), **params))
        moving = [not _is_zero(t) for t in tangents[:n]]
        if any(moving):
            def f(*values):
                return linear.reference(*_merge(args[:n], moving, values), *args[n:], **params)
            terms.append(jax.jvp(f, _only(args[:n], moving), _only(tangents[:n], moving))[1])
        out = linear.bind(*args, **params)
        return out, ([functools.reduce(ad.add_jaxvals, t) for t in zip(*terms)] if terms else _zeros_like_outputs(out))

    def _transpose_tangent(self, cotangents, *args, spec, active):
        n = len(active)
        if all(map(_is_zero, cotangents)):
            return [None] * len(args)
        wanted = [ad.is_undefined_primal(t) for t in args[n:]]  # a tangent may also be a known value
        mask = tuple(map(bool, _merge([False] * n, active, wanted)))
        out = iter(self.cotangent.bind(*args[:n], *map(ad.instantiate_zeros, cotangents), spec=spec, active=mask))
        return [None] * n + [next(out) if w else None for w in wanted]

    def _transpose_cotangent(self, cotangents, *args, spec, active):
        n = len(active)
        if all(map(_is_zero, cotangents)):
            return [None] * len(args)
        out = self.tangent.bind(*args[:n], *map(ad.instantiate_zeros, cotangents), spec=spec, active=active)
        return [None] * n + [o if ad.is_undefined_primal(c) else None for o, c in zip(out, args[n:])]
