"""What a module is as a value, for every one of both APIs, beside Flax's own: equal, hashed, pickled and copied by what it was made with."""

import copy
import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

flax = pytest.importorskip("flax")
from flax import linen, nnx  # noqa: E402

import jax_fusednorm.flax.linen as our_linen  # noqa: E402
import jax_fusednorm.flax.nnx as our_nnx  # noqa: E402
from plain import draw  # noqa: E402

WIDTH = 8
SIZES = dict(num_features=WIDTH, in_features=WIDTH, out_features=6, features=6, num_normed=4, head_dim=WIDTH)
INPUTS = dict(x=draw(1, (2, WIDTH)), residual=draw(2, (2, WIDTH)), y=draw(3, (2, WIDTH)), gate=draw(4, (2, WIDTH)),
              q=draw(5, (2, 3, WIDTH)), k=draw(6, (2, 1, WIDTH)), positions=jnp.arange(2))
OF_LINEN = {"Flax's own": linen.RMSNorm, **{name: getattr(our_linen, name) for name in our_linen.__all__}}
OF_NNX = {"Flax's own": nnx.RMSNorm, **{name: getattr(our_nnx, name) for name in our_nnx.__all__}}
each_linen = pytest.mark.parametrize("module", OF_LINEN.values(), ids=OF_LINEN)
each_nnx = pytest.mark.parametrize("module", OF_NNX.values(), ids=OF_NNX)


def needed(function, values):
    """Those of `values` that `function` cannot do without."""
    return {name: values[name] for name, p in inspect.signature(function).parameters.items()
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD and name not in ("self", "rngs")}


def make_linen(module, **options):
    return module(**needed(module, SIZES), **options)


def make_nnx(module, **options):
    return module(**needed(module.__init__, SIZES), rngs=nnx.Rngs(0), **options)


def inputs_of(module):
    return tuple(needed(module.__call__, INPUTS).values())


def copies(made):
    """The same module by every way there is."""
    again = pickle.loads(pickle.dumps(made))
    return {"pickled": again, "pickled twice": pickle.loads(pickle.dumps(again)), "copied": copy.copy(made), "copied deeply": copy.deepcopy(made)}


def same(a, b):
    return a == b and hash(a) == hash(b)


OTHERS = {bool: lambda v: not v, float: lambda v: v + 0.5, int: lambda v: v + 1}
OTHERS_BY_NAME = dict(implementation="jnp", style="interleaved", placement="suffix", activation="sigmoid", rounding="float32", group_size=4,
                      gate_start=0, sum_rounding="storage", norm_rounding="storage", rope_dim=4, round_before_rope=True, dtype="float32",
                      axis_name="devices")


def others(defaults):
    """{option: another value}, of those whose values are known."""
    found = {name: OTHERS[type(value)](value) for name, value in defaults.items() if type(value) in OTHERS}
    found |= {name: OTHERS_BY_NAME[name] for name in defaults if name in OTHERS_BY_NAME}
    assert len(found) >= 5
    return found


@each_linen
def test_linen_modules_are_equal_where_their_fields_are(module):
    made = make_linen(module)
    for how, other in {"made alike": make_linen(module), "copy()": made.copy(), "clone()": made.clone(), **copies(made)}.items():
        assert same(made, other), how
    defaults = {f.name: f.default for f in dataclasses.fields(module) if f.init and f.default is not dataclasses.MISSING}
    for name, other in others(defaults).items():
        changed = make_linen(module, **{name: other})
        assert changed != made, name
        assert same(changed, make_linen(module, **{name: other})) and same(changed, made.copy(**{name: other})), name


@each_linen
def test_equal_linen_modules_share_one_trace(module):
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(made, variables, inputs):
        traces.append(made)
        return made.apply(variables, *inputs)

    made, inputs = make_linen(module), inputs_of(module)
    variables = made.init(jax.random.key(0), *inputs)
    for each in (made, make_linen(module), made.copy(), made.clone(), *copies(made).values()):
        apply(each, variables, inputs)
    assert len(traces) == 1
    apply(make_linen(module, epsilon=0.5), variables, inputs)
    assert len(traces) == 2


def scales(variables):
    return [np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(variables) if "scale" in str(path)]


OFFSET = {name: module for name, module in OF_LINEN.items() if "scale_offset" in {f.name for f in dataclasses.fields(module)}}


@pytest.mark.parametrize("module", OFFSET.values(), ids=OFFSET)
def test_a_copy_starts_at_its_own_offset_s_scale(module):
    plain, offset = make_linen(module), make_linen(module, scale_offset=1.0)
    started = {"copy": offset.copy(scale_offset=0.0), "clone": offset.clone(scale_offset=0.0), "back": plain.copy(scale_offset=1.0),
               "pickled": pickle.loads(pickle.dumps(offset)), "None": make_linen(module, scale_init=None, scale_offset=0.25)}
    for how, each in started.items():
        found = scales(each.init(jax.random.key(0), *inputs_of(module)))
        assert found and all((scale + each.scale_offset == 1).all() for scale in found), how
    own = make_linen(module, scale_init=linen.initializers.ones, scale_offset=1.0)  # an initializer asked for is not the default
    assert all((scale == 1).all() for scale in scales(own.copy(scale_offset=0.5).init(jax.random.key(0), *inputs_of(module))))


def test_at_least_five_modules_have_an_offset():
    assert len(OFFSET) >= 5


@each_nnx
def test_nnx_modules_have_equal_graphs_where_their_arguments_are_equal(module):
    made = make_nnx(module)
    graph = nnx.graphdef(made)
    assert same(graph, nnx.graphdef(make_nnx(module))) and same(graph, pickle.loads(pickle.dumps(graph)))
    for how, other in {"clone": nnx.clone(made), **copies(made)}.items():
        assert same(graph, nnx.graphdef(other)), how
        for (path, leaf), (_, want) in zip(nnx.to_flat_state(nnx.state(other)), nnx.to_flat_state(nnx.state(made)), strict=True):
            np.testing.assert_array_equal(leaf[...], want[...], err_msg=f"{how}: {path}")
    accepted = {name: p.default for owner in module.__mro__ if "__init__" in vars(owner)
                for name, p in inspect.signature(owner.__init__).parameters.items()}
    for name, other in others(accepted).items():
        changed = nnx.graphdef(make_nnx(module, **{name: other}))
        assert changed != graph and same(changed, nnx.graphdef(make_nnx(module, **{name: other}))), name


@each_nnx
def test_equal_nnx_modules_share_one_trace(module):
    traces = []

    @nnx.jit
    def call(made, inputs):
        traces.append(made)
        return made(*inputs)

    made, inputs = make_nnx(module), inputs_of(module)
    for each in (made, make_nnx(module), nnx.clone(made), *copies(made).values()):
        call(each, inputs)
    assert len(traces) == 1
    call(make_nnx(module, epsilon=0.5), inputs)
    assert len(traces) == 2
