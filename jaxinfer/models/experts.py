"""Weight-table rows and layer configurations that mixture-of-experts families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.models.decoder import LayerConfig
from jaxinfer.models.family import LINEAR, LINEAR_STACKED, RESHAPED, Weight
from jaxinfer.models.gguf_config import DECODER_KEYS, GgufKeys, has_block_tensor
from jaxinfer.models.hf_config import require_ints
from jaxinfer.nn.experts import ExpertsConfig, RouterConfig
from jaxinfer.nn.rope import Rope

_MLP = r"blocks\.(\d+)\.mlp\."
_HF = r"model.layers.\1.mlp."

# The names in Qwen's and DeepSeek's files.
HF_EXPERTS_ROWS: tuple[Weight, ...] = (
    Weight(rf"{_MLP}router", rf"{_HF}gate.weight", LINEAR),
    Weight(rf"{_MLP}(gate|up|down)", rf"{_HF}experts.{{}}.\2_proj.weight", LINEAR),
)


def hf_shared_rows(name: str) -> tuple[Weight, ...]:
    """Return rows of the shared experts, stored as `shared_expert` (Qwen) or `shared_experts`."""
    return (
        Weight(
            rf"{_MLP}shared\.gate_up",
            (rf"{_HF}{name}.gate_proj.weight", rf"{_HF}{name}.up_proj.weight"),
            LINEAR,
        ),
        Weight(rf"{_MLP}shared\.down\.weight", rf"{_HF}{name}.down_proj.weight", LINEAR),
    )


GGUF_EXPERTS_ROWS: tuple[Weight, ...] = (
    Weight(rf"{_MLP}router", r"blk.\1.ffn_gate_inp.weight", LINEAR),
    Weight(rf"{_MLP}router_bias", r"blk.\1.ffn_gate_inp.bias"),
    Weight(rf"{_MLP}selection_bias", r"blk.\1.exp_probs_b.bias"),
    Weight(
        rf"{_MLP}(gate|up|down)",
        r"blk.\1.ffn_\2_exps.weight",
        LINEAR_STACKED,
        # The names in files from before April 2024.
        alternative=Weight(rf"{_MLP}(gate|up|down)", r"blk.\1.ffn_\2.{}.weight", LINEAR),
    ),
    Weight(rf"{_MLP}(gate|up|down)_bias", r"blk.\1.ffn_\2_exps.bias"),
    Weight(rf"{_MLP}shared_gate", r"blk.\1.ffn_gate_inp_shexp.weight", RESHAPED),
    Weight(
        rf"{_MLP}shared\.gate_up",
        (r"blk.\1.ffn_gate_shexp.weight", r"blk.\1.ffn_up_shexp.weight"),
        LINEAR,
    ),
    Weight(rf"{_MLP}shared\.down\.weight", r"blk.\1.ffn_down_shexp.weight", LINEAR),
)

# The keys that `layers_from_gguf` reads, and those of every decoder.
EXPERT_KEYS = DECODER_KEYS | {
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
}


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a config.json; transformers 5 writes another key for some."""
    return require_ints(
        config, "num_local_experts" if "num_local_experts" in config else "num_experts"
    )[0]


def mixed_layers(
    layers: Sequence[LayerConfig], experts: ExpertsConfig, is_mixture: Sequence[bool]
) -> tuple[LayerConfig, ...]:
    """Return `layers` with experts in place of the MLP where `is_mixture` is true."""
    mixture = lambda layer: dataclasses.replace(layer, ffn_dim=None, experts=experts)
    return tuple(
        mixture(layer) if has_experts else layer
        for layer, has_experts in zip(layers, is_mixture, strict=True)
    )


def layers_from_gguf(
    keys: GgufKeys,
    tensors: Mapping[str, Any],
    rope: Rope,
    *,
    renormalize: bool,
    default_ffn_dim: int | None = None,
    windows: Sequence[int | None] = (None,),
    **experts_fields: Any,
) -> tuple[LayerConfig, ...]:
    """Return the layers of a GGUF file; layers that have a router have experts.

    `renormalize` and `default_ffn_dim` (None: the layer's width divided by the experts per token)
    are the architecture's defaults for a file that does not state them. Layer i has the window
    `windows[i % len(windows)]`. `experts_fields` are further fields of `ExpertsConfig`.
    """
    ffn_dim, per_token = keys.get_int("feed_forward_length"), keys.get_int("expert_used_count")
    router = RouterConfig(
        keys.get_int("expert_count"),
        per_token,
        renormalize=bool(keys.get("expert_weights_norm", renormalize)),
        scale=keys.get_scale("expert_weights_scale"),
        has_bias=has_block_tensor(tensors, "ffn_gate_inp.bias"),
    )
    default_ffn_dim = default_ffn_dim or max(1, ffn_dim // per_token)
    experts_dim = keys.get_int("expert_feed_forward_length", default_ffn_dim)
    experts = ExpertsConfig(router, experts_dim, **experts_fields)
    count = keys.num_layers()
    layers = [LayerConfig(rope, ffn_dim, windows[i % len(windows)]) for i in range(count)]
    return mixed_layers(
        layers, experts, [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(count)]
    )
