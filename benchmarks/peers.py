"""The contestants of run.py: ours, plain JAX, torch and MLX, each as callables that run one op, or a chain, to the end.

Every op maps activations and a scale to the first of the next activations: rms_norm (x, scale) -> (normed,), add_rms_norm
(x, residual, scale) -> (normed, sum), gated_group_rms_norm (y, gate, scale) -> (out,), in eight groups. So a chain is
`activations = op(*activations, scale)` again and again, in which a gate stays; forward and backward chain likewise, with the
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

EPSILON = 1e-6
ACTIVATIONS = {"rms_norm": 1, "add_rms_norm": 2, "gated_group_rms_norm": 2}
RESULTS = {"rms_norm": 1, "add_rms_norm": 2, "gated_group_rms_norm": 1}
GROUPS = 8
OURS, OUR_JNP, PLAIN = "ours", "our jnp", "plain jax"


@dataclasses.dataclass(frozen=True)
class Contestant:
    name: str
    one: Callable[[], None]  # one op, or its forward and backward, and the wait for the results
    chains: tuple[Callable[[], None], ...] = ()  # for each of `lengths`: as many dependent ops in one program, and the wait


def arrays(op, case, seed=0):
    """float32 activations, scale and cotangents; each contestant converts them to its own arrays of the case's dtype."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    several = lambda counts: [draw(*case.shape) for _ in range(counts[op])]
    return several(ACTIVATIONS), 0.1 * draw(case.shape[-1]) + 1, several(RESULTS)


def jax_contestants(op, case, backward, lengths, implementation):
    gated = op == "gated_group_rms_norm"

    def plain(*args):
        *activations, scale = args
        if gated:
            y, gate = (a.astype(jnp.float32) for a in activations)
            v = (y * jax.nn.silu(gate)).reshape(*case.shape[:-1], GROUPS, -1)
            v = (v * jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + EPSILON)).reshape(case.shape)
            return [(v.astype(case.dtype).astype(jnp.float32) * scale.astype(jnp.float32)).astype(case.dtype)]
        s = sum(a.astype(jnp.float32) for a in activations)
        normed = s * jax.lax.rsqrt(jnp.mean(s * s, axis=-1, keepdims=True) + EPSILON) * scale.astype(jnp.float32)
        return [normed.astype(case.dtype), s.astype(case.dtype)][: len(activations)]

    def ours(*args, implementation):
        options = dict(group_size=case.width // GROUPS) if gated else {}
        out = getattr(jax_fusednorm, op)(*args, epsilon=EPSILON, implementation=implementation, **options)
        return list(out) if isinstance(out, tuple) else [out]

    activations, scale, cotangents = arrays(op, case)
    activations, cotangents = ([jnp.asarray(a, case.dtype) for a in xs] for xs in (activations, cotangents))
    scale = jnp.asarray(scale, case.scale_dtype)
    forms = {OURS: functools.partial(ours, implementation=implementation),
             OUR_JNP: functools.partial(ours, implementation="jnp"),
             PLAIN: plain}
    wall = native.wall() or (lambda *arrays: arrays)
    for name, form in forms.items():
        def forward(count, activations, scale, form=form):
            for link in range(count):
                activations = wall(*activations) if link else activations
                results = form(*activations, scale)
                activations = [*results, *activations[len(results):]]
            return results

        def both(count, activations, scale, cotangents, form=form):
            more = []
            for link in range(count):
                if link:
                    *activations, cotangents[0] = wall(*activations, cotangents[0])
                results, pull = jax.vjp(form, *activations, scale)
                activations = [*results, *activations[len(results):]]
                # The residual's gradient equals x's; as one more output it would only add a copy, which torch does not make.
                gradient, *others = pull(cotangents)
                cotangents = [gradient, *cotangents[1:]]
                more.append(others if gated else others[-1])
            return results, cotangents[0], more

        def waiting(count):
            jitted = jax.jit(functools.partial(both if backward else forward, count))
            operands = (activations, scale, cotangents) if backward else (activations, scale)
            return lambda: jax.block_until_ready(jitted(*operands))

        yield Contestant(name, waiting(1), tuple(map(waiting, lengths)))


def torch_contestants(op, case, backward, lengths, compiled=False):
    import torch

    gated = op == "gated_group_rms_norm"

    def library(*args):
        *activations, scale = args
        s = sum(activations[1:], activations[0])
        return [torch.nn.functional.rms_norm(s, s.shape[-1:], scale, EPSILON), s][: len(activations)]

    def formula(*args):
        *activations, scale = args
        if gated:
            y, gate = (a.float() for a in activations)
            v = (y * torch.nn.functional.silu(gate)).unflatten(-1, (GROUPS, -1))
            v = (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPSILON)).flatten(-2)
            return [(scale.float() * v.to(scale.dtype).float()).to(scale.dtype)]
        s = sum((a.float() for a in activations[1:]), activations[0].float())
        normed = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + EPSILON) * scale.float()
        return [normed.to(scale.dtype), s.to(scale.dtype)][: len(activations)]

    convert = lambda a: torch.from_numpy(a).to(getattr(torch, case.dtype))
    activations, scale, cotangents = arrays(op, case)
    activations, cotangents = [convert(a).requires_grad_(backward) for a in activations], [*map(convert, cotangents)]
    scale = convert(scale).requires_grad_(backward)
    forms = {"torch formula": formula} if gated else {"torch rms_norm": library, "torch formula": formula}
    if compiled:
        forms["torch compiled"] = torch.compile(formula, dynamic=False)
    for name, form in forms.items():
        def with_gradients(form=form):
            return torch.autograd.grad(form(*activations, scale), [*activations, scale], cotangents)

        def forward(form=form, count=1):
            with torch.no_grad():
                xs = activations
                for _ in range(count):
                    results = form(*xs, scale)
                    xs = [*results, *xs[len(results):]]

        if backward:
            yield Contestant(name, with_gradients)
        else:
            yield Contestant(name, forward, tuple(functools.partial(forward, count=n) for n in lengths))


def mlx_contestants(op, case, backward, lengths):
    import mlx.core as mx

    def form(*args):
        *activations, scale = args
        s = sum(activations[1:], activations[0])
        return [mx.fast.rms_norm(s, scale, EPSILON), s][: len(activations)]

    convert = lambda a: mx.array(a).astype(getattr(mx, case.dtype))
    activations, scale, cotangents = arrays(op, case)
    activations, scale, cotangents = [*map(convert, activations)], convert(scale), [*map(convert, cotangents)]
    mx.eval(activations, scale, cotangents)

    def forward(count=1):
        xs = activations
        for _ in range(count):
            xs = form(*xs, scale)
        mx.eval(xs)

    if backward:
        yield Contestant("mlx fast", lambda: mx.eval(mx.vjp(form, [*activations, scale], cotangents)))
    else:
        yield Contestant("mlx fast", forward, tuple(functools.partial(forward, count=n) for n in lengths))


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
    if version("mlx.core") and op != "gated_group_rms_norm":
        yield from mlx_contestants(op, case, backward, lengths)
