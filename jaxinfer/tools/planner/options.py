"""Parsers of the planner's flags. Each raises `ValueError`, which names the accepted values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.config import EngineConfig, from_mapping, load_preset
from jaxinfer.engine.admission import resolve_max_model_len
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.loading.quantize import RECIPES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.options import merge, parse_overrides
from jaxinfer.sharding.mesh import AXES
from jaxinfer.tools.compile_gate.matrix import ChipTarget, load_target
from jaxinfer.tools.planner.models import NamedModel

DEFAULT_CONTEXT = 8192  # tokens of context where no option sets it
SEARCHED = (None, "int8", "int4", "float8")  # w8a8 takes the bytes of int8

# Larger sizes are typing errors, which a compiler would report after minutes, if at all.
MAX_TOKENS = 2**20  # in a step
MAX_ROWS = 2**16
MAX_CPU_DEVICES = 64
MAX_DEVICES = 2**14  # the largest slice, a v5p's, has 8,960 chips
MAX_DIGITS = 5  # in the size of an axis
MAX_CHARACTERS = 40  # in a target, and in a wrong value that an error shows

# Flags that set an option which `--set` can set too.
ALSO_SET = {
    "context": "max_model_len",
    "quant": "quantize",
    "rows": "scheduler.max_num_seqs",
    "chunk": "scheduler.max_num_batched_tokens",
}


def parse_mesh(text: str) -> dict[str, int]:
    """Parse the sizes of axes, such as `pipe=2,tensor=8`."""
    sizes = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        is_size = size.isdecimal() and len(size) <= MAX_DIGITS and int(size) >= 1
        if axis not in AXES or not is_size:
            raise ValueError(
                f"--mesh has {_short(part)}; it is axis=size, the axes being {', '.join(AXES)}, a "
                f"size 1 to {10**MAX_DIGITS - 1:,}"
            )
        if axis in sizes:
            raise ValueError(
                f"--mesh has {axis}={sizes[axis]} and {axis}={int(size)}; name an axis once"
            )
        sizes[axis] = int(size)
    return sizes


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Format sizes of axes as `--mesh` takes them."""
    return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"


def parse_target(text: str) -> ChipTarget:
    """Parse a chip and its topology, such as `v5e:4x4`."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"--target is {_short(text)}, {len(text):,} characters; it is a chip and its topology, "
            "as v5e:4x4"
        )
    target = load_target(text)
    limit = MAX_CPU_DEVICES if target.platform == "cpu" else MAX_DEVICES
    if target.num_devices > limit:
        raise ValueError(
            f"--target={text} has {target.num_devices:,} devices; plans for {target.chip} are of "
            f"at most {limit:,}"
        )
    return target


def parse_quantization(name: str) -> str | None:
    """Parse a value of `EngineConfig.quantize`; "none" becomes None."""
    if name != "none" and name not in RECIPES:
        raise ValueError(f"no quantization {_short(name)}; there are none, {', '.join(RECIPES)}")
    return None if name == "none" else name


def _short(text: str) -> str:
    cut = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "..."
    return repr(cut)


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The planner's flags; None where a flag was not given."""

    preset: str | None = None
    mesh: str = ""
    quant: str | None = None
    context: int | None = None
    rows: int | None = None
    chunk: int | None = None
    overrides: Sequence[str] = ()
    is_search: bool = False


def engine_config(model: NamedModel, asked: PlanRequest, platform: str = "tpu") -> EngineConfig:
    """Build the config of a plan: the preset, if any, changed by the flags.

    `dtype` auto becomes the platform's type, and `max_model_len` None the model's limit. Raises
    `ConfigError` as the engine does, and `ValueError` for flags that contradict each other.
    """
    overrides = parse_overrides(asked.overrides)
    _check(asked, overrides)
    keys = load_preset(asked.preset) if asked.preset else {}
    keys.pop("serving", None)
    changes = {**_sizes(asked), **_length(model, asked, keys)}
    if asked.mesh:
        changes["mesh"] = dict.fromkeys(AXES, 1) | parse_mesh(asked.mesh)
    if asked.quant is not None:
        changes["quantize"] = parse_quantization(asked.quant)
    if model.stored is not None and asked.quant != "none":
        chosen = asked.quant or overrides.get("quantize") or keys.get("quantize")
        weights = (keys | overrides).get("weights", "auto")
        stored = _stored(model, weights, platform, chosen)
        changes["quantize"] = stored or chosen
    config = from_mapping(merge(merge(keys, changes), overrides))
    if config.dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
        config = dataclasses.replace(config, dtype=dtype)
    for flag, n, most in (
        ("chunk", config.scheduler.max_num_batched_tokens, MAX_TOKENS),
        ("rows", config.scheduler.max_num_seqs, MAX_ROWS),
    ):
        if n > most:
            raise ValueError(f"--{flag} ({ALSO_SET[flag]}) is {n:,}; plans take at most {most:,}")
    part = model.with_layers(1)  # its lengths are those of the whole model
    one_layer = FunctionalModel(part.family, part.config, numerics_for(config))
    return dataclasses.replace(
        config, max_model_len=resolve_max_model_len(config.max_model_len, one_layer)
    )


