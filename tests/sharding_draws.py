"""Calls of every op, cut over devices at random: what test_sharding_property.py draws from."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_fusednorm as fused
import plain

MESHES = ((1,), (2,), (3,), (4,), (5,), (6,), (8,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 4), (4, 2), (8, 1))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """op(*args, implementation), and its jnp form. axes: a letter for each dimension of each argument, capitals where shard_map may cut it; out:
    of each result. floats: how many leading arguments have derivatives."""

    name: str
    op: Callable
    form: Callable
    args: tuple
    axes: tuple
    out: tuple
    floats: int

    def __str__(self):
        return f"{self.name} of {', '.join(str(list(a.shape)) for a in self.args)}"

    def bound(self, implementation):
        return lambda *args: _tuple(self.op(*args, implementation=implementation))

    def plain(self):
        return lambda *args: _tuple(self.form(*args))

    def want(self):
        """The results of the reference on one device, and its cotangents."""
        return _wants(next(family for family in families() if self in family))[self]


@functools.cache
def _wants(family):
    """Of a whole family in one program, whose compilation costs more than it does."""
    f = jax.jit(lambda all_args: [with_cotangents(case.bound("jnp"), case.floats)(*args) for case, args in zip(family, all_args)])
    return dict(zip(family, jax.tree.map(np.asarray, f([case.args for case in family]))))


def _tuple(out):
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def with_cotangents(f, floats):
    """f, with the cotangents of its first arguments for one that depends on the results, and so is cut as they are."""
    def both(*args):
        if not floats:
            return f(*args), ()
        out, pull = jax.vjp(lambda *active: f(*active, *args[floats:]), *args[:floats])
        return out, pull(jax.tree.map(lambda o: jnp.cos(1.5 * o), out))
    return both


def _norms():
    for shape in ((4, 2, 8), (8, 6, 12), (2, 4, 2, 8), (1, 5, 24), (6, 1), (8,), (0, 3, 8)):
        x, r, scale = plain.draw(1, shape), plain.draw(2, shape), plain.draw_scale(3, shape[-1], "float32")
        of = "ABC"[:len(shape) - 1] + "d"
        yield Case("rms_norm", fused.rms_norm, plain.rms_norm, (x, scale), (of, "d"), (of,), 2)
        yield Case("add_rms_norm", fused.add_rms_norm, plain.add_rms_norm, (x, r, scale), (of, of, "d"), (of, of), 3)
        yield Case("rms_norm_add", fused.rms_norm_add, plain.rms_norm_add, (x, r, scale), (of, of, "d"), (of,), 3)
    yield Case("rms_norm without a scale", fused.rms_norm, plain.rms_norm, (plain.draw(1, (4, 2, 8)),), ("ABd",), ("ABd",), 1)


def _gated():
    for rows, width, size, start in (((4, 2), 24, 12, None), ((4, 2), 24, 4, None), ((8,), 48, 24, None), ((8,), 48, 8, 3), ((4, 2), 24, 12, 3),
                                     ((4,), 24, None, 4), ((1, 3), 24, 6, None), ((1, 3), 24, 12, 0), ((), 16, 8, None), ((2, 3), 16, None, None)):
        op, form = (functools.partial(f, group_size=size, gate_start=start) for f in (fused.gated_group_rms_norm, plain.gated_group_rms_norm))
        of, wide = "AB"[:len(rows)] + "i", width if start is None else width + 8
        args = plain.draw(1, (*rows, width)), plain.draw(2, (*rows, wide)), plain.draw_scale(3, width, "float32")
        yield Case(f"gated, groups of {size}, gate from {start}", op, form, args, (of, of if start is None else of[:-1] + "w", "i"), (of,), 3)


def _matmul_form(x, weight, scale, transpose_b=True):
    y, n = x @ (weight.T if transpose_b else weight), scale.shape[0]
    return plain.rms_norm(y[..., :n], scale), y[..., n:]


def _matmuls():
    for rows, k, n, normed in (((4, 2), 8, 12, 8), ((8, 6), 16, 24, 8), ((3,), 8, 8, 8)):
        for transposed in (True, False):
            args = plain.draw(1, (*rows, k)), plain.draw(2, (n, k) if transposed else (k, n)), plain.draw_scale(3, normed, "float32")
            of = "AB"[:len(rows)]
            yield Case(f"matmul, transpose_b={transposed}", functools.partial(fused.matmul_partial_rms_norm, transpose_b=transposed),
                       functools.partial(_matmul_form, transpose_b=transposed), args,
                       (of + "k", "nk" if transposed else "kn", "d"), (of + "d", of + "m"), 3)


def _turned(y, positions):
    half = y.shape[-1] // 2
    angle = positions[..., None, None] * 10000.0 ** -(jnp.arange(half) / half)
    a, b = y[..., :half], y[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def _heads_form(x, scale, positions):
    y = _turned(plain.rms_norm(x, scale), positions)
    return y, y.swapaxes(-2, -3)


def _tabled_form(x, scale, table, positions):
    cos, sin = table[positions][..., None, ::2], table[positions][..., None, 1::2]
    a, b = jnp.split(plain.rms_norm(x, scale), 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _qk_form(q, k, q_scale, k_scale, positions):
    return _turned(plain.rms_norm(q, q_scale), positions), _turned(plain.rms_norm(k, k_scale), positions)


def _tabled(x, scale, table, positions, **options):
    return fused.head_rms_norm_rope(x, scale, positions, freqs_cis=table, **options)


def _heads():
    scales, table = [plain.draw_scale(s, 8, "float32") for s in (3, 4)], fused.rope_table(16, 8)
    for batch, tokens, heads, kv in ((2, 4, 2, 2), (1, 4, 4, 2), (2, 3, 6, 1), (4, 1, 8, 4)):
        q, k = plain.draw(1, (batch, tokens, heads, 8)), plain.draw(2, (batch, tokens, kv, 8))
        positions = np.arange(batch * tokens, dtype=np.int32).reshape(batch, tokens)
        yield Case("head_rms_norm_rope with a copy", functools.partial(fused.head_rms_norm_rope, copies=(("float32", "head_major"),)), _heads_form,
                   (q, scales[0], positions), ("ABCd", "d", "AB"), ("ABCd", "ACBd"), 2)
        yield Case("head_rms_norm_rope, one sequence's positions", fused.head_rms_norm_rope, lambda *a: _heads_form(*a)[0],
                   (q, scales[0], positions[0]), ("ABCd", "d", "B"), ("ABCd",), 2)
        yield Case("head_rms_norm_rope with a table", _tabled, _tabled_form, (q, scales[0], table, positions),
                   ("ABCd", "d", "pe", "AB"), ("ABCd",), 3)
        yield Case("qk_rms_norm_rope", fused.qk_rms_norm_rope, _qk_form, (q, k, *scales, positions), ("ABCd", "ABGd", "d", "e", "AB"),
                   ("ABCd", "ABGd"), 4)


def _paged(q, pages, page_table, lengths, scale, table, offsets, layer, k=None, v=None, **options):
    cache = fused.PagedKVCache(pages, page_table, lengths)
    out, cache = fused.qk_rms_norm_rope_paged(q, cache, scale, scale, table, offsets, layer=layer, k=k, v=v, **options)
    return out, cache.pages


def _as_they_are(*args):
    """The form of what takes any cut."""
    return args


def _pageds():
    for tokens, heads, kv in ((8, 4, 2), (6, 8, 4)):
        pages = plain.draw(5, (6, 2, 2, 3, kv, 8))
        rest = (jnp.asarray([[3, 1], [0, 5]], jnp.int32), jnp.asarray([2, 0], jnp.int32), plain.draw_scale(3, 8, "float32"), fused.rope_table(8, 8),
                jnp.asarray([0, 3, 5], jnp.int32), jnp.int32(1))
        q, k, v = (plain.draw(s, (tokens, n, 8)) for s, n in ((1, heads), (2, kv), (3, kv)))
        axes, out = ("ncisGd", "bm", "b", "d", "pe", "o", ""), ("tHd", "ncisGd")
        yield Case("paged", _paged, _as_they_are, (q, pages, *rest, k, v), ("tHd", *axes, "tGd", "tGd"), out, 0)
        yield Case("paged, keys in their rows", _paged, _as_they_are, (q, pages, *rest), ("tHd", *axes), out, 0)
        packed = jnp.concatenate([a.reshape(tokens, -1) for a in (q, k, v)], axis=1)
        yield Case("paged, packed", functools.partial(_paged, num_heads=heads, k_start=8 * heads, v_start=8 * (heads + kv)), _as_they_are,
                   (packed, pages, *rest),
                   ("tw", *(a.lower() for a in axes)), tuple(a.lower() for a in out), 0)


@functools.cache
def families():
    return tuple(tuple(made()) for made in (_norms, _gated, _matmuls, _heads, _pageds))


# ---- cuts ----


def draw_mesh(rng):
    sizes = MESHES[rng.integers(len(MESHES))]
    types = tuple((AUTO, EXPLICIT)[rng.integers(2)] for _ in sizes) if rng.random() < 0.4 else (AUTO, EXPLICIT)[rng.random() < 0.3:][:1] * len(sizes)
    return jax.make_mesh(sizes, ("a", "b")[:len(sizes)], axis_types=types, devices=jax.devices()[:math.prod(sizes)])


def _draw_names(rng, free):
    """Up to two of the free mesh axes, in any order."""
    names = tuple(rng.permutation(free)[:1 + (rng.random() < 0.3)]) if free and rng.random() < 0.5 else ()
    return tuple(map(str, names))


def _draw_spec(rng, axes, letters, mesh, shape, uneven):
    """A cut of each dimension: that of its letter, drawn once for the call, or its own where letters is None."""
    spec, used = [], set()
    for letter, n in zip(axes, shape):
        names = _draw_names(rng, sorted(set(mesh.axis_names) - used)) if letters is None else \
            letters.setdefault(letter.upper(), _draw_names(rng, sorted(set(mesh.axis_names) - used)))
        parts = math.prod(mesh.shape[name] for name in names)
        if used.intersection(names) or n % parts and not uneven:
            names = ()
        used.update(names)
        spec.append(names or None)
    return P(*spec)


@dataclasses.dataclass(frozen=True)
class Draw:
    """A call cut over a mesh. specs: of the arguments as they come, merged where `merged` says: their last two dimensions are one until the call."""

    case: Case
    mesh: object
    mode: str  # "jit", "eager", "shard_map"
    backward: bool
    specs: tuple
    merged: tuple
    manual: tuple = ()
    in_specs: tuple = ()
    out_specs: tuple = ()

    def __str__(self):
        types = [t.name for t in self.mesh.axis_types]
        inside = f" over {self.manual}, {self.in_specs}" if self.manual else ""
        return f"{self.case}{', backward,' if self.backward else ''} in {self.mode}{inside} on " \
               f"{dict(self.mesh.shape)} {types}, cut {self.specs}, merged {self.merged}"

    def _uneven(self, shape, spec):
        return any(n % math.prod(self.mesh.shape[name] for name in entry or ()) for n, entry in zip(shape, spec))

    def _shapes(self):
        return [(*a.shape[:-2], math.prod(a.shape[-2:])) if m else a.shape for a, m in zip(self.case.args, self.merged)]

    def want(self):
        out, cotangents = self.case.want()
        return out, cotangents if self.backward else ()

    def placed(self):
        """The arguments on the mesh. Those that no whole parts fit are cut while the program runs."""
        return [jax.device_put(np.asarray(a).reshape(shape), NamedSharding(self.mesh, P() if self._uneven(shape, spec) else spec))
                for a, shape, spec in zip(self.case.args, self._shapes(), self.specs)]

    def program(self, f):
        """f of the placed arguments."""
        if self.manual:
            f = jax.shard_map(f, mesh=self.mesh, in_specs=self.in_specs, out_specs=self.out_specs, axis_names=set(self.manual))
        f = with_cotangents(f, self.case.floats if self.backward else 0)

        def cut(*args):
            args = [jax.lax.with_sharding_constraint(a, NamedSharding(self.mesh, spec)) if self._uneven(shape, spec) else a
                    for a, shape, spec in zip(args, self._shapes(), self.specs)]
            return f(*(a.reshape(whole.shape) if m else a for a, whole, m in zip(args, self.case.args, self.merged)))
        return cut


def draw(rng, mesh):
    family = families()[rng.choice(5, p=(0.25, 0.25, 0.15, 0.25, 0.1))]
    case = family[rng.integers(len(family))]
    mode = str(rng.choice(("jit", "shard_map", "eager"), p=(0.76, 0.16, 0.08)))
    backward = bool(mode != "eager" and case.floats and rng.random() < 0.6)
    all_auto = all(t == AUTO for t in mesh.axis_types)
    if mode == "shard_map":
        manual = mesh.axis_names if len(mesh.axis_names) == 1 or rng.random() < 0.7 else (str(rng.choice(mesh.axis_names)),)
        return _in_shard_map(rng, case, mesh, backward, manual)
    letters = {} if rng.random() < 0.7 else None
    uneven = all_auto and mode == "jit" and rng.random() < 0.3
    specs, merged = [], []
    for a, axes in zip(case.args, case.axes):
        m = a.ndim >= 2 and 0 not in a.shape and rng.random() < 0.35
        shape = (*a.shape[:-2], math.prod(a.shape[-2:])) if m else a.shape
        specs.append(_draw_spec(rng, axes[:-2] + axes[-2] if m else axes, letters, mesh, shape, uneven))
        merged.append(m)
    return Draw(case, mesh, mode, backward, tuple(specs), tuple(merged))


def _in_shard_map(rng, case, mesh, backward, manual):
    letters, used = {}, set()
    sizes = {letter: n for axes, a in zip(case.axes, case.args) for letter, n in zip(axes, a.shape)}
    for letter in rng.permutation(sorted(set("".join(case.axes)))):
        names = _draw_names(rng, sorted(set(manual) - used)) if letter.isupper() else ()
        if sizes[letter] % math.prod(mesh.shape[name] for name in names) == 0:
            letters[str(letter)] = names
            used.update(names)
    in_specs, out_specs = (tuple(P(*(letters.get(letter) or None for letter in axes)) for axes in of) for of in (case.axes, case.out))
    return Draw(case, mesh, "shard_map", backward, in_specs, (False,) * len(case.args), tuple(manual), in_specs, out_specs)
