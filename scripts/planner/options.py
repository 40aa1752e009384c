"""What the planner's flags mean; `ValueError` says what there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.config import EngineConfig, from_mapping, load_preset
from jaxinfer.loading.quantize import RECIPES
from jaxinfer.options import merge, parse_overrides
from jaxinfer.sharding.mesh import AXES
from planner.models import Named

MOST = 8192  # tokens of context where nothing says


def mesh_sizes(text: str) -> dict[str, int]:
    """From `pipe=2,tensor=8`."""
    sizes = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh has {part!r}; it is axis=size, the axes being {', '.join(AXES)}"
            )
        sizes[axis] = int(size)
    return sizes


def quantization(name: str) -> str | None:
    """As `EngineConfig.quantize`; "none" is none."""
    if name != "none" and name not in RECIPES:
        raise ValueError(f"no quantization {name!r}; there are none, {', '.join(RECIPES)}")
    return None if name == "none" else name


@dataclasses.dataclass(frozen=True)
class Asked:
    """The flags; None: not given."""

    preset: str | None = None
    mesh: str = ""
    quant: str | None = None
    context: int | None = None
    rows: int | None = None
    chunk: int | None = None
    overrides: Sequence[str] = ()


def engine_config(model: Named, asked: Asked) -> EngineConfig:
    """The preset, if one was given, then the flags that were; `ConfigError` too."""
    keys = load_preset(asked.preset) if asked.preset else {}
    keys.pop("serving", None)
    changes = {**_sizes(asked), **_length(model, asked, keys)}
    if asked.mesh:
        changes["mesh"] = dict.fromkeys(AXES, 1) | mesh_sizes(asked.mesh)
    if asked.quant is not None:
        changes["quantize"] = quantization(asked.quant)
    elif model.stored is not None and keys.get("weights") != "dequantized":
        changes["quantize"] = keys.get("quantize") or model.stored.recipe
    if keys.get("dtype", "auto") == "auto":
        changes["dtype"] = "bfloat16"
    return from_mapping(merge(merge(keys, changes), parse_overrides(asked.overrides)))


def _sizes(asked: Asked) -> dict[str, Any]:
    given = {"max_rows": asked.rows, "max_tokens": asked.chunk}
    default = {} if asked.preset else {"max_rows": 64, "max_tokens": 1024}
    return {"scheduler": default | {key: n for key, n in given.items() if n is not None}}


def _length(model: Named, asked: Asked, keys: Mapping[str, Any]) -> dict[str, Any]:
    most = model.config.max_len
    if asked.context is None:
        return {} if "max_len" in keys else {"max_len": min(MOST, most)}
    if not 2 <= asked.context <= most:
        raise ValueError(f"--context={asked.context}: {model.name} takes 2 to {most:,} tokens")
    return {"max_len": asked.context}


def context_of(model: Named, config: EngineConfig, asked: Asked) -> int:
    """Tokens of a request that a plan is for."""
    return asked.context or min(MOST, model.config.max_len, config.max_len or MOST)
