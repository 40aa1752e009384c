"""A Llama forward pass in float64 NumPy: slow, short, and sharing no code with the engine.

It is a second reference besides the logits recorded from transformers. It needs no PyTorch, takes
any token sequence, and has negligible rounding, so it also tells which of two float32 results is
closer. It runs once over a whole sequence, without a cache, batches or pages.

Rotary scalings follow their papers: linear (Chen et al. 2023), dynamic NTK (bloc97 and emozilla
2023), YaRN (Peng et al. 2023, sections 3.2 and 3.4), LongRoPE (Ding et al. 2024), Llama 3.1's by
wavelength, and proportional (Gemma's, which rotates only the leading frequencies). Where a paper
leaves something open, transformers 5 decides: a "dynamic" or "longrope" sequence uses the
frequencies of its whole length for all positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary keys of a `config.json`, in the old or the new form, in one dictionary.

    An outer `original_max_position_embeddings` takes precedence over an inner one; without either,
    the scalings that need it use `max_position_embeddings`.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    inner = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    rope["original"] = config.get("original_max_position_embeddings", inner)
    return rope


def _yarn(rope: Mapping[str, Any], freqs: np.ndarray, factor: float) -> tuple[np.ndarray, float]:
    """Apply YaRN: blend original and divided frequencies by their rotations over the length."""
    theta, half = rope["rope_theta"], len(freqs)

    def index_of(rotations: float) -> float:
        """Return the (fractional) index of the frequency that makes this many full rotations."""
        return half * math.log(rope["original"] / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = index_of(rope.get("beta_fast") or 32), index_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high + 0.001 if low == high else high
    divided = np.clip((np.arange(half) - low) / (high - low), 0, 1)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        attention = rope["attention_factor"]
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    else:
        attention = temperature(1.0)
    return freqs * (1 - divided) + freqs / factor * divided, attention


def _llama3(rope: Mapping[str, Any], freqs: np.ndarray, factor: float) -> np.ndarray:
    """Apply Llama 3.1's scaling: keep short wavelengths, divide long ones, blend in between."""
    rotations = rope["original"] * freqs / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return freqs * kept + freqs / factor * (1 - kept)


def frequencies(config: Mapping[str, Any], head_dim: int, length: int) -> tuple[np.ndarray, float]:
    """Return the angle per position of each pair, [H/2], and the factor of cos and sin."""
    rope, half = rope_settings(config), head_dim // 2
    kind, theta, longest = rope["rope_type"], rope["rope_theta"], config["max_position_embeddings"]
    factor = rope.get("factor") or longest / rope["original"]
    freqs = theta ** (-np.arange(half) / half)
    if kind == "default":
        return freqs, 1.0
    if kind == "linear":
        return freqs / factor, 1.0
    if kind == "dynamic":
        stretch = factor * max(length, longest) / longest - (factor - 1)
        stretched = theta * stretch ** (head_dim / (head_dim - 2))
        return stretched ** (-np.arange(half) / half), 1.0
    if kind == "yarn":
        return _yarn(rope, freqs, factor)
    if kind == "longrope":
        chosen = rope["long_factor" if length > rope["original"] else "short_factor"]
        grown = math.sqrt(1 + math.log(factor) / math.log(rope["original"])) if factor > 1 else 1.0
        given = rope.get("attention_factor")
        return freqs / np.array(chosen), grown if given is None else given
    if kind == "llama3":
        return _llama3(rope, freqs, factor), 1.0
    if kind == "proportional":
        rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
        return np.where(np.arange(half) < rotated, freqs / rope.get("factor", 1.0), 0.0), 1.0
    raise ValueError(f"rope_type {kind!r} has no reference here; write its formula first")


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate the pairs (i, i + H/2) of x [T, heads, H] by the angles of cos and sin [T, 1, H/2]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokens: Sequence[int]
) -> np.ndarray:
    """Compute the logits [T, V] in float64 at every position of one sequence.

    `config` is the content of a Hugging Face `config.json`, `tensors` the checkpoint's by name.
    """
    num_heads = config["num_attention_heads"]
    num_kv = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    length = len(tokens)
    freqs, scale = frequencies(config, head_dim, length)
    angles = np.arange(length)[:, None, None] * freqs
    cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
    future = np.triu(np.full((length, length), -np.inf), 1)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x * x, -1, keepdims=True)
        return x / np.sqrt(mean_square + config["rms_norm_eps"]) * tensors[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ np.asarray(tensors[f"{name}.weight"], np.float64).T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def heads(x: np.ndarray, name: str, count: int) -> np.ndarray:
        return linear(x, name).reshape(length, count, head_dim)

    embedding = tensors["model.embed_tokens.weight"]
    x = np.asarray(embedding[np.asarray(tokens)], np.float64)
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}"
        y = norm(x, f"{block}.input_layernorm")
        q = _rotate(heads(y, f"{block}.self_attn.q_proj", num_heads), cos, sin)
        k = _rotate(heads(y, f"{block}.self_attn.k_proj", num_kv), cos, sin)
        v = heads(y, f"{block}.self_attn.v_proj", num_kv)
        k, v = (np.repeat(a, num_heads // num_kv, axis=1) for a in (k, v))
        scores = np.einsum("qnh,knh->nqk", q, k) / math.sqrt(head_dim) + future
        mixed = np.einsum("nqk,knh->qnh", _softmax(scores), v).reshape(length, -1)
        x = x + linear(mixed, f"{block}.self_attn.o_proj")
        y = norm(x, f"{block}.post_attention_layernorm")
        gate = linear(y, f"{block}.mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(y, f"{block}.mlp.up_proj")
        x = x + linear(gated, f"{block}.mlp.down_proj")
    x = norm(x, "model.norm")
    if config.get("tie_word_embeddings"):
        return x @ np.asarray(embedding, np.float64).T
    return linear(x, "lm_head")


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a Llama GGUF file as (`config.json` content, float32 tensors by Hugging Face name).

    GGUF stores the rows of the query and key projections with each rotary pair adjacent; they are
    reordered to halves here.
    """
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv = value("attention.head_count"), value("attention.head_count_kv")
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        data = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            count = {"attn_q": heads, "attn_k": kv}.get(parts[2])
            if count is not None:
                pairs = data.reshape(count, -1, 2, data.shape[-1])
                data = pairs.swapaxes(1, 2).reshape(data.shape)
            tensors[f"model.layers.{parts[1]}.{_GGUF_NAMES[parts[2]]}.{parts[3]}"] = data
        else:
            outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
            tensors[f"{outer.get(parts[0], 'lm_head')}.{parts[1]}"] = data
    config = {
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    return config, tensors
