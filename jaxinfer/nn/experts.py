"""A mixture of experts: a router, the experts' gated feed-forward layers, and experts for all.

Each token is sent to `per_token` of the experts, and none is ever dropped (no capacity, other than
Switch Transformers, arXiv:2101.03961). Tokens are sorted by expert, so that each product is one
ragged product of all experts (`kernels/grouped_matmul`), whose cost follows the tokens.

On a mesh, experts are split over `expert` and each one's hidden units over `tensor`. How tokens and
experts meet, and what that costs, is in `sharding/experts.py`; which of its two forms a step takes
follows from its number of tokens. A layer's collectives:

    kept   1 all-reduce over both axes, in which compilers include that of shared experts
    sent   1 all-gather of counts, 2 all-to-all, 1 all-reduce over `tensor`, 1 all-gather; and 1
           all-reduce of shared experts, which no other waits for
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
from jaxinfer.nn.checks import not_positive, not_whole, refuse_wrong, whole_fields
from jaxinfer.nn.layers import FLOAT32, GatedMLP, Numerics, parameter, project
from jaxinfer.sharding.collectives import all_gather, own_part, rank
from jaxinfer.sharding.experts import Rows, give_back, is_sent, keep, put_back, send
from jaxinfer.sharding.products import summed

# Published layers have up to 512 (Switch Transformers: 2,048); files keep a tensor of each.
MAX_EXPERTS = 4_096
TINY = 1e-20  # what DeepSeek-V3 adds to a sum that it divides by; lost beside a sum of softmax


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen and weighted.

    Scores are the softmax or the sigmoid of the router's logits. Chosen are the `per_token` largest
    scores (plus the selection bias, where there is one: it chooses, and does not weigh). With
    several groups only the experts of the best `groups_per_token` of them can be chosen; a group is
    as good as its best expert, or as its two best together. Weights are the scores themselves,
    divided by their sum if `renormalize`, times `scale`.

    The names it goes by elsewhere: Mixtral, gpt-oss: softmax, renormalized (a softmax over the
    chosen logits is the same). DeepSeek-V2: softmax; "group_limited_greedy": groups by "best".
    DeepSeek-V3, "noaux_tc": sigmoid, selection bias, groups by "best_two" (arXiv:2412.19437).
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
        wrong = not_whole(whole_fields(self)) + not_positive({"scale": self.scale})
        if not wrong and E > MAX_EXPERTS:
            wrong.append(f"num_experts is {E:,}; this build has up to {MAX_EXPERTS:,}")
        if not wrong:
            if E % G or (self.group_score == "best_two" and G > 1 and E // G < 2):
                wrong.append(f"{E} experts do not make {G} groups of {self.group_score!r}")
            if self.groups_per_token > G:
                wrong.append(f"groups_per_token is {self.groups_per_token}; there are {G} groups")
            available = self.groups_per_token * (E // G)
            if self.per_token > available:
                wrong.append(f"per_token is {self.per_token}; a token can choose of {available}")
        refuse_wrong("the router's configuration", wrong)


class Routes(NamedTuple):
    """The experts of each token, the best first, and what their outputs are multiplied with."""

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    selection_bias: Float[Array, " E"] | None = None,
) -> Routes:
    """Choose and weigh, in float32; the rule is in `RouterConfig`. Of equal scores the expert with
    the lower number comes first."""
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
    of_group = jax.lax.top_k(choice.reshape(T, G, E // G), num_best)[0].sum(axis=-1)
    best = jax.lax.top_k(of_group, config.groups_per_token)[1]
    is_best = (best[:, :, None] == jnp.arange(G)).any(axis=1)
    return jnp.repeat(is_best, E // G, axis=1)


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's `gate * sigmoid(alpha * gate) * (up + 1)`, with gate at most `limit` and up between
    `-limit` and `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A layer's router and experts. `ffn_dim` is each expert's; `shared_ffn_dim` that of the
    experts every token goes through (several of them are one wide one), None: there are none.
    `has_shared_gate` multiplies theirs with `sigmoid(x @ shared_gate)` (Qwen2-MoE)."""

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
        refuse_wrong("the experts' configuration", not_whole(whole))


