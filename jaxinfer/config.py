"""The engine's configuration: frozen dataclasses, TOML presets, `key.path=value` overrides.

Every field is honoured or refused; an unknown key, a wrong type or a value out of range is an error
that lists all of them at once. A change is `dataclasses.replace`: a new object.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

INVARIANT_BUCKET = 16  # whole tiles of the batch-invariant mode (kernels/paged_attention/api.py)


class ConfigError(ValueError):
    """Every problem of a configuration: key, value, limit."""


def _at_least(minimum: float, default: Any, *, at_most: float = math.inf) -> Any:
    return dataclasses.field(default=default, metadata={"min": minimum, "max": at_most})


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. Its number of pages is `num_pages` or fits `memory_bytes`; with neither,
    what the device has left, or on a CPU `memory_fraction` of the host's free memory."""

    page_size: int = _at_least(1, 64)  # tokens a page
    num_pages: int | None = _at_least(1, None)
    memory_bytes: int | None = _at_least(1, None)
    memory_fraction: float = _at_least(0, 0.2, at_most=1)
    prefix_cache: bool = True
    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Who runs when. `max_tokens` is a step's budget over all rows: prompts are cut to it."""

    policy: Literal["first_come", "priority", "static"] = "first_come"
    max_tokens: int = _at_least(1, 512)
    max_rows: int = _at_least(1, 64)  # requests that run at once


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model."""

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # weights and activations
    max_len: int | None = _at_least(2, None)  # prompt + output; None: the model's
    seed: int = _at_least(0, 0)  # requests without a seed of their own get one drawn from this
    overlap: bool = True  # plan and dispatch step N+1 before reading step N
    batch_invariant: bool = False  # bit-equal results whatever shares the batch; slower
    min_bucket: int = _at_least(1, 1)  # smallest number of tokens a step is compiled for
    bucket_growth: int = _at_least(2, 2)  # ratio of one bucket to the next
    warm_up: bool = True  # compile every bucket before the first request
    check_every_step: bool = False  # assert the page and slot laws after each step
    attention_backend: str | None = None  # force a kernel backend by name; None: the best that fits

    def __post_init__(self):
        problems = list(_range_problems(self, ""))
        sizes = (getattr(self.cache, name, None) for name in ("num_pages", "memory_bytes"))
        if None not in sizes:
            problems.append("cache.num_pages and cache.memory_bytes are both set; set one")
        budget: Any = getattr(self.scheduler, "max_tokens", None)
        if _fits(self.min_bucket, int) and _fits(budget, int) and self.min_bucket > budget:
            problems.append(
                f"min_bucket is {self.min_bucket}; it must be at most scheduler.max_tokens "
                f"({budget})"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of tokens a step is compiled for: powers up to the budget, and the budget."""
        # Batch invariance needs whole tiles: fewer tokens would take another path through XLA.
        unit = INVARIANT_BUCKET if self.batch_invariant else 1
        largest = -(-self.scheduler.max_tokens // unit) * unit
        sizes, size = [], -(-self.min_bucket // unit) * unit
        while size < largest:
            sizes.append(size)
            size *= self.bucket_growth
        return (*sizes, largest)


def _range_problems(config: Any, prefix: str) -> Iterable[str]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        kind = typing.get_type_hints(type(config))[field.name]
        if not _fits(value, kind):
            yield f"{name} is {value!r}; it must be {_describe(kind)}"
        elif dataclasses.is_dataclass(value):
            yield from _range_problems(value, f"{name}.")
        elif "min" in field.metadata and value is not None:
            low, high = field.metadata["min"], field.metadata["max"]
            if not value >= low:  # NaN too
                yield f"{name} is {value!r}; it must be at least {low}"
            elif value > high:
                yield f"{name} is {value!r}; it must be at most {high}"


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, k) for k in typing.get_args(kind))
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
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(kind) or f"a {kind.__name__}"


def from_mapping(values: Mapping[str, Any]) -> EngineConfig:
    """A config from nested keys, as a TOML file gives them; `ConfigError` names every problem."""
    problems: list[str] = []
    config = _build(EngineConfig, values, "", problems)
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
            chosen[key] = value
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


def preset_names() -> list[str]:
    """The presets that ship with the package."""
    files = resources.files("jaxinfer.configs").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load_preset(name_or_path: str) -> dict[str, Any]:
    """The keys of a preset (`configs/<name>.toml`) or of a TOML file given by its path."""
    if name_or_path.endswith(".toml"):
        path: Any = Path(name_or_path)
    else:
        path = resources.files("jaxinfer.configs") / f"{name_or_path}.toml"
    if not path.is_file():
        raise ConfigError(
            f"no preset or file {name_or_path!r}; presets: {', '.join(preset_names()) or 'none'}, "
            "or give the path of a .toml file"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name_or_path}: not valid TOML: {error}") from error


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested keys of all layers; later ones win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def load_config(preset: str | None = None, overrides: Iterable[str] = ()) -> EngineConfig:
    """Preset (or the defaults), then the overrides. Every problem at once, as `ConfigError`."""
    layers = [load_preset(preset)] if preset else []
    return from_mapping(merge(*layers, parse_overrides(overrides)))