def _stored(model: NamedModel, weights: str, platform: str, chosen: str | None) -> str | None:
    """The recipe of a quantized checkpoint's weights, or None where the engine dequantizes them.

    Raises `ValueError` for weights that the engine does not read, unless a recipe is `chosen`, and
    for a chosen recipe that differs from the stored one.
    """
    stored = model.stored
    assert stored is not None
    if stored.refusal and chosen is None:
        raise ValueError(f"{model.name}: {stored.refusal}. Here --quant=none plans it dequantized")
    if stored.refusal or weights == "dequantized" or (weights == "auto" and platform == "cpu"):
        return None
    if chosen not in (None, stored.recipe):
        raise ValueError(
            f"quantize is {chosen!r}, and {model.name} has {stored.method} weights, which stay as "
            f"they are (planned as {stored.recipe}): leave it out, or add --set weights=dequantized"
        )
    return stored.recipe


def searched_quantizations(asked: PlanRequest, config: EngineConfig) -> Sequence[str | None]:
    """The quantizations that a search tries: the one that a flag, the preset or the checkpoint
    sets, or else all that differ in bytes."""
    is_one = config.quantize is not None or asked.quant is not None
    is_one |= "quantize" in parse_overrides(asked.overrides)
    return (config.quantize,) if is_one else SEARCHED


def _check(asked: PlanRequest, overrides: Mapping[str, Any]) -> None:
    """Raise `ValueError` for flags without effect: set twice, or ignored by a search."""
    for flag, path in ALSO_SET.items():
        value, (is_set, set_to) = getattr(asked, flag), _lookup(overrides, path)
        if value is not None and is_set:
            raise ValueError(f"--{flag}={value} and --set {path}={set_to} are one option: give one")
    table = overrides.get("mesh")
    sizes = [axis for axis in AXES if isinstance(table, Mapping) and axis in table]
    if asked.mesh and sizes:
        raise ValueError(f"--mesh={_short(asked.mesh)} and --set mesh.{sizes[0]}: use one of them")
    if asked.is_search and (asked.mesh or sizes):
        flag = "--mesh" if asked.mesh else f"--set mesh.{sizes[0]}"
        raise ValueError(f"--search tries every mesh: leave out {flag}, or --search")


def _lookup(keys: Any, path: str) -> tuple[bool, Any]:
    """Return whether the dotted key exists, and its value."""
    for key in path.split("."):
        if not isinstance(keys, Mapping) or key not in keys:
            return False, None
        keys = keys[key]
    return True, keys


def _sizes(asked: PlanRequest) -> dict[str, Any]:
    given = {"max_num_seqs": asked.rows, "max_num_batched_tokens": asked.chunk}
    default = {} if asked.preset else {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
    return {"scheduler": default | {key: n for key, n in given.items() if n is not None}}


def _length(model: NamedModel, asked: PlanRequest, keys: Mapping[str, Any]) -> dict[str, Any]:
    limit = model.config.max_len
    if asked.context is None:
        return {} if "max_model_len" in keys else {"max_model_len": min(DEFAULT_CONTEXT, limit)}
    if not 2 <= asked.context <= limit:
        raise ValueError(f"--context={asked.context}: {model.name} takes 2 to {limit:,} tokens")
    return {"max_model_len": asked.context}


def plan_context(model: NamedModel, config: EngineConfig, asked: PlanRequest) -> int:
    """The tokens of each request in a plan."""
    length = config.max_model_len or model.config.max_len
    if parse_overrides(asked.overrides).get("max_model_len") is not None:
        return length
    return asked.context or min(DEFAULT_CONTEXT, model.config.max_len, length)
