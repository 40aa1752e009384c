"""Readers of RoPE's parameters: config.json, with both generations of keys, and GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.gguf_config import GgufKeys
from jaxinfer.models.hf_config import FULL, SLIDING, get_float, get_object
from jaxinfer.nn.checks import positive_errors, whole_number_errors
from jaxinfer.nn.rope import (
    Divided,
    DynamicNtk,
    LinearScaling,
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
    """Read `rope_parameters`, or the older `rope_theta` (default: `theta`) and `rope_scaling`.

    Raises `ValueError` for an unknown type and for a type whose parameters are missing.
    """
    given = _with_floats(get_object(config, "rope_scaling"))
    given |= _with_floats(get_object(config, "rope_parameters"))
    if nested := sorted(key for key, value in given.items() if isinstance(value, Mapping)):
        raise ValueError(f"rope_parameters differ by layer ({nested}); this family has one RoPE")
    stated = given if given.get("rope_theta") is not None else config
    if stated.get("rope_theta") is not None:
        theta = get_float(stated, "rope_theta")
    partial = given if "partial_rotary_factor" in given else config
    share = 1.0
    if partial.get("partial_rotary_factor") is not None:
        share = get_float(partial, "partial_rotary_factor")
    if "original_max_position_embeddings" in config:
        given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if (
        given.get("rope_type") == "proportional"
    ):  # a frequency for all dimensions, 0 for those not rotated
        return Rope(theta, head_dim, Proportional(_get(given, "factor", 1.0), share))
    return Rope(theta, int(head_dim * share), _scaling_from_hf(given, max_len))


def _get(given: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a key's value, or `default` if it is missing or null. `Rope` refuses a 0."""
    value = given.get(name)
    return default if value is None else value


