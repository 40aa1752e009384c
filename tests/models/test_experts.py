"""Mixtures of experts: routing and products against a loop over tokens and experts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.kernels.quantized_matmul import dequantize, quantize
from jaxinfer.nn.experts import ClampedSwiGLU, Experts, ExpertsConfig, RouterConfig, route
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.tokenwise import tokenwise

T, D, E, F = 13, 16, 8, 12
ROUTERS = {
    "softmax": RouterConfig(E, 2),
    "softmax_renormalized": RouterConfig(E, 3, renormalize=True),
    "sigmoid_scaled": RouterConfig(E, 2, "sigmoid", renormalize=True, scale=2.5),
    "all": RouterConfig(E, E, renormalize=True),
    "one": RouterConfig(E, 1),
    "best_groups": RouterConfig(E, 3, num_groups=4, groups_per_token=2, scale=16.0),
    "every_group": RouterConfig(E, 3, num_groups=4, groups_per_token=4),
    "best_two_with_bias": RouterConfig(
        E,
        3,
        "sigmoid",
        renormalize=True,
        scale=2.5,
        has_selection_bias=True,
        num_groups=4,
        groups_per_token=2,
        group_score="best_two",
    ),
    "bias": RouterConfig(E, 2, "sigmoid", has_selection_bias=True),
}


def looped(logits, config: RouterConfig, selection_bias):
    """Return one token's {expert: weight}, computed by a plain loop in float64."""
    logits = logits.astype(np.float64)
    if config.score == "softmax":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores + (selection_bias if config.has_selection_bias else 0)
    size = config.num_experts // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    num_best = 1 if config.group_score == "best" else 2
    groups.sort(key=lambda group: -sum(sorted(choice[list(group)])[-num_best:]))
    allowed = [expert for group in groups[: config.groups_per_token] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: config.per_token]
    total = sum(scores[chosen]) if config.renormalize else 1.0
    return {expert: scores[expert] / total * config.scale for expert in chosen}


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_equal_a_loop(name):
    config, rng = ROUTERS[name], np.random.default_rng(1)
    logits = rng.normal(0, 2, (200, E)).astype(np.float32)
    bias = rng.normal(0, 0.5, E).astype(np.float32)
    routes = route(
        jnp.asarray(logits), config, jnp.asarray(bias) if config.has_selection_bias else None
    )
    for t in range(len(logits)):
        expected = looped(logits[t], config, bias)
        assert np.asarray(routes.experts[t]).tolist() == list(expected)
        np.testing.assert_allclose(routes.weights[t], list(expected.values()), rtol=2e-6)


