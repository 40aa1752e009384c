"""Checks of the numbers in a configuration: a sentence on each that is wrong, all told at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any


def not_whole(numbers: Mapping[str, Any], least: Mapping[str, int] | None = None) -> list[str]:
    """On those that are no whole number of at least 1, or of what `least` says."""
    least = least or {}
    return [
        f"{name} is {value!r}; it must be a whole number of at least {least.get(name, 1)}"
        for name, value in numbers.items()
        if type(value) is not int or value < least.get(name, 1)
    ]


def not_positive(numbers: Mapping[str, Any]) -> list[str]:
    """On those that are no finite number above 0."""
    return [
        f"{name} is {value!r}; it must be a number above 0, and finite"
        for name, value in numbers.items()
        if not _is_real(value) or not 0 < value < math.inf
    ]


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong_epsilon(name: str, value: Any) -> list[str]:
    """On a norm's epsilon."""
    if _is_real(value) and 0 < value < 1:
        return []
    return [f"{name} is {value!r}; it must be a number between 0 and 1"]


def wrong_rope_dims(dims: Iterable[int], head_dim: int) -> list[str]:
    """On numbers of dimensions that cannot be turned in pairs."""
    return [
        f"rope.dim is {dim}; it must be even, from 2 to head_dim {head_dim}"
        for dim in dims
        if dim % 2 or not 2 <= dim <= head_dim
    ]


def whole_fields(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that are annotated as `int`, by name."""
    fields = dataclasses.fields(config)
    return {field.name: getattr(config, field.name) for field in fields if field.type == "int"}


def refuse_wrong(what: str, wrong: Iterable[str]) -> None:
    """`ValueError` of all sentences, where there are any."""
    if sentences := "; ".join(wrong):
        raise ValueError(f"{what} does not hold together: {sentences}")
