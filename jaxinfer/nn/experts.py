"""A mixture of experts: a router, the experts' gated feed-forward layers, and experts for all.

Each token is sent to `per_token` of the experts, and none is ever dropped (no capacity, other than
Switch Transformers, arXiv:2101.03961). Tokens are sorted by expert, so that each product is one
ragged product of all experts (`kernels/grouped_matmul`), whose cost follows the tokens.
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
        in_axes, out_axes = ("experts", "model", "ffn"), ("experts", "ffn", "model")
        wide = dataclasses.replace(numerics, dtype=FLOAT32)
        given = lambda is_there, *what: parameter(*what) if is_there else None
        self.router = parameter((D, E), ("model", "experts"), numerics)
        self.router_bias = given(router.has_bias, (E,), ("experts",), numerics)
        # float32: DeepSeek-V3's scores differ by less than bfloat16's step at the bias's size.
        self.selection_bias = given(router.has_selection_bias, (E,), ("experts",), wide)
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
        routed = self._routed(x, self.routes(x))
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

    def _routed(self, x: Float[Array, "T D"], routes: Routes) -> Float[Array, "T D"]:
        """float32."""
        E, k = self.config.router.num_experts, self.config.router.per_token
        expert = routes.experts.reshape(-1)  # [T * k]
        order = jnp.argsort(expert)
        expert = expert[order]
        sizes = (expert[:, None] == jnp.arange(E)).sum(axis=0, dtype=jnp.int32)
        rows = x[order // k]
        gate = grouped_matmul(rows, self.gate[...], sizes)
        up = grouped_matmul(rows, self.up[...], sizes)
        hidden = self._activate(_with_bias(gate, self.gate_bias, expert), up, expert)
        down = grouped_matmul(hidden.astype(x.dtype), self.down[...], sizes)
        out = _with_bias(down, self.down_bias, expert)[jnp.argsort(order)]
        return (out.reshape(*routes.weights.shape, -1) * routes.weights[..., None]).sum(axis=1)

    def _activate(self, gate: jax.Array, up: jax.Array, expert: jax.Array) -> jax.Array:
        up = _with_bias(up, self.up_bias, expert)
        activation = self.config.activation
        if isinstance(activation, ClampedSwiGLU):
            return activation(gate, up)
        return ACTIVATIONS[activation](gate) * up


def _with_bias(rows: jax.Array, bias: nnx.Param | None, expert: jax.Array) -> jax.Array:
    """[T * k, columns], float32."""
    rows = rows.astype(jnp.float32)
    return rows if bias is None else rows + bias[...].astype(jnp.float32)[expert]
