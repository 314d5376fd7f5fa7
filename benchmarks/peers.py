"""The contestants of run.py: ours, plain JAX, torch and MLX, each as callables that run one op, or a chain, to the end.

Every op maps activations and a scale to the first of the next activations: rms_norm (x, scale) -> (normed,), add_rms_norm
(x, residual, scale) -> (normed, sum), gated_group_rms_norm (y, gate, scale) -> (out,), in eight groups, and head_rms_norm_rope
(x, scale) -> (x,), of tokens at 0, 1, 2, ..., qk_rms_norm_rope (q, k, scale) -> (q, k), likewise, and qk_rms_norm_rope_paged (q, pages, k, scale) -> (q, pages), of four prompts or of
as many sequences as tokens, with a quarter as many heads of k and the pages written in place. So a chain is
`activations = op(*activations, scale)` again and again, in which a gate and k stay; forward and backward chain likewise, with the
gradient as the next cotangent.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_fusednorm
import native

EPSILON, THETA, GROUPS = 1e-6, 1e4, 8
PAGE, MOST, DECODE = 128, 4096, 128  # rows of a page, positions of the table, and the most tokens that are a sequence each
OURS, OUR_JNP, PLAIN = "ours", "our jnp", "plain jax"


@dataclasses.dataclass(frozen=True)
class Contestant:
    name: str
    one: Callable[[], None]  # one op, or its forward and backward, and the wait for the results
    chains: tuple[Callable[[], None], ...] = ()  # for each of `lengths`: as many dependent ops in one program, and the wait


@dataclasses.dataclass(frozen=True)
class Op:
    """What is timed. A form takes (*activations, scale) and returns a list. moved: how many arrays of the case's shape are read and written,
    forward, and with the backward pass, where there is one."""

    activations: int
    results: int
    moved: tuple[float, ...]
    ours: Callable     # (case, implementation) -> form
    plain: Callable    # case -> form, the textbook in jnp
    torch: Callable    # (torch, case) -> {name: form}
    mlx: Callable = lambda mx, case: {}
    shapes: Callable = lambda case: ()  # of the activations, where they are not all the case's
    tables: Callable = lambda case: ()  # what a GPU's forms take after the scale: made in the program, it would be kernels of its own
    in_place: int | None = None         # the activation that is given away, and comes back as the result of this index
    all_gradients: bool = True  # False: the residual's equals x's, and as one more output it would only add a copy, which torch does not make


# ---- the norms ----

def _ours(name, **options):
    def form(case, implementation):
        def call(*args):
            more = {key: value(case) for key, value in options.items()}
            out = getattr(jax_fusednorm, name)(*args, epsilon=EPSILON, implementation=implementation, **more)
            return list(out) if isinstance(out, tuple) else [out]
        return call
    return form


def _norm(s, scale):
    return s * jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + EPSILON) * scale.astype(jnp.float32)


def _plain_norm(case):
    def form(*args):
        *activations, scale = args
        s = sum(a.astype(jnp.float32) for a in activations)
        return [_norm(s, scale).astype(case.dtype), s.astype(case.dtype)][: len(activations)]
    return form


def _torch_norm(torch, case):
    def library(*args):
        *activations, scale = args
        s = sum(activations[1:], activations[0])
        return [torch.nn.functional.rms_norm(s, s.shape[-1:], scale, EPSILON), s][: len(activations)]

    def formula(*args):
        *activations, scale = args
        s = sum((a.float() for a in activations[1:]), activations[0].float())
        normed = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + EPSILON) * scale.float()
        return [normed.to(scale.dtype), s.to(scale.dtype)][: len(activations)]

    return {"torch rms_norm": library, "torch formula": formula}


def _mlx_norm(mx, case):
    def form(*args):
        *activations, scale = args
        s = sum(activations[1:], activations[0])
        return [mx.fast.rms_norm(s, scale, EPSILON), s][: len(activations)]
    return {"mlx fast": form}


# ---- the gated norm ----

def _plain_gated(case):
    def form(y, gate, scale):
        y, gate = y.astype(jnp.float32), gate.astype(jnp.float32)
        v = (y * jax.nn.silu(gate)).reshape(*case.shape[:-1], GROUPS, -1)
        v = (v * jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + EPSILON)).reshape(case.shape)
        return [(v.astype(case.dtype).astype(jnp.float32) * scale.astype(jnp.float32)).astype(case.dtype)]
    return form


def _torch_gated(torch, case):
    def formula(y, gate, scale):
        v = (y.float() * torch.nn.functional.silu(gate.float())).unflatten(-1, (GROUPS, -1))
        v = (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPSILON)).flatten(-2)
        return [(scale.float() * v.to(scale.dtype).float()).to(scale.dtype)]
    return {"torch formula": formula}


# ---- heads ----

def _ours_heads(case, implementation):
    def form(x, scale, positions=None):
        positions = jnp.arange(case.shape[0]) if positions is None else positions
        return [jax_fusednorm.head_rms_norm_rope(x, scale, positions, theta=THETA, rope_dim=case.rope_dim, epsilon=EPSILON,
                                                 implementation=implementation)]
    return form


def _plain_heads(case):
    half = (case.rope_dim or case.width) // 2

    def form(x, scale, positions=None):
        y = _norm(x.astype(jnp.float32), scale)
        positions = jnp.arange(case.shape[0]) if positions is None else positions
        angle = positions.astype(jnp.float32)[:, None, None] * THETA ** -(jnp.arange(half, dtype=jnp.float32) / half)
        a, b, rest = jnp.split(y, (half, 2 * half), axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return [jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1).astype(case.dtype)]
    return form


def _torch_heads(torch, case):
    half = (case.rope_dim or case.width) // 2
    angle = torch.arange(case.shape[0])[:, None, None] * THETA ** -(torch.arange(half) / half)
    cos, sin = torch.cos(angle), torch.sin(angle)

    def formula(x, scale):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPSILON) * scale.float()
        a, b, rest = y[..., :half], y[..., half:2 * half], y[..., 2 * half:]
        return [torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1).to(scale.dtype)]
    return {"torch formula": formula}


def _mlx_heads(mx, case):
    def form(x, scale):  # tokens before channels is what mx.fast.rope wants; the transposes cost it nothing
        y = mx.fast.rms_norm(x, scale, EPSILON).swapaxes(0, 1)
        return [mx.fast.rope(y, case.rope_dim or case.width, traditional=False, base=THETA, scale=1.0, offset=0).swapaxes(0, 1)]
    return {"mlx fast": form}


def _ours_qk(case, implementation):
    def form(q, k, scale, positions=None):
        positions = jnp.arange(case.shape[0]) if positions is None else positions
        return list(jax_fusednorm.qk_rms_norm_rope(q, k, scale, scale, positions, theta=THETA, epsilon=EPSILON, implementation=implementation))
    return form


def _plain_qk(case):
    form = _plain_heads(case)
    return lambda q, k, scale, positions=None: [*form(q, scale, positions), *form(k, scale, positions)]


def _torch_qk(torch, case):
    formula = _torch_heads(torch, case)["torch formula"]
    return {"torch formula": lambda q, k, scale: [*formula(q, scale), *formula(k, scale)]}


# ---- the paged cache ----

def _paged_shapes(case):
    tokens, heads, width = case.shape
    pages = tokens if tokens <= DECODE else 4 * (-(-tokens // 4 // PAGE) + 1)
    return case.shape, (pages, 1, 1, PAGE, heads // 4, width), (tokens, heads // 4, width)


def _ragged(case, xp=jnp):
    """(page_table, lengths, offsets) of integers, and the table of cosines and sines."""
    tokens, pages = case.shape[0], _paged_shapes(case)[1][0]
    sequences = tokens if tokens <= DECODE else 4
    page_table = np.random.default_rng(0).permutation(pages).reshape(sequences, -1)
    lengths, offsets = np.arange(sequences) * 7 % 100, np.arange(sequences + 1) * (tokens // sequences)
    angle = np.arange(MOST)[:, None] * THETA ** -(np.arange(case.width // 2) / (case.width // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(MOST, case.width).astype(np.float32)
    if xp is not jnp:
        return *(xp.from_numpy(a) for a in (page_table, lengths, offsets)), xp.from_numpy(table)
    # XLA would compute positions from what it can see
    return jax.lax.optimization_barrier((*(jnp.asarray(a, jnp.int32) for a in (page_table, lengths, offsets)), jnp.asarray(table)))


def _ours_paged(case, implementation):
    def form(q, pages, k, scale, *tables):
        page_table, lengths, offsets, table = tables or _ragged(case)
        q, cache = jax_fusednorm.qk_rms_norm_rope_paged(q, jax_fusednorm.PagedKVCache(pages, page_table, lengths), scale, scale, table, offsets,
                                                        layer=0, k=k, epsilon=EPSILON, implementation=implementation)
        return [q, cache.pages]
    return form


def _plain_paged(case):
    def form(q, pages, k, scale, *tables):
        page_table, lengths, offsets, table = tables or _ragged(case)
        token = jnp.arange(case.shape[0])
        sequence = jnp.searchsorted(offsets, token, side="right") - 1
        position = lengths[sequence] + token - offsets[sequence]
        cos, sin = table[position, None, ::2], table[position, None, 1::2]

        def turned(x):
            a, b = jnp.split(_norm(x.astype(jnp.float32), scale).astype(case.dtype).astype(jnp.float32), 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(case.dtype)

        return [turned(q), pages.at[page_table[sequence, position // PAGE], 0, 0, position % PAGE].set(turned(k))]
    return form


def _torch_paged(torch, case):
    page_table, lengths, offsets, table = _ragged(case, torch)

    def formula(q, pages, k, scale):
        token = torch.arange(case.shape[0])
        sequence = torch.searchsorted(offsets, token, right=True) - 1
        position = lengths[sequence] + token - offsets[sequence]
        cos, sin = table[position, None, ::2], table[position, None, 1::2]

        def turned(x):
            y = x.float()
            y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPSILON) * scale.float()).to(scale.dtype).float()
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(scale.dtype)

        pages[page_table[sequence, position // PAGE], 0, 0, position % PAGE] = turned(k)
        return [turned(q), pages]
    return {"torch formula": formula}


OPS = {
    "add_rms_norm": Op(2, 2, (4, 9), _ours("add_rms_norm"), _plain_norm, _torch_norm, _mlx_norm, all_gradients=False),
    "rms_norm": Op(1, 1, (2, 5), _ours("rms_norm"), _plain_norm, _torch_norm, _mlx_norm),
    "gated_group_rms_norm": Op(2, 1, (3, 8), _ours("gated_group_rms_norm", group_size=lambda case: case.width // GROUPS), _plain_gated,
                               _torch_gated),
    "head_rms_norm_rope": Op(1, 1, (2, 5), _ours_heads, _plain_heads, _torch_heads, _mlx_heads,
                             tables=lambda case: (jnp.arange(case.shape[0]),)),
    "qk_rms_norm_rope": Op(2, 2, (2.5, 6.25), _ours_qk, _plain_qk, _torch_qk, tables=lambda case: (jnp.arange(case.shape[0]),),
                           shapes=lambda case: (case.shape, (case.shape[0], case.shape[1] // 4, case.shape[2]))),
    "qk_rms_norm_rope_paged": Op(3, 2, (2.5,), _ours_paged, _plain_paged, _torch_paged, shapes=_paged_shapes, in_place=1, tables=_ragged),
}


def shapes(op, case):
    """Of the activations."""
    return OPS[op].shapes(case) or (case.shape,) * OPS[op].activations


def arrays(op, case, seed=0):
    """float32 activations, scale and cotangents; each contestant converts them to its own arrays of the case's dtype."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    return [draw(*s) for s in shapes(op, case)], 0.1 * draw(case.shape[-1]) + 1, [draw(*s) for s in shapes(op, case)[:OPS[op].results]]


