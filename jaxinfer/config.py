"""The engine's configuration: frozen dataclasses, TOML presets, `key.path=value` overrides.

Every field is honoured or refused. Unknown keys, wrong types and values out of range are listed in
one error. Change a config with `dataclasses.replace`, which makes a new object.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from jaxinfer.kernels.batch_invariance import INVARIANT_TILE
from jaxinfer.options import (
    ConfigError,
    at_least,
    fits,
    from_nested,
    merge,
    parse_overrides,
    range_problems,
)
from jaxinfer.sharding import zigzag
from jaxinfer.sharding.mesh import AXES


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache. It has `num_pages` pages, or as many as fit `memory_bytes`.

    With neither, pages take `memory_fraction` of the free memory: of what weights and a step's
    temporaries leave on an accelerator (0.9 unless set), of the host's on a CPU (0.2 unless set).
    """

    page_size: int = at_least(1, 64)  # tokens a page
    num_pages: int | None = at_least(1, None)
    memory_bytes: int | None = at_least(1, None)
    memory_fraction: float | None = at_least(0, None, at_most=1)
    prefix_cache: bool = True
    dtype: Literal["model", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"] = "model"


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Which requests a step runs. `max_num_batched_tokens` is a step's budget over all rows; longer
    prompts are computed in chunks."""

    policy: Literal["first_come", "priority", "static"] = "first_come"
    max_num_batched_tokens: int = at_least(1, 512)
    max_num_seqs: int = at_least(1, 64)  # requests that run at once


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices share the work (`sharding/mesh.py`). Their number is the product of the five
    sizes. `whole` names logical axes that are not split (`sharding/rules.py`)."""

    data: int = at_least(1, 1)  # replicas of the engine
    pipe: int = at_least(1, 1)  # stages of the layers
    seq: int = at_least(1, 1)  # parts of every sequence
    expert: int = at_least(1, 1)
    tensor: int = at_least(1, 1)
    whole: tuple[str, ...] = ()
    all_reduce: Literal["exact", "int8"] = "exact"  # of a layer's products; int8: rounded, faster
    overlap: bool = False  # make a layer's products in parts, and sum one while making the next

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model."""

    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    mesh: MeshConfig = MeshConfig()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # weights and activations
    load_format: Literal["auto", "random"] = "auto"  # random: any weights, drawn from the seed
    # A quantized checkpoint's weights stay packed, as stored, or become numbers of `dtype`. auto:
    # dequantized on a CPU, where a token of the demo model takes 20 ms so and 141 ms packed.
    weights: Literal["auto", "packed", "dequantized"] = "auto"
    # Quantize the products' weights that the checkpoint has not quantized. w8a8: activations too,
    # except those of experts.
    quantize: Literal["int8", "int4", "float8", "int8_w8a8", "float8_w8a8"] | None = None
    max_model_len: int | None = at_least(2, None)  # prompt + output; None: the model's
    seed: int = at_least(0, 0)  # the seeds of requests that bring none are drawn from it
    overlap: bool = True  # plan and dispatch step N+1 before reading step N
    batch_invariant: bool = False  # results are bit-equal whatever shares the batch; slower
    min_bucket: int = at_least(1, 1)  # smallest number of tokens a step is compiled for
    bucket_growth: int = at_least(2, 2)  # the next bucket is so many times larger
    warm_up: bool = True  # compile every bucket before the first request
    check_every_step: bool = False  # assert the page and slot invariants after each step
    attention_backend: str | None = None  # force a kernel backend by name; None: the best that fits

    def __post_init__(self):
        problems = list(range_problems(self, ""))
        sizes = (getattr(self.cache, name, None) for name in ("num_pages", "memory_bytes"))
        if None not in sizes:
            problems.append("cache.num_pages and cache.memory_bytes are both set; set one")
        budget: Any = getattr(self.scheduler, "max_num_batched_tokens", None)
        if fits(self.min_bucket, int) and fits(budget, int) and self.min_bucket > budget:
            problems.append(
                f"min_bucket is {self.min_bucket}; it must be at most "
                f"scheduler.max_num_batched_tokens ({budget})"
            )
        if self.batch_invariant and getattr(self.mesh, "seq", 1) != 1:
            problems.append(
                f"batch_invariant is true and mesh.seq {self.mesh.seq}: sums over the parts of a "
                "sequence are made in an order that depends on the step; set one of them alone"
            )
        if getattr(self.mesh, "overlap", False) and str(self.quantize).endswith("w8a8"):
            problems.append(
                f"mesh.overlap is true and quantize {self.quantize!r}: products that quantize "
                "their activations are made at once, not in parts; set one of them alone"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def max_running(self) -> int:
        """Requests that run at once, over all replicas."""
        return self.mesh.data * self.scheduler.max_num_seqs

    @property
    def buckets(self) -> tuple[int, ...]:
        """The numbers of tokens that steps are compiled for: powers up to the budget, and it."""
        # Batch invariance needs whole tiles: fewer tokens would take another path through XLA.
        unit = INVARIANT_TILE if self.batch_invariant else 1
        largest = -(-self.scheduler.max_num_batched_tokens // unit) * unit
        if self.mesh.pipe > 1 and self.mesh.seq > 1 and largest > zigzag.MAX_UNSPLIT_TOKENS:
            return (largest,)  # a stage must split tokens as the one before it did
        sizes, size = [], -(-self.min_bucket // unit) * unit
        while size < largest:
            sizes.append(size)
            size *= self.bucket_growth
        return (*sizes, largest)

    def bucket_for(self, num_tokens: int) -> int:
        """The smallest bucket that holds `num_tokens`."""
        return next(bucket for bucket in self.buckets if bucket >= num_tokens)


def from_mapping(values: Mapping[str, Any]) -> EngineConfig:
    """A config from nested keys, as a TOML file gives them; `ConfigError` names every problem."""
    return from_nested(EngineConfig, values)


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


def load_config(preset: str | None = None, overrides: Iterable[str] = ()) -> EngineConfig:
    """Preset (or the defaults), then the overrides. Every problem at once, as `ConfigError`.

    A preset's `[serving]` table is the server's own (`jaxinfer.serving.config`).
    """
    keys = load_preset(preset) if preset else {}
    keys.pop("serving", None)
    return from_mapping(merge(keys, parse_overrides(overrides)))
