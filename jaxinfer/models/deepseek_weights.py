"""Where the two formats store DeepSeek's parameters.

Both store RoPE's dimensions as adjacent pairs, (0, 1), (2, 3), ...; here RoPE rotates halves
(`kernels/rotary.py`), so the rows of queries and keys are reordered alike, which leaves the scores
unchanged. `kv_b_proj` has, for each head, the rows that make its key and those that make its value;
the absorbed form (`nn/latent_attention.py`) needs them separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.models.decoder_weights import GGUF_IGNORED, GGUF_ROWS, HF_IGNORED, HF_ROWS
from jaxinfer.models.family import (
    LINEAR,
    LINEAR_STACKED,
    RESHAPED,
    RowIndex,
    Shape,
    Transform,
    Weight,
    WeightTable,
)
from jaxinfer.nn.latent_attention import LatentConfig

_ATTENTION = r"blocks\.(\d+)\.attention\."
_MLP = r"blocks\.(\d+)\.mlp\."


def _deinterleave_last(rope_dim: int) -> Callable[[Shape], RowIndex]:
    """Return the row order that turns pairs into halves in each head's last `rope_dim` numbers.

    The parameter's last axes are heads and numbers, or numbers alone.
    """

    def rows(shape: Shape) -> RowIndex:
        heads, numbers = shape[-2:] if len(shape) == 3 else (1, shape[-1])
        order = np.arange(numbers)
        pairs = order[numbers - rope_dim :]
        order = np.concatenate([order[: numbers - rope_dim], pairs[::2], pairs[1::2]])
        return (np.arange(heads)[:, None] * numbers + order).reshape(-1)

    return rows


def _deinterleaved(transform: Transform, latent: LatentConfig) -> Transform:
    if not latent.is_interleaved:
        return transform
    return dataclasses.replace(transform, rows=_deinterleave_last(latent.rope_dim))


def _split_kv_b(latent: LatentConfig, num_heads: int) -> tuple[Transform, Transform]:
    """Return the transforms from [N * (nope_dim + value_dim), r] to `k_b` [N, nope_dim, r] and to
    `v_b` [N, r, value_dim]."""
    nope, width = latent.nope_dim, latent.nope_dim + latent.value_dim
    stored_shape = lambda shape: (num_heads * width, latent.kv_rank)

    def rows(start: int, end: int) -> Callable[[Shape], RowIndex]:
        head_rows = np.arange(num_heads)[:, None] * width + np.arange(start, end)
        return lambda shape: head_rows.reshape(-1)

    def transposed(stored: np.ndarray, shape: Shape) -> np.ndarray:
        return stored.reshape(LINEAR_STACKED.stored_shape(shape)).swapaxes(-1, -2)

    keys = Transform(stored_shape, lambda stored, shape: stored.reshape(shape), rows(0, nope))
    return keys, Transform(stored_shape, transposed, rows(nope, width))


def hf_weights(config: Any) -> WeightTable:
    latent = config.latent
    k_b, v_b = _split_kv_b(latent, config.num_heads)
    layer, attention = r"model.layers.\1.", r"model.layers.\1.self_attn."
    q = "q_proj" if latent.q_rank is None else "q_b_proj"
    rows = (
        Weight(_ATTENTION + r"q_a\.weight", attention + "q_a_proj.weight", LINEAR),
        Weight(_ATTENTION + r"q_a\.bias", attention + "q_a_proj.bias"),
        Weight(_ATTENTION + r"q_a_norm\.weight", attention + "q_a_layernorm.weight"),
        Weight(
            _ATTENTION + r"q\.weight", attention + f"{q}.weight", _deinterleaved(LINEAR, latent)
        ),
        Weight(
            _ATTENTION + r"kv_a\.weight",
            attention + "kv_a_proj_with_mqa.weight",
            _deinterleaved(LINEAR, latent),
        ),
        Weight(
            _ATTENTION + r"kv_a\.bias",
            attention + "kv_a_proj_with_mqa.bias",
            _deinterleaved(RESHAPED, latent),
        ),
        Weight(_ATTENTION + r"kv_a_norm\.weight", attention + "kv_a_layernorm.weight"),
        Weight(_ATTENTION + "k_b", attention + "kv_b_proj.weight", k_b),
        Weight(_ATTENTION + "v_b", attention + "kv_b_proj.weight", v_b),
        Weight(_MLP + "router", layer + "mlp.gate.weight", LINEAR),
        Weight(_MLP + "selection_bias", layer + "mlp.gate.e_score_correction_bias"),
        Weight(_MLP + "(gate|up|down)", layer + r"mlp.experts.{}.\2_proj.weight", LINEAR),
        Weight(
            _MLP + r"shared\.gate_up",
            (
                layer + "mlp.shared_experts.gate_proj.weight",
                layer + "mlp.shared_experts.up_proj.weight",
            ),
            LINEAR,
        ),
        Weight(
            _MLP + r"shared\.down\.weight", layer + "mlp.shared_experts.down_proj.weight", LINEAR
        ),
    )
    mtp = rf"model\.layers\.{config.num_layers}\..*"  # multi-token prediction modules
    return WeightTable((*rows, *HF_ROWS), (*HF_IGNORED, mtp))


def gguf_weights(config: Any) -> WeightTable:
    latent = config.latent
    if latent.is_kv_split:
        kv_b = (
            Weight(_ATTENTION + "k_b", r"blk.\1.attn_k_b.weight", LINEAR_STACKED),
            Weight(_ATTENTION + "v_b", r"blk.\1.attn_v_b.weight", LINEAR_STACKED),
        )
    else:
        k_b, v_b = _split_kv_b(latent, config.num_heads)
        kv_b = (
            Weight(_ATTENTION + "k_b", r"blk.\1.attn_kv_b.weight", k_b),
            Weight(_ATTENTION + "v_b", r"blk.\1.attn_kv_b.weight", v_b),
        )
    q = "q" if latent.q_rank is None else "q_b"
    rows = (
        Weight(_ATTENTION + r"q_a\.weight", r"blk.\1.attn_q_a.weight", LINEAR),
        Weight(_ATTENTION + r"q_a_norm\.weight", r"blk.\1.attn_q_a_norm.weight"),
        Weight(
            _ATTENTION + r"q\.weight", rf"blk.\1.attn_{q}.weight", _deinterleaved(LINEAR, latent)
        ),
        Weight(
            _ATTENTION + r"kv_a\.weight",
            r"blk.\1.attn_kv_a_mqa.weight",
            _deinterleaved(LINEAR, latent),
        ),
        Weight(_ATTENTION + r"kv_a_norm\.weight", r"blk.\1.attn_kv_a_norm.weight"),
        *kv_b,
        Weight(_MLP + "router", r"blk.\1.ffn_gate_inp.weight", LINEAR),
        Weight(_MLP + "selection_bias", r"blk.\1.exp_probs_b.bias"),
        Weight(_MLP + "(gate|up|down)", r"blk.\1.ffn_\2_exps.weight", LINEAR_STACKED),
        Weight(
            _MLP + r"shared\.gate_up",
            (r"blk.\1.ffn_gate_shexp.weight", r"blk.\1.ffn_up_shexp.weight"),
            LINEAR,
        ),
        Weight(_MLP + r"shared\.down\.weight", r"blk.\1.ffn_down_shexp.weight", LINEAR),
    )
    return WeightTable((*rows, *GGUF_ROWS), GGUF_IGNORED)
