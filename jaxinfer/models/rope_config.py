"""Reading RoPE's parameters from config.json (both generations of keys) and from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.nn.rope import (
    Divided,
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Rope,
    Unscaled,
    Yarn,
)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def rope_from_hf(config: Mapping[str, Any], head_dim: int, max_len: int) -> Rope:
    """Reads `rope_parameters`, or the older `rope_theta` + `rope_scaling`.

    Raises `ValueError` for an unknown type and for a type whose parameters are missing.
    """
    given: dict[str, Any] = dict(config.get("rope_scaling") or {})
    given |= config.get("rope_parameters") or {}
    theta = given.get("rope_theta", config.get("rope_theta", 10_000.0))
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if "original_max_position_embeddings" in config:
        given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    share = 1.0 if partial is None else partial
    if given.get("rope_type") == "proportional":  # all dimensions, some of them standing still
        return Rope(float(theta), head_dim, Proportional(given.get("factor") or 1.0, share))
    return Rope(float(theta), int(head_dim * share), _scaling_from_hf(given, max_len))


def _scaling_from_hf(given: Mapping[str, Any], max_len: int) -> Unscaled:
    kind = given.get("rope_type", given.get("type", "default"))
    original_len = given.get("original_max_position_embeddings") or max_len

    def need(key: str) -> Any:
        if given.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key!r}; config.json has {sorted(given)}")
        return given[key]

    match kind:
        case "default":
            return Unscaled()
        case "linear":
            return Linear(need("factor"))
        case "dynamic":
            # Hugging Face compares with max_position_embeddings, whatever the original length.
            return Dynamic(need("factor"), max_len)
        case "llama3":
            return Llama3(
                need("factor"), need("low_freq_factor"), need("high_freq_factor"), original_len
            )
        case "yarn":
            factor = given.get("factor") or max_len / original_len
            return Yarn(
                factor,
                original_len,
                beta_fast=given.get("beta_fast") or 32.0,
                beta_slow=given.get("beta_slow") or 1.0,
                truncate=given.get("truncate", True),
                attention_factor=_yarn_attention_factor(given, factor),
            )
        case "longrope":
            factor = given.get("factor") or max_len / original_len
            attention_factor = given.get("attention_factor")
            if attention_factor is None:
                attention_factor = _longrope_attention_factor(factor, original_len)
            return LongRope(
                tuple(need("short_factor")),
                tuple(need("long_factor")),
                original_len,
                attention_factor=attention_factor,
            )
    raise ValueError(f"rope type {kind!r} is unknown; this build has {', '.join(ROPE_TYPES)}")


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature as a factor on cosine and sine (arXiv:2309.00071, section 3.4)."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return given["attention_factor"]
    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def _longrope_attention_factor(factor: float, original_len: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))


def rope_from_gguf(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, tensors: Mapping[str, Any]
) -> Rope:
    """Reads `<architecture>.rope.*`; a `rope_freqs.weight` tensor is Llama 3's scaling."""
    prefix = f"{architecture}.rope"
    theta = float(metadata.get(f"{prefix}.freq_base", 10_000.0))
    dim = int(metadata.get(f"{prefix}.dimension_count", head_dim))
    kind = metadata.get(f"{prefix}.scaling.type", "none")
    factor = metadata.get(f"{prefix}.scaling.factor", 1.0)
    max_len = metadata.get(f"{architecture}.context_length", 0)
    original_len = metadata.get(f"{prefix}.scaling.original_context_length", max_len)
    if "rope_freqs.weight" in tensors:
        factors = tensors["rope_freqs.weight"].read().tolist()
        if len(factors) != dim // 2:
            raise ValueError(f"rope_freqs.weight has {len(factors)} factors; RoPE needs {dim // 2}")
        return Rope(theta, dim, Divided(tuple(factors)))
    if kind in ("none", "") or factor == 1.0:
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, Linear(factor))
    if kind == "yarn":
        attention_factor = _yarn_attention_factor({}, factor)
        return Rope(theta, dim, Yarn(factor, original_len, attention_factor=attention_factor))
    raise ValueError(f"{prefix}.scaling.type is {kind!r}; this build reads none, linear and yarn")
