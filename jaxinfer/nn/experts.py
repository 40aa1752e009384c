"""A mixture of experts: a router, the experts' gated feed-forward layers, and shared experts.

Each token is sent to `per_token` of the experts, and no token is ever dropped (there is no capacity
limit, unlike in Switch Transformers, arXiv:2101.03961). Tokens are sorted by expert, so that each
product is one ragged product over all experts (`kernels/grouped_matmul`), whose cost is
proportional to the number of tokens.

On a mesh, experts are split over `expert` and each expert's hidden units over `tensor`.
`sharding/experts.py` describes the two ways in which tokens reach their experts, and their costs;
the number of tokens in a step decides which one it takes. The collectives of a layer:

    kept   1 all-reduce over both axes, with which compilers merge that of shared experts
    sent   1 all-gather of counts, 2 all-to-all, 1 all-reduce over `tensor`, 1 all-gather; and 1
           all-reduce of shared experts, which is independent of the others
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS
from jaxinfer.kernels.grouped_matmul import grouped_matmul
from jaxinfer.nn.checks import int_fields, positive_errors, raise_errors, whole_number_errors
from jaxinfer.nn.layers import FLOAT32, GatedMLP, Numerics, parameter, project
from jaxinfer.sharding.collectives import all_gather, local_shard, rank
from jaxinfer.sharding.experts import (
    ExpertRows,
    combine,
    dispatch,
    restore_order,
    select_local,
    should_dispatch,
)
from jaxinfer.sharding.products import summed

# Published layers have up to 512 (Switch Transformers: 2,048); files may have a tensor for each.
MAX_EXPERTS = 4_096
TINY = 1e-20  # DeepSeek-V3 adds it to the sum it divides by; no effect on a sum of softmax


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen and weighted.

    The scores are the softmax or the sigmoid of the router's logits. The `per_token` experts with
    the largest scores are chosen; a selection bias is added for the choice, but not to the weights.
    With several groups, only experts in the best `groups_per_token` groups can be chosen; a group's
    score is that of its best expert, or the sum of its two best. The weights are the scores,
    divided by their sum if `renormalize`, times `scale`.

    Published routers in these terms: Mixtral and gpt-oss use softmax, renormalized (which equals a
    softmax over the chosen logits). DeepSeek-V2 uses softmax; its "group_limited_greedy" scores
    groups by "best". DeepSeek-V3's "noaux_tc" uses sigmoid, a selection bias, and groups by
    "best_two" (arXiv:2412.19437).
    """

    num_experts: int
    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    has_bias: bool = False  # added to the logits
    has_selection_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["best", "best_two"] = "best"

    def __post_init__(self):
        E, G = self.num_experts, self.num_groups
        wrong = whole_number_errors(int_fields(self)) + positive_errors({"scale": self.scale})
        if not wrong and E > MAX_EXPERTS:
            wrong.append(f"num_experts is {E:,}; the limit is {MAX_EXPERTS:,}")
        if not wrong:
            if E % G or (self.group_score == "best_two" and G > 1 and E // G < 2):
                wrong.append(f"{E} experts do not make {G} groups of {self.group_score!r}")
            if self.groups_per_token > G:
                wrong.append(f"groups_per_token is {self.groups_per_token}; there are {G} groups")
            available = self.groups_per_token * (E // G)
            if self.per_token > available:
                wrong.append(f"per_token is {self.per_token}; a token can choose of {available}")
        raise_errors("the router's configuration", wrong)


class Routes(NamedTuple):
    """The experts of each token, the best first, and the weights of their outputs."""

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    selection_bias: Float[Array, " E"] | None = None,
) -> Routes:
    """Choose and weight the experts of each token, in float32, as `RouterConfig` says.

    Between equal scores the expert with the lower index comes first.
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if config.score == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if selection_bias is None else scores + selection_bias.astype(jnp.float32)
    if config.groups_per_token < config.num_groups:
        choice = jnp.where(_is_in_best_groups(choice, config), choice, -jnp.inf)
    experts = jax.lax.top_k(choice, config.per_token)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + TINY)
    return Routes(experts, weights * config.scale)


def _is_in_best_groups(choice: jax.Array, config: RouterConfig) -> jax.Array:
    T, E = choice.shape
    G = config.num_groups
    num_best = 2 if config.group_score == "best_two" else 1
    group_scores = jax.lax.top_k(choice.reshape(T, G, E // G), num_best)[0].sum(axis=-1)
    best = jax.lax.top_k(group_scores, config.groups_per_token)[1]
    is_best = (best[:, :, None] == jnp.arange(G)).any(axis=1)
    return jnp.repeat(is_best, E // G, axis=1)


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's `gate * sigmoid(alpha * gate) * (up + 1)`; gate is clamped to at most `limit`, and
    up to the range from `-limit` to `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A layer's router and experts.

    `ffn_dim` is the width of each expert. `shared_ffn_dim` is the width of the shared experts,
    which every token passes through (several are computed as one wide one); None: there are none.
    `has_shared_gate` multiplies their output by `sigmoid(x @ shared_gate)` (Qwen2-MoE).
    """

    router: RouterConfig
    ffn_dim: int
    activation: str | ClampedSwiGLU = "silu"
    bias: bool = False
    shared_ffn_dim: int | None = None
    has_shared_gate: bool = False

    def __post_init__(self):
        whole = {"ffn_dim": self.ffn_dim, "shared_ffn_dim": self.shared_ffn_dim}
        if self.shared_ffn_dim is None:
            del whole["shared_ffn_dim"]
        raise_errors("the experts' configuration", whole_number_errors(whole))


class Experts(nnx.Module):
    """`sum_k weight_k * expert_k(x)`, plus the output of the shared experts.

    An expert is `(act(x @ gate) * (x @ up)) @ down` (GLU variants, arXiv:2002.05202). Parameters:
    `router` [D, E], `gate` and `up` [E, D, F], `down` [E, F, D]; their biases `router_bias` [E],
    `gate_bias` and `up_bias` [E, F], `down_bias` [E, D]; `selection_bias` [E], float32; `shared` (a
    `GatedMLP`) and `shared_gate` [D, 1].
    """

    def __init__(self, dim: int, config: ExpertsConfig, numerics: Numerics):
        self.config = config
        router = config.router
        D, E, F = dim, router.num_experts, config.ffn_dim
        self.layout = numerics.layout
        self.split_over = self.layout.axes("experts")
        self.hidden_over = self.layout.axes("expert_ffn")
        in_axes = ("experts", "model", "expert_ffn")
        out_axes = ("experts", "expert_ffn", "model")
        float32 = dataclasses.replace(numerics, dtype=FLOAT32)
        optional = lambda exists, *args: parameter(*args) if exists else None
        self.router = parameter((D, E), ("model", "choices"), numerics)
        self.router_bias = optional(router.has_bias, (E,), ("choices",), numerics)
        # float32: DeepSeek-V3's scores differ by less than bfloat16's precision at the bias's size.
        self.selection_bias = optional(router.has_selection_bias, (E,), ("choices",), float32)
        self.gate = parameter((E, D, F), in_axes, numerics, packs="matrix")
        self.up = parameter((E, D, F), in_axes, numerics, packs="matrix")
        self.down = parameter((E, F, D), out_axes, numerics, packs="matrix")
        self.gate_bias = optional(config.bias, (E, F), in_axes[::2], numerics)
        self.up_bias = optional(config.bias, (E, F), in_axes[::2], numerics)
        self.down_bias = optional(config.bias, (E, D), out_axes[::2], numerics)
        self.shared = self._shared(D, numerics)
        self.shared_gate = optional(config.has_shared_gate, (D, 1), ("model", "one"), numerics)

    def _shared(self, dim: int, numerics: Numerics) -> GatedMLP | None:
        ffn_dim, activation = self.config.shared_ffn_dim, self.config.activation
        if ffn_dim is None:
            return None
        assert isinstance(activation, str)
        return GatedMLP(dim, ffn_dim, activation, numerics, bias=False)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        routed = self._routed(x)
        if self.shared is None:
            return routed.astype(x.dtype)
        shared = self.shared(x).astype(jnp.float32)
        if self.shared_gate is not None:
            gate = project(x, self.shared_gate[...], accumulate=jnp.float32)
            shared = shared * jax.nn.sigmoid(gate)
        return (routed + shared).astype(x.dtype)

    def routes(self, x: Float[Array, "T D"]) -> Routes:
        """Return each token's experts and their weights."""
        logits = project(x, self.router[...], accumulate=jnp.float32)
        if self.router_bias is not None:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        bias = None if self.selection_bias is None else self.selection_bias[...]
        return route(logits, self.config.router, bias)

    def _routed(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the routed experts' output, float32; sums over devices are made in x's dtype."""
        if self._should_dispatch(x):
            return self._dispatch_and_compute(x)
        router, routes = self.config.router, self.routes(x)
        rows, order = select_local(x, routes.experts, router.num_experts, self.split_over)
        out = restore_order(self._run_experts(rows), order, router.per_token)
        out, summed_over = _weighted(out, routes), self.split_over + self.hidden_over
        if not summed_over:
            return out
        return summed(out.astype(x.dtype), self.layout, summed_over).astype(jnp.float32)

    def _should_dispatch(self, x: Float[Array, "T D"]) -> bool:
        e, t = self.layout.parts("experts"), self.layout.parts("expert_ffn")
        return should_dispatch(len(x), self.config.router.per_token, e, t, x.nbytes // len(x))

    def _dispatch_and_compute(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return `_routed(x)` by all-to-all; each device routes its share of the padded tokens."""
        router, axes = self.config.router, self.split_over
        T, e = len(x), self.layout.parts("experts")
        x = local_shard(jnp.pad(x, ((0, -T % e), (0, 0))), axes, e, dim=0)
        routes = self.routes(x)
        rows, plan = dispatch(x, routes.experts, router.num_experts, axes)
        out = combine(self._run_experts(rows).astype(x.dtype), plan, router.per_token, axes)
        out = summed(_weighted(out, routes).astype(x.dtype), self.layout, self.hidden_over)
        return all_gather(out, axes, dim=0)[:T].astype(jnp.float32)

    def _run_experts(self, rows: ExpertRows) -> Float[Array, "rows D"]:
        """Return the output of this device's experts for their rows, float32, and zeros after them.

        If hidden units are split, it is this device's part of the sum.
        """
        x, sizes = rows
        row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
        expert = (jnp.cumsum(sizes) <= row).sum(axis=1, dtype=jnp.int32)  # the expert of each row
        product = lambda x, weight: grouped_matmul(x, weight[...], sizes).astype(jnp.float32)
        gate = product(x, self.gate) + _bias(self.gate_bias, expert)
        up = product(x, self.up) + _bias(self.up_bias, expert)
        down = product(self._activated(gate, up).astype(x.dtype), self.down)
        bias = _bias(self.down_bias, expert)
        if self.hidden_over and self.down_bias is not None:
            bias = jnp.where(
                rank(self.hidden_over) == 0, bias, 0
            )  # added once, not once per device
        return down + bias

    def _activated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        activation = self.config.activation
        if isinstance(activation, ClampedSwiGLU):
            return activation(gate, up)
        return ACTIVATIONS[activation](gate) * up


def _bias(bias: nnx.Param | None, expert: Int[Array, " rows"]) -> jax.Array | float:
    """Return the bias of each row's expert, float32; 0 after the experts' rows."""
    if bias is None:
        return 0.0
    return bias[...].astype(jnp.float32).at[expert].get(mode="fill", fill_value=0)


def _weighted(out: Float[Array, "T k D"], routes: Routes) -> Float[Array, "T D"]:
    return (out.astype(jnp.float32) * routes.weights[..., None]).sum(axis=1)