def chained(form, count, activations, scale, between=lambda *arrays: arrays):
    """The results of the last of `count` ops, each of which takes the one before's results for its first activations."""
    for link in range(count):
        activations = between(*activations) if link else activations
        results = form(*activations, scale)
        activations = [*results, *activations[len(results):]]
    return results


def jitted(f, in_place):
    """f under jit. The operand `in_place` is a list of one array, which is given away and replaced by the result that it becomes."""
    if in_place is None:
        return jax.jit(f)
    donating = jax.jit(f, donate_argnums=in_place)

    def call(*operands):
        held = operands[in_place]
        results = donating(*operands[:in_place], held[0], *operands[in_place + 1:])
        held[0] = results[in_place]
        return results

    return call


def jax_contestants(op, case, backward, lengths, implementation):
    activations, scale, cotangents = arrays(op, case)
    activations, cotangents = ([jnp.asarray(a, case.dtype) for a in xs] for xs in (activations, cotangents))
    scale = jnp.asarray(scale, case.scale_dtype)
    of = OPS[op]
    forms = {OURS: of.ours(case, implementation), OUR_JNP: of.ours(case, "jnp"), PLAIN: of.plain(case)}
    wall = native.wall() or (lambda *arrays: arrays)
    for name, form in forms.items():
        def forward(count, *operands, form=form):
            return chained(form, count, operands[:-1], operands[-1], wall)

        def both(count, activations, scale, cotangents, form=form):
            more = []
            for link in range(count):
                if link:
                    *activations, cotangents[0] = wall(*activations, cotangents[0])
                results, pull = jax.vjp(form, *activations, scale)
                activations = [*results, *activations[len(results):]]
                gradient, *others = pull(cotangents)
                cotangents = [gradient, *cotangents[1:]]
                more.append(others if of.all_gradients else others[-1])
            return results, cotangents[0], more

        def waiting(count):
            if backward:
                call, operands = jax.jit(functools.partial(both, count)), (activations, scale, cotangents)
            else:
                call = jitted(functools.partial(forward, count), of.in_place)
                operands = (*([jnp.copy(a)] if i == of.in_place else a for i, a in enumerate(activations)), scale)
            return lambda: jax.block_until_ready(call(*operands))

        yield Contestant(name, waiting(1), tuple(map(waiting, lengths)))