def _with_floats(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with floats for integers, except lengths: JSON may write 32 for 32.0."""

    def to_float(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(to_float, value))
        return float(value) if type(value) is int else value

    return {
        k: v if k.endswith("max_position_embeddings") else to_float(v) for k, v in given.items()
    }


def ropes_from_hf(
    config: Mapping[str, Any], head_dim: int, max_len: int, *, theta: float, local_theta: float
) -> tuple[Rope, Rope]:
    """Return the RoPE of the full layers and that of the sliding ones, where they differ.

    Reads `rope_parameters` nested by layer type, or the older flat keys, in which `rope_scaling`
    applies only to the full layers. `theta` and `local_theta` are defaults.
    """
    nested = get_object(config, "rope_parameters")
    if unknown := sorted(nested.keys() - {FULL, SLIDING}):
        raise ValueError(f"rope_parameters has {unknown}; this family has {FULL} and {SLIDING}")
    others = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_scaling")}
    full = dict(get_object(nested, FULL)) | dict(get_object(config, "rope_scaling"))
    return (
        rope_from_hf(others | {"rope_parameters": full}, head_dim, max_len, theta=theta),
        rope_from_hf(
            others | {"rope_parameters": get_object(nested, SLIDING), "rope_theta": None},
            head_dim,
            max_len,
            theta=local_theta,
        ),
    )


def _scaling_from_hf(given: Mapping[str, Any], max_len: int) -> Unscaled:
    kind = given.get("rope_type", given.get("type", "default"))
    original_len = _get(given, "original_max_position_embeddings", max_len)
    if wrong := whole_number_errors({"original_max_position_embeddings": original_len}):
        raise ValueError(wrong[0])

    def required(key: str) -> Any:
        if given.get(key) is None:
            raise ValueError(f"rope type {kind!r} needs {key!r}; config.json has {sorted(given)}")
        return given[key]

    match kind:
        case "default":
            return Unscaled()
        case "linear":
            return LinearScaling(required("factor"))
        case "dynamic":
            # transformers compares with max_position_embeddings, not with the original length.
            return DynamicNtk(required("factor"), max_len)
        case "llama3":
            return Llama3(
                required("factor"),
                required("low_freq_factor"),
                required("high_freq_factor"),
                original_len,
            )
        case "yarn":
            factor = _get(given, "factor", max_len / original_len)
            return Yarn(
                factor,
                original_len,
                beta_fast=_get(given, "beta_fast", 32.0),
                beta_slow=_get(given, "beta_slow", 1.0),
                truncate=given.get("truncate", True),
                attention_factor=_yarn_attention_factor(given, factor),
            )
        case "longrope":
            attention_factor = given.get("attention_factor")
            if attention_factor is None:
                factor = _get(given, "factor", max_len / original_len)
                attention_factor = _longrope_attention_factor(factor, original_len)
            return LongRope(
                _divisors(required("short_factor"), "short_factor"),
                _divisors(required("long_factor"), "long_factor"),
                original_len,
                attention_factor=attention_factor,
            )
    raise ValueError(
        f"rope type {kind!r} is unknown; the supported ones are {', '.join(ROPE_TYPES)}"
    )


def _divisors(values: Any, name: str) -> tuple[float, ...]:
    if not isinstance(values, tuple):
        raise ValueError(f"{name} is {values!r}; it must be a list of numbers")
    return values


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's temperature as a factor of cosine and sine (arXiv:2309.00071, section 3.4)."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return given["attention_factor"]
    if wrong := positive_errors({"factor": factor}):
        raise ValueError(f"YaRN's {wrong[0]}")
    if given.get("mscale") and given.get("mscale_all_dim"):
        mscale, mscale_all_dim = get_float(given, "mscale"), get_float(given, "mscale_all_dim")
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def _longrope_attention_factor(factor: float, original_len: int) -> float:
    if wrong := positive_errors({"factor": factor}):
        raise ValueError(f"LongRoPE's {wrong[0]}")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_len))


def rope_from_gguf(
    metadata: Mapping[str, Any], architecture: str, head_dim: int, tensors: Mapping[str, Any]
) -> Rope:
    """Read `<architecture>.rope.*`.

    A tensor `rope_freqs.weight` stores Llama 3's scaling; `rope_factors_long.weight` and
    `rope_factors_short.weight` store LongRoPE's.
    """
    keys = GgufKeys(metadata, architecture)
    theta = keys.get_float("rope.freq_base", 10_000.0)
    dim = keys.get_int("rope.dimension_count", head_dim)
    return Rope(theta, dim, _scaling_from_gguf(keys, dim, tensors))


def _scaling_from_gguf(keys: GgufKeys, dim: int, tensors: Mapping[str, Any]) -> Unscaled:
    def factors(name: str) -> tuple[float, ...]:
        values = tuple(tensors[name].read().tolist())
        if len(values) != dim // 2:
            raise ValueError(f"{name} has {len(values)} factors; RoPE needs {dim // 2}")
        return values

    max_len = keys.get_int("context_length")
    original_len = keys.get_int("rope.scaling.original_context_length", max_len)
    attention_factor = keys.get("rope.scaling.attn_factor")
    if "rope_factors_long.weight" in tensors:
        if attention_factor is None:
            attention_factor = _longrope_attention_factor(max_len / original_len, original_len)
        return LongRope(
            factors("rope_factors_short.weight"),
            factors("rope_factors_long.weight"),
            original_len,
            attention_factor=attention_factor,
        )
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get_scale("rope.scaling.factor")
    if kind == "yarn" and "rope_freqs.weight" not in tensors and factor != 1:
        return _yarn_from_gguf(keys, factor, original_len)
    if (surplus := keys.get("rope.scaling.yarn_attn_factor")) is not None:
        raise ValueError(
            f"{keys.architecture}.rope.scaling.yarn_attn_factor is {surplus!r}, but RoPE is not "
            f"scaled by YaRN (type {kind!r}, factor {factor})"
        )
    attention_factor = 1.0 if attention_factor is None else attention_factor
    if "rope_freqs.weight" in tensors:
        return Divided(factors("rope_freqs.weight"), attention_factor=attention_factor)
    if kind in ("none", "") or factor == 1:
        return Unscaled(attention_factor=attention_factor)
    if kind == "linear":
        return LinearScaling(factor, attention_factor=attention_factor)
    raise ValueError(
        f"rope.scaling.type is {kind!r}; the supported types are none, linear and yarn"
    )


def _yarn_from_gguf(keys: GgufKeys, factor: float, original_len: int) -> Yarn:
    """Read YaRN's parameters.

    The attention_factor of a config.json is the whole temperature. Converters write it as
    `yarn_attn_factor`, and for OLMo 3 as `attn_factor` (1.2079, which is 0.1 ln 8 + 1). For other
    architectures `attn_factor` multiplies the usual temperature.
    """
    if (extrapolated := keys.get("rope.scaling.yarn_ext_factor", 1.0)) != 1:
        raise ValueError(
            f"{keys.architecture}.rope.scaling.yarn_ext_factor is {extrapolated!r}; only 1 is "
            "supported"
        )
    temperature = keys.get("rope.scaling.yarn_attn_factor")
    multiplier = keys.get_float("rope.scaling.attn_factor", 1.0)
    if temperature is None and keys.architecture == "olmo2":
        temperature, multiplier = keys.get("rope.scaling.attn_factor"), 1.0
    if temperature is None:
        temperature = multiplier * _yarn_attention_factor({}, factor)
    return Yarn(
        factor,
        original_len,
        beta_fast=keys.get_float("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.get_float("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=temperature,
    )
