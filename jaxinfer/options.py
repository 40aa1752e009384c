"""Options: frozen dataclasses of plain fields, read from nested keys, checked all at once.

A field made by `at_least` states its range; `range_problems` checks types and ranges of a whole
tree; `from_nested` builds it from a TOML table; `parse_overrides` reads `key.path=value`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """Every problem of a configuration: key, value, limit."""


def at_least(minimum: float, default: Any, *, at_most: float = math.inf) -> Any:
    return dataclasses.field(default=default, metadata={"min": minimum, "max": at_most})


def range_problems(config: Any, prefix: str) -> Iterable[str]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        kind = typing.get_type_hints(type(config))[field.name]
        if not fits(value, kind):
            yield f"{name} is {value!r}; it must be {_describe(kind)}"
        elif dataclasses.is_dataclass(value):
            yield from range_problems(value, f"{name}.")
        elif "min" in field.metadata and value is not None:
            low, high = field.metadata["min"], field.metadata["max"]
            if not value >= low:  # NaN too
                yield f"{name} is {value!r}; it must be at least {low}"
            elif value > high:
                yield f"{name} is {value!r}; it must be at most {high}"


def fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, k) for k in typing.get_args(kind))
    if origin is tuple:  # of one type, any number
        is_list = isinstance(value, list | tuple)
        return is_list and all(fits(v, typing.get_args(kind)[0]) for v in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(
            "unset" if k is type(None) else _describe(k) for k in typing.get_args(kind)
        )
    if typing.get_origin(kind) is tuple:
        return "a list, each " + _describe(typing.get_args(kind)[0])
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(kind) or f"a {kind.__name__}"


def from_nested(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """A `cls` from nested keys, as a TOML file gives them; `ConfigError` names every problem.

    `prefix` goes before the keys in messages.
    """
    problems: list[str] = []
    config = _build(cls, values, prefix, problems)
    if problems:
        raise ConfigError("; ".join(problems))
    return config


def _build(cls: type, values: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    chosen = {}
    for key, value in values.items():
        name = prefix + key
        if key not in fields:
            problems.append(f"unknown key {name} (known: {', '.join(prefix + f for f in fields)})")
        elif dataclasses.is_dataclass(hints[key]):
            if isinstance(value, Mapping):
                chosen[key] = _build(hints[key], value, f"{name}.", problems)  # type: ignore
            else:
                problems.append(f"{name} is {value!r}; it is a table of keys")
        else:
            is_tuple = isinstance(value, list) and typing.get_origin(hints[key]) is tuple
            chosen[key] = tuple(value) if is_tuple else value
    try:
        return cls(**chosen)
    except ConfigError as error:
        problems.append(str(error))
        return cls()


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`["cache.page_size=16", "dtype=bfloat16"]` as nested keys. A value is TOML, or a bare text;
    `none` unsets. Raises `ConfigError` for one without `=`."""
    nested: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {override!r} is not of the form key.path=value")
        table = nested
        *parents, last = path.strip().split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {override!r}: {parent} is no table of keys")
        table[last] = _parse_value(text.strip())
    return nested


def _parse_value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys of all layers; later ones win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged
