"""What the planner's flags mean; `ValueError` says what there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.config import EngineConfig, from_mapping, load_preset
from jaxinfer.engine.admission import context_len
from jaxinfer.execution.numerics import numerics_for
from jaxinfer.loading.quantize import RECIPES
from jaxinfer.models.functional import FunctionalModel
from jaxinfer.options import merge, parse_overrides
from jaxinfer.sharding.mesh import AXES
from jaxinfer.tools.compile_gate.matrix import ChipTarget, load_target
from jaxinfer.tools.planner.models import NamedModel

MOST = 8192  # tokens of context where nothing says
SEARCHED = (None, "int8", "int4", "float8")  # w8a8 holds what int8 does

# Sizes beyond these are typing errors, of which a compiler would say so after minutes, if ever.
MOST_TOKENS = 2**20  # of a step
MOST_ROWS = 2**16
MOST_CPU_DEVICES = 64
MOST_DEVICES = 2**14  # the largest slice, of v5p, has 8,960 chips
MOST_DIGITS = 5  # of an axis
MOST_CHARACTERS = 40  # of a target, or of a wrong value as it is shown

# Flags of which `--set` has the same by another name.
ALSO_SET = {
    "context": "max_model_len",
    "quant": "quantize",
    "rows": "scheduler.max_num_seqs",
    "chunk": "scheduler.max_num_batched_tokens",
}


def parse_mesh(text: str) -> dict[str, int]:
    """From `pipe=2,tensor=8`."""
    sizes = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        is_size = size.isdecimal() and len(size) <= MOST_DIGITS and int(size) >= 1
        if axis not in AXES or not is_size:
            raise ValueError(
                f"--mesh has {_short(part)}; it is axis=size, the axes being {', '.join(AXES)}, a "
                f"size 1 to {10**MOST_DIGITS - 1:,}"
            )
        if axis in sizes:
            raise ValueError(
                f"--mesh has {axis}={sizes[axis]} and {axis}={int(size)}; name an axis once"
            )
        sizes[axis] = int(size)
    return sizes


def format_mesh(sizes: Mapping[str, int]) -> str:
    """As `--mesh` takes it."""
    return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"


def parse_target(text: str) -> ChipTarget:
    """A chip and its topology."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"--target is {_short(text)}, {len(text):,} characters; it is a chip and its topology, "
            "as v5e:4x4"
        )
    target = load_target(text)
    most = MOST_CPU_DEVICES if target.platform == "cpu" else MOST_DEVICES
    if target.num_devices > most:
        raise ValueError(
            f"--target={text} has {target.num_devices:,} devices; plans for {target.chip} are of "
            f"at most {most:,}"
        )
    return target


def parse_quantization(name: str) -> str | None:
    """As `EngineConfig.quantize`; "none" is none."""
    if name != "none" and name not in RECIPES:
        raise ValueError(f"no quantization {_short(name)}; there are none, {', '.join(RECIPES)}")
    return None if name == "none" else name


def _short(text: str) -> str:
    cut = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "..."
    return repr(cut)


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The flags; None: not given."""

    preset: str | None = None
    mesh: str = ""
    quant: str | None = None
    context: int | None = None
    rows: int | None = None
    chunk: int | None = None
    overrides: Sequence[str] = ()
    is_search: bool = False


def engine_config(model: NamedModel, asked: PlanRequest, platform: str = "tpu") -> EngineConfig:
    """The preset, if one was given, then the flags that were; `ConfigError` too, as of the engine.
    `dtype` auto is what it takes on that platform, and `max_model_len` None the model's."""
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
        ("chunk", config.scheduler.max_num_batched_tokens, MOST_TOKENS),
        ("rows", config.scheduler.max_num_seqs, MOST_ROWS),
    ):
        if n > most:
            raise ValueError(f"--{flag} ({ALSO_SET[flag]}) is {n:,}; plans take at most {most:,}")
    part = model.with_layers(1)  # lengths are those of the whole
    of_part = FunctionalModel(part.family, part.config, numerics_for(config))
    return dataclasses.replace(config, max_model_len=context_len(config.max_model_len, of_part))


def _stored(model: NamedModel, weights: str, platform: str, chosen: str | None) -> str | None:
    """The recipe of a quantized checkpoint's weights, where the engine keeps them. `ValueError` for
    those that it does not read, unless one is `chosen`, and for one that they would not become."""
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
    """The quantizations that a search tries: the one asked for (with a flag or by the preset), the
    one that the checkpoint has, or all that differ in bytes."""
    is_one = config.quantize is not None or asked.quant is not None
    is_one |= "quantize" in parse_overrides(asked.overrides)
    return (config.quantize,) if is_one else SEARCHED


def _check(asked: PlanRequest, overrides: Mapping[str, Any]) -> None:
    """`ValueError` for what would have no effect: what is asked for twice, or beside a search."""
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
    """Whether the key is there, and its value."""
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
    most = model.config.max_len
    if asked.context is None:
        return {} if "max_model_len" in keys else {"max_model_len": min(MOST, most)}
    if not 2 <= asked.context <= most:
        raise ValueError(f"--context={asked.context}: {model.name} takes 2 to {most:,} tokens")
    return {"max_model_len": asked.context}


def plan_context(model: NamedModel, config: EngineConfig, asked: PlanRequest) -> int:
    """Tokens of a request that a plan is for."""
    length = config.max_model_len or model.config.max_len
    if parse_overrides(asked.overrides).get("max_model_len") is not None:
        return length
    return asked.context or min(MOST, model.config.max_len, length)
