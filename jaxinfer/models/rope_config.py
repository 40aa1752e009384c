"""Reading RoPE's parameters from config.json (both generations of keys) and from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.hf_config import FULL, SLIDING
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


def rope_from_hf(
    config: Mapping[str, Any], head_dim: int, max_len: int, *, theta: float = 10_000.0
) -> Rope:
    """Reads `rope_parameters`, or the older `rope_theta` (default: `theta`) + `rope_scaling`.

    Raises `ValueError` for an unknown type and for a type whose parameters are missing.
    """
    given = _with_floats(dict(config.get("rope_scaling") or {}))
    given |= _with_floats(config.get("rope_parameters") or {})
    if nested := sorted(key for key, value in given.items() if isinstance(value, Mapping)):
        raise ValueError(f"rope_parameters differ by layer ({nested}); this family has one RoPE")
    stated = (given.get("rope_theta"), config.get("rope_theta"))
    theta = next((value for value in stated if value is not None), theta)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if "original_max_position_embeddings" in config:
        given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    share = 1.0 if partial is None else partial
    if given.get("rope_type") == "proportional":  # all dimensions, some of them standing still
        return Rope(float(theta), head_dim, Proportional(given.get("factor") or 1.0, share))
    return Rope(float(theta), int(head_dim * share), _scaling_from_hf(given, max_len))


def _with_floats(given: Mapping[str, Any]) -> dict[str, Any]:
    """JSON writes 32 for 32.0; lengths alone are whole numbers."""

    def changed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(changed, value))
        return float(value) if type(value) is int else value

    return {k: v if k.endswith("max_position_embeddings") else changed(v) for k, v in given.items()}


def ropes_from_hf(
    config: Mapping[str, Any], head_dim: int, max_len: int, *, theta: float, local_theta: float
) -> tuple[Rope, Rope]:
    """RoPE of the full layers and of the sliding ones, in families where they differ.

    Reads `rope_parameters` nested by kind of layer, or the older flat keys, where `rope_scaling`
    speaks of the full layers alone. The thetas are defaults.
    """
    nested: Mapping[str, Any] = config.get("rope_parameters") or {}
    if unknown := sorted(nested.keys() - {FULL, SLIDING}):
        raise ValueError(f"rope_parameters has {unknown}; this family has {FULL} and {SLIDING}")
    others = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_scaling")}
    full = dict(nested.get(FULL) or {}) | dict(config.get("rope_scaling") or {})
    sliding = nested.get(SLIDING) or {}
    return (
        rope_from_hf(others | {"rope_parameters": full}, head_dim, max_len, theta=theta),
        rope_from_hf(
            others | {"rope_parameters": sliding, "rope_theta": None},
            head_dim,
            max_len,
            theta=local_theta,
        ),
    )


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
            factor = float(given.get("factor") or max_len / original_len)
            return Yarn(
                factor,
                original_len,
                beta_fast=float(given.get("beta_fast") or 32.0),
                beta_slow=float(given.get("beta_slow") or 1.0),
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
    """Reads `<architecture>.rope.*`. A tensor `rope_freqs.weight` is Llama 3's scaling, a pair of
    `rope_factors_long.weight` and `rope_factors_short.weight` LongRoPE's."""
    prefix = f"{architecture}.rope"
    theta = float(metadata.get(f"{prefix}.freq_base", 10_000.0))
    dim = int(metadata.get(f"{prefix}.dimension_count", head_dim))
    max_len = metadata.get(f"{architecture}.context_length", 0)
    given = {
        key.removeprefix(f"{prefix}.scaling."): value
        for key, value in metadata.items()
        if key.startswith(f"{prefix}.scaling.")
    }
    return Rope(theta, dim, _scaling_from_gguf(given, dim, max_len, tensors))


def _scaling_from_gguf(
    given: Mapping[str, Any], dim: int, max_len: int, tensors: Mapping[str, Any]
) -> Unscaled:
    def factors(name: str) -> tuple[float, ...]:
        values = tuple(tensors[name].read().tolist())
        if len(values) != dim // 2:
            raise ValueError(f"{name} has {len(values)} factors; RoPE needs {dim // 2}")
        return values

    kind, factor = given.get("type", "none"), given.get("factor", 1.0)
    original_len = given.get("original_context_length", max_len)
    if "rope_factors_long.weight" in tensors:
        attention_factor = given.get("attn_factor")
        if attention_factor is None:
            attention_factor = _longrope_attention_factor(max_len / original_len, original_len)
        return LongRope(
            factors("rope_factors_short.weight"),
            factors("rope_factors_long.weight"),
            original_len,
            attention_factor=attention_factor,
        )
    attention_factor = given.get("attn_factor", 1.0)
    if "rope_freqs.weight" in tensors:
        return Divided(factors("rope_freqs.weight"), attention_factor=attention_factor)
    if kind in ("none", "") or factor == 1.0:
        return Unscaled(attention_factor=attention_factor)
    if kind == "linear":
        return Linear(factor, attention_factor=attention_factor)
    if kind == "yarn":
        return Yarn(
            factor,
            original_len,
            beta_fast=given.get("yarn_beta_fast", 32.0),
            beta_slow=given.get("yarn_beta_slow", 1.0),
            attention_factor=attention_factor * _yarn_attention_factor({}, factor),
        )
    raise ValueError(f"rope.scaling.type is {kind!r}; this build reads none, linear and yarn")
