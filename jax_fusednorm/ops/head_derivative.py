"""The kernels that the head ops' cotangents share.

Of one head x of D channels, with r = rsqrt(mean(x^2) + epsilon), gain = scale + offset and n~ the result's cotangent with its pairs turned back,

    x~ = r (gain n~ - x r^2 / D sum(gain n~ x))        scale~ = sum over tokens and heads of n~ x r

Roundings count as the identity: float32 inside, one rounding for each result. Source: differentiation of the formula.
"""

import math

import jax
import jax.numpy as jnp

# Teams of one simdgroup that work at the same time: on CUDA 512 threads on each of the 132 multiprocessors of an H100 or H200.
_TEAMS = {"cuda": 132 * 16, "metal": 512, "host": 64}


def _teams(launcher, tokens, heads, others=0):
    """How many teams have the heads of each kind, and the other columns, as what they move; no more than there are heads.

    others: reads and writes of other columns, in heads.
    """
    weights = [*(3 * count for count in heads), others]  # of a head two arrays are read and one is written
    most = [tokens * count if isinstance(tokens, int) else math.inf for count in heads]  # an exported number of tokens may be a symbol
    return [min(max(_TEAMS[launcher] * weight // sum(weights), 1), limit) if weight else 0
            for weight, limit in zip(weights, (*most, tokens if isinstance(tokens, int) else math.inf))]


def cotangents(call, xs, positions, frequencies, scales, bars, rotation, *, wanted):
    """[x~ of each of one or two `xs`, scale~ of each], the latter None where not `wanted`.

    scales: as the kernels take them; rotation: the attributes of the forward kernel.
    """
    tokens, width = math.prod(xs[0].shape[:-2]), xs[0].shape[-1]
    x_teams, k_teams, _ = _teams(call.launcher, tokens, [x.shape[-2] for x in xs] + [0] * (2 - len(xs)))
    made = call("head_rms_norm_rope_cotangent",
                [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs), *_partials(x_teams + k_teams, width, wanted)],
                xs[0], positions, frequencies, *xs[1:], *bars, *scales, has_k=len(xs) == 2, x_teams=x_teams, k_teams=k_teams, **rotation)
    return [*made[:len(xs)], *_sums(made[len(xs):], x_teams)[:len(xs)]]


def packed_cotangents(call, projection, positions, frequencies, scales, bars, rotation, starts, *, wanted):
    """[the projection's cotangent, q_scale~, k_scale~], likewise. bars: of q, k and, where there are three `starts`, v."""
    tokens, width = math.prod(projection.shape[:-1]), bars[0].shape[-1]
    heads = [bar.shape[-2] for bar in bars]
    others = projection.shape[-1] // width - sum(heads[:2]) + sum(heads[2:])
    x_teams, k_teams, other_teams = _teams(call.launcher, tokens, heads[:2], others)
    other_teams = other_teams or min(1, x_teams)  # for less than a head
    [bar, *partials] = call("head_rms_norm_rope_packed_cotangent",
                            [jax.ShapeDtypeStruct(projection.shape, projection.dtype), *_partials(x_teams + k_teams, width, wanted)],
                            projection, positions, frequencies, *bars[:2], *bars[2:], *scales, **starts,
                            x_teams=x_teams, k_teams=k_teams, other_teams=other_teams, **rotation)
    return [bar, *_sums(partials, x_teams)]


def _partials(rows, width, wanted):
    return [jax.ShapeDtypeStruct((rows, width), jnp.float32)] * wanted


def _sums(partials, x_teams):
    if not partials:
        return [None, None]
    return [jnp.sum(part, axis=0) for part in jnp.split(partials[0], [x_teams])]