class Experts(nnx.Module):
    """`sum_k weight_k * expert_k(x)`, plus what the shared experts make of x.

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
        wide = dataclasses.replace(numerics, dtype=FLOAT32)
        given = lambda is_there, *what: parameter(*what) if is_there else None
        self.router = parameter((D, E), ("model", "choices"), numerics)
        self.router_bias = given(router.has_bias, (E,), ("choices",), numerics)
        # float32: DeepSeek-V3's scores differ by less than bfloat16's step at the bias's size.
        self.selection_bias = given(router.has_selection_bias, (E,), ("choices",), wide)
        self.gate = parameter((E, D, F), in_axes, numerics, packs="matrix")
        self.up = parameter((E, D, F), in_axes, numerics, packs="matrix")
        self.down = parameter((E, F, D), out_axes, numerics, packs="matrix")
        self.gate_bias = given(config.bias, (E, F), in_axes[::2], numerics)
        self.up_bias = given(config.bias, (E, F), in_axes[::2], numerics)
        self.down_bias = given(config.bias, (E, D), out_axes[::2], numerics)
        self.shared = self._shared(D, numerics)
        self.shared_gate = given(config.has_shared_gate, (D, 1), ("model", "one"), numerics)

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
        """Each token's experts and their weights."""
        logits = project(x, self.router[...], accumulate=jnp.float32)
        if self.router_bias is not None:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        bias = None if self.selection_bias is None else self.selection_bias[...]
        return route(logits, self.config.router, bias)

    def _routed(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """float32, of numbers in x's type once they have gone over links."""
        if self._is_sent(x):
            return self._by_sending(x)
        router, routes = self.config.router, self.routes(x)
        rows, order = keep(x, routes.experts, router.num_experts, self.split_over)
        out = put_back(self._computed(rows), order, router.per_token)
        out, summed_over = _weighted(out, routes), self.split_over + self.hidden_over
        if not summed_over:
            return out
        return summed(out.astype(x.dtype), self.layout, summed_over).astype(jnp.float32)

    def _is_sent(self, x: Float[Array, "T D"]) -> bool:
        e, t = self.layout.parts("experts"), self.layout.parts("expert_ffn")
        return is_sent(len(x), self.config.router.per_token, e, t, x.nbytes // len(x))

    def _by_sending(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Each device routes its share of the tokens, the last shares padded."""
        router, axes = self.config.router, self.split_over
        T, e = len(x), self.layout.parts("experts")
        x = own_part(jnp.pad(x, ((0, -T % e), (0, 0))), axes, e, dim=0)
        routes = self.routes(x)
        rows, way = send(x, routes.experts, router.num_experts, axes)
        out = give_back(self._computed(rows).astype(x.dtype), way, router.per_token, axes)
        out = summed(_weighted(out, routes).astype(x.dtype), self.layout, self.hidden_over)
        return all_gather(out, axes, dim=0)[:T].astype(jnp.float32)

    def _computed(self, rows: Rows) -> Float[Array, "rows D"]:
        """What the experts held here make of their rows, float32; zero behind these. Of hidden
        units that are split, this device's part of the sum."""
        x, sizes = rows
        place = jnp.arange(len(x), dtype=jnp.int32)[:, None]
        expert = (jnp.cumsum(sizes) <= place).sum(axis=1, dtype=jnp.int32)  # of each row
        product = lambda x, weight: grouped_matmul(x, weight[...], sizes).astype(jnp.float32)
        gate = product(x, self.gate) + _bias(self.gate_bias, expert)
        up = product(x, self.up) + _bias(self.up_bias, expert)
        down = product(self._activated(gate, up).astype(x.dtype), self.down)
        bias = _bias(self.down_bias, expert)
        if self.hidden_over and self.down_bias is not None:
            bias = jnp.where(rank(self.hidden_over) == 0, bias, 0)  # once, not once a part
        return down + bias

    def _activated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        activation = self.config.activation
        if isinstance(activation, ClampedSwiGLU):
            return activation(gate, up)
        return ACTIVATIONS[activation](gate) * up


def _bias(bias: nnx.Param | None, expert: Int[Array, " rows"]) -> jax.Array | float:
    """Of each row, float32; 0 behind the experts' rows."""
    if bias is None:
        return 0.0
    return bias[...].astype(jnp.float32).at[expert].get(mode="fill", fill_value=0)


def _weighted(out: Float[Array, "T k D"], routes: Routes) -> Float[Array, "T D"]:
    return (out.astype(jnp.float32) * routes.weights[..., None]).sum(axis=1)
