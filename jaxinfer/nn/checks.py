"""Checks of the numbers in a configuration.

Each check returns one sentence for each number that is wrong, so that an error names all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer.kernels.gated_mlp.activations import ACTIVATIONS


def whole_number_errors(
    numbers: Mapping[str, Any], least: Mapping[str, int] | None = None
) -> list[str]:
    """Describe numbers that are not integers of at least 1, or of at least `least[name]`."""
    least = least or {}
    return [
        f"{name} is {value!r}; it must be a whole number of at least {least.get(name, 1)}"
        for name, value in numbers.items()
        if type(value) is not int or value < least.get(name, 1)
    ]


def positive_errors(numbers: Mapping[str, Any]) -> list[str]:
    """Describe numbers that are not finite and above 0."""
    return [
        f"{name} is {value!r}; it must be a number above 0, and finite"
        for name, value in numbers.items()
        if not _is_real(value) or not 0 < value < math.inf
    ]


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def epsilon_errors(name: str, value: Any) -> list[str]:
    """Describe an epsilon of a norm that is not between 0 and 1."""
    if _is_real(value) and 0 < value < 1:
        return []
    return [f"{name} is {value!r}; it must be a number between 0 and 1"]


def rope_dim_errors(dims: Iterable[int], head_dim: int) -> list[str]:
    """Describe RoPE dimensions that cannot be rotated in pairs."""
    return [
        f"rope.dim is {dim}; it must be even, from 2 to head_dim {head_dim}"
        for dim in dims
        if dim % 2 or not 2 <= dim <= head_dim
    ]


def transformer_errors(config: Any, least: Mapping[str, int]) -> list[str]:
    """Describe what is wrong with the fields that a `GptConfig` and an `EncoderConfig` share:
    integers of at least 1 (or `least[name]`), heads, epsilon and activation."""
    errors = whole_number_errors(int_fields(config), least)
    if not errors and config.model_dim % config.num_heads:
        errors.append(f"model_dim {config.model_dim} is not a multiple of {config.num_heads} heads")
    errors += epsilon_errors("norm_eps", config.norm_eps)
    if config.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        errors.append(f"activation is {config.activation!r}; the supported ones are {known}")
    return errors


def int_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are annotated as `int`, by name."""
    fields = dataclasses.fields(config)
    return {field.name: getattr(config, field.name) for field in fields if field.type == "int"}


def raise_errors(what: str, errors: Iterable[str]) -> None:
    """Raise `ValueError` with all sentences, if there are any."""
    if sentences := "; ".join(errors):
        raise ValueError(f"{what} is invalid: {sentences}")