def test_groups_and_selection_bias_change_the_choice():
    """The cases above could not fail otherwise."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (200, E)).astype(np.float32)
    bias = rng.normal(0, 0.5, E).astype(np.float32)
    config = ROUTERS["best_two_with_bias"]
    chosen = lambda config: [set(looped(row, config, bias)) for row in logits]
    for change in (
        {"has_selection_bias": False},
        {"groups_per_token": 4},
        {"group_score": "best"},
        {"num_groups": 2, "groups_per_token": 1},
    ):
        other = dataclasses.replace(config, **change)
        assert chosen(other) != chosen(config), change


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_token": 0}, "per_token is 0"),
        ({"per_token": 9}, "a token can choose of 8"),
        ({"num_groups": 3}, "8 experts do not make 3 groups"),
        ({"num_groups": 4, "groups_per_token": 5}, "groups_per_token is 5; there are 4 groups"),
        ({"num_groups": 4, "per_token": 3}, "a token can choose of 2"),
        ({"num_groups": 8, "group_score": "best_two"}, "8 groups of 'best_two'"),
    ],
)
def test_invalid_router_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**{"num_experts": E, "per_token": 2, **fields})


EXPERTS = {
    "plain": ExpertsConfig(ROUTERS["softmax_renormalized"], F),
    "shared": ExpertsConfig(ROUTERS["best_two_with_bias"], F, "gelu", shared_ffn_dim=20),
    "shared_gate": ExpertsConfig(ROUTERS["softmax"], F, shared_ffn_dim=20, has_shared_gate=True),
    "biases": ExpertsConfig(
        RouterConfig(E, 2, renormalize=True, has_bias=True), F, ClampedSwiGLU(1.702, 1.5), bias=True
    ),
}


def made(name: str, numerics: Numerics, spoil=lambda path, values: values) -> Experts:
    """Return the module with random parameters."""
    module, rng = Experts(D, EXPERTS[name], numerics), np.random.default_rng(2)
    graph, state = nnx.split(module)
    paths, tree = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    filled = []
    for path, leaf in paths:
        values = jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype)
        filled.append(leaf.replace(spoil(path[-1].key, values)))
    return nnx.merge(graph, jax.tree.unflatten(tree, filled))


def compiled(module: Experts, x: np.ndarray) -> np.ndarray:
    """Run the module as one program; op by op, about thirty would be compiled."""
    return np.asarray(jax.jit(lambda rows: module(rows))(x))


def in_float64(module: Experts) -> dict[str, np.ndarray]:
    """Return the parameters by path; a missing bias is 0."""
    names = ("router_bias", "selection_bias", "gate_bias", "up_bias", "down_bias")
    found = {name: np.zeros((E, 1)) for name in names}
    leaves = jax.tree_util.tree_flatten_with_path(
        nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )[0]
    for path, leaf in leaves:
        value = leaf[...]
        value = value if isinstance(value, jax.Array) else dequantize(value, jnp.float32)
        found[".".join(str(key.key) for key in path)] = np.asarray(value, np.float64)
    return found


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def gelu(v):
    erf = np.vectorize(math.erf)
    return v * (1 + erf(v / math.sqrt(2))) / 2


def by_loop(module: Experts, x: np.ndarray) -> np.ndarray:
    config, w, x = module.config, in_float64(module), x.astype(np.float64)
    act = gelu if config.activation == "gelu" else lambda v: v * sigmoid(v)
    out = np.zeros_like(x)
    logits = x @ w["router"] + w["router_bias"].reshape(-1)
    for t in range(len(x)):
        for e, weight in looped(logits[t], config.router, w["selection_bias"].reshape(-1)).items():
            gate = x[t] @ w["gate"][e] + w["gate_bias"][e]
            up = x[t] @ w["up"][e] + w["up_bias"][e]
            if isinstance(config.activation, ClampedSwiGLU):
                gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5) + 1
                gate = gate * sigmoid(1.702 * gate)
            else:
                gate = act(gate)
            out[t] += weight * ((gate * up) @ w["down"][e] + w["down_bias"][e])
        if "shared.gate_up" in w:
            gate, up = (x[t] @ half for half in w["shared.gate_up"])
            shared = (act(gate) * up) @ w["shared.down.weight"]
            if "shared_gate" in w:
                shared = shared * sigmoid(x[t] @ w["shared_gate"])
            out[t] += shared
    return out


@pytest.mark.matrix
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_equal_a_loop(name):
    module = made(name, Numerics())
    x = np.random.default_rng(3).normal(size=(T, D)).astype(np.float32)
    np.testing.assert_allclose(compiled(module, x), by_loop(module, x), atol=2e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_experts_stay_packed(bits):
    """Gate, up and down are `QuantArray`s; the router is an array."""
    pack = lambda path, values: (
        quantize(values, bits, 4, has_zeros=True) if path in ("gate", "up", "down") else values
    )
    module = made("plain", Numerics(), pack)
    assert not isinstance(module.up[...], jax.Array)
    x = np.random.default_rng(3).normal(size=(T, D)).astype(np.float32)
    np.testing.assert_allclose(compiled(module, x), by_loop(module, x), atol=2e-5)


def test_expert_with_all_tokens_drops_none():
    """The groups are ragged: there is no capacity limit."""
    x = np.abs(np.random.default_rng(3).normal(size=(T, D))).astype(np.float32)
    to_one = lambda path, v: v.at[:].set(0).at[:, :3].set(9.0) if path == "router" else v
    module = made("plain", Numerics(), to_one)
    experts = np.asarray(module.routes(jnp.asarray(x)).experts)
    assert (np.sort(experts, axis=1) == [0, 1, 2]).all()
    np.testing.assert_allclose(compiled(module, x), by_loop(module, x), atol=2e-4)


def test_nan_token_leaves_other_tokens_unchanged():
    module = made("plain", Numerics())
    x = np.random.default_rng(3).normal(size=(T, D)).astype(np.float32)
    spoiled = x.copy()
    spoiled[[2, 7]] = np.nan
    got, clean = compiled(module, spoiled), compiled(module, x)
    others = np.delete(np.arange(T), [2, 7])
    np.testing.assert_allclose(got[others], clean[others], atol=2e-6)


@pytest.mark.parametrize("name", ["plain", "biases", "shared"])
def test_batch_invariant_bits_do_not_depend_on_other_tokens(name):
    """In batch-invariant mode a token has the same bits alone and at any place in a batch."""
    numerics = Numerics(batch_invariant=True)
    module, rng = made(name, numerics), np.random.default_rng(4)
    x = rng.normal(size=(40, D)).astype(np.float32)
    run = jax.jit(lambda rows: tokenwise(numerics, module, rows))
    whole = np.asarray(run(jnp.asarray(x)))
    for _ in range(3):
        order = rng.permutation(40)
        assert (np.asarray(run(jnp.asarray(x[order]))) == whole[order]).all()
    for t in (0, 17, 39):
        alone = np.zeros_like(x)
        alone[0] = x[t]
        assert (np.asarray(run(jnp.asarray(alone)))[0] == whole[t]).all()