def torch_contestants(op, case, backward, lengths, compiled=False):
    import torch

    convert = lambda a: torch.from_numpy(a).to(getattr(torch, case.dtype))
    activations, scale, cotangents = arrays(op, case)
    activations, cotangents = [convert(a).requires_grad_(backward) for a in activations], [*map(convert, cotangents)]
    scale = convert(scale).requires_grad_(backward)
    forms = OPS[op].torch(torch, case)
    if compiled:
        forms["torch compiled"] = torch.compile(forms["torch formula"], dynamic=False)
    for name, form in forms.items():
        def with_gradients(form=form):
            return torch.autograd.grad(form(*activations, scale), [*activations, scale], cotangents)

        def forward(form=form, count=1):
            with torch.no_grad():
                chained(form, count, activations, scale)

        if backward:
            yield Contestant(name, with_gradients)
        else:
            yield Contestant(name, forward, tuple(functools.partial(forward, count=n) for n in lengths))


def mlx_contestants(op, case, backward, lengths):
    import mlx.core as mx

    convert = lambda a: mx.array(a).astype(getattr(mx, case.dtype))
    activations, scale, cotangents = arrays(op, case)
    activations, scale, cotangents = [*map(convert, activations)], convert(scale), [*map(convert, cotangents)]
    mx.eval(activations, scale, cotangents)
    for name, form in OPS[op].mlx(mx, case).items():
        def forward(count=1, form=form):
            mx.eval(chained(form, count, activations, scale))

        if backward:
            yield Contestant(name, lambda form=form: mx.eval(mx.vjp(form, [*activations, scale], cotangents)))
        else:
            yield Contestant(name, forward, tuple(functools.partial(forward, count=n) for n in lengths))


def version(module):
    """The version of an importable peer, or None."""
    try:
        return str(importlib.import_module(module).__version__)
    except (ImportError, OSError, AttributeError):
        return None


def contestants(op, case, *, backward, lengths, implementation, torch_compile):
    yield from jax_contestants(op, case, backward, lengths, implementation)
    # Torch runs op by op and MLX nearly so: a chain of large ops tells no more than one call, and takes long.
    lengths = lengths if case.rows <= 16 else ()
    if version("torch"):
        yield from torch_contestants(op, case, backward, lengths, torch_compile)
    if version("mlx.core"):
        yield from mlx_contestants(op, case, backward, lengths)
