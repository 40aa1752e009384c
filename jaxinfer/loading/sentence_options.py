"""Read a checkpoint's embedding options: pooling, normalization, maximum length, prompts.

A sentence-transformers directory states them in these files:

    modules.json                        the steps: a transformer, pooling, perhaps normalization
    1_Pooling/config.json               the pooling modes (`jaxinfer.embedding.pooling`)
    sentence_bert_config.json           max_seq_length, do_lower_case
    config_sentence_transformers.json   prompts by name, such as "query: ", and the default prompt

Without `modules.json` the default applies: the mean of the tokens, not normalized. A GGUF file has
`bert.pooling_type`; llama.cpp returns normalized vectors, so those vectors are normalized here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from jaxinfer.loading.checkpoint import (
    MAX_JSON_BYTES,
    Checkpoint,
    CheckpointError,
    read_json_object,
)

# The order in which a checkpoint that names several modes has their vectors concatenated.
POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

_STEPS = ("Transformer", "Pooling", "Normalize")
_MODE_BY_KEY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# llama.cpp's enum: 0 none (one vector per token), 1 mean, 2 cls, 3 last, 4 rank (a reranker).
_GGUF_MODES = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken"}


@dataclass(frozen=True)
class SentenceOptions:
    """A checkpoint's embedding options; a default applies where the checkpoint states nothing."""

    pooling: tuple[str, ...] = ("mean",)  # a subset of `POOLING_MODES`, in that order
    normalize: bool = False  # scale vectors to length 1
    max_len: int | None = None  # tokens in a text; None is the model's limit
    lower_case: bool = False  # lower-case texts before tokenization
    prompts: Mapping[str, str] = field(default_factory=dict)  # prefixes of a text, by name
    default_prompt_name: str | None = None


def sentence_options(checkpoint: Checkpoint) -> SentenceOptions:
    """Read the embedding options of an opened checkpoint.

    Raises one `CheckpointError` that lists every option that cannot be honoured.
    """
    problems: list[str] = []
    if checkpoint.format == "gguf":
        options = _from_gguf(checkpoint.metadata, problems)
    else:
        options = _from_directory(checkpoint.path, problems)
    if problems:
        raise CheckpointError.listing(checkpoint.path, problems)
    return options


def _from_gguf(metadata: Mapping[str, Any], problems: list[str]) -> SentenceOptions:
    kind = metadata.get("bert.pooling_type", 0)
    if kind not in _GGUF_MODES:
        reason = "a reranker, whose output is a score" if kind == 4 else "not known"
        problems.append(f"bert.pooling_type is {kind!r}, {reason}; 0 to 3 are supported")
    return SentenceOptions((_GGUF_MODES.get(kind, "mean"),), normalize=True)


def _from_directory(folder: Path, problems: list[str]) -> SentenceOptions:
    modules = _read_modules(folder / "modules.json", problems)
    if not modules:
        return SentenceOptions()
    pooling, normalize = ("mean",), False
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    for name, module in zip(names, modules, strict=True):
        if name not in _STEPS:
            problems.append(
                f"modules.json: the step {name} ({module.get('path')!r}) is not supported; "
                f"{', '.join(_STEPS)} are"
            )
        elif name == "Pooling":
            path = _step_folder(module, problems)
            if path is not None:
                config = _read_object(folder / path / "config.json", problems)
                pooling = _read_pooling(path, config, problems)
        elif name == "Normalize":
            normalize = True
        elif module.get("path"):
            problems.append(
                f"modules.json: the transformer is in {module.get('path')!r}; move its files into "
                "this directory and set the path to an empty string"
            )
    known = [name for name in names if name in _STEPS]
    if known not in ([*_STEPS], [*_STEPS[:2]]) and not problems:
        problems.append(
            f"modules.json: the steps are {', '.join(names)}; Transformer, Pooling and perhaps "
            "Normalize, in this order, are supported"
        )
    return SentenceOptions(pooling, normalize, *_read_text_options(folder, problems))


def _step_folder(module: Mapping[str, Any], problems: list[str]) -> str | None:
    """Return the folder of a step's files; None, and a problem, if it is outside the checkpoint."""
    path = module.get("path")
    parts = PurePosixPath(path).parts if isinstance(path, str) else ("..",)
    if ".." in parts or any(part.startswith("/") or ":" in part or "\\" in part for part in parts):
        problems.append(f"modules.json: the path {path!r} is not a folder inside the checkpoint")
        return None
    return str(path)


def _read_modules(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        is_small = path.stat().st_size <= MAX_JSON_BYTES
        modules = json.loads(path.read_bytes()) if is_small else None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: cannot be read ({error})")
        return []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        problems.append(f"{path.name}: is not a list of steps")
        return []
    return modules


def _read_pooling(folder: str, config: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    """Read the modes from `pooling_mode`, or from the older switches (one for each mode)."""
    if config.get("include_prompt", True) is not True:
        problems.append(
            f"{folder}/config.json: include_prompt is {config['include_prompt']!r}; excluding a "
            "prompt's tokens from the pooling is not supported"
        )
    given = config.get("pooling_mode")
    if given is None:
        switches = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
        given = [_MODE_BY_KEY.get(key, key) for key, value in switches.items() if value]
    modes = [given] if isinstance(given, str) else given or ["mean"]
    unknown: Any = modes
    if isinstance(modes, list):
        unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown:
        problems.append(
            f"{folder}/config.json: the pooling {unknown!r} is not known; "
            f"{', '.join(POOLING_MODES)} are"
        )
        return ("mean",)
    return tuple(sorted(modes, key=POOLING_MODES.index))


def _read_text_options(
    folder: Path, problems: list[str]
) -> tuple[int | None, bool, Mapping[str, str], str | None]:
    """Read the maximum length, lower-casing, the prompts, and the default prompt's name."""
    # The older files are named after the model they were made for.
    paths = sorted(folder.glob("sentence_*_config.json"))
    config = _read_object(paths[0], problems) if paths else {}
    max_len = config.get("max_seq_length")
    if max_len is not None and (type(max_len) is not int or max_len < 1):
        problems.append(f"{paths[0].name}: max_seq_length is {max_len!r}, not a number of tokens")
    lower_case = config.get("do_lower_case", False)
    if not isinstance(lower_case, bool):
        problems.append(f"{paths[0].name}: do_lower_case is {lower_case!r}, not true or false")
    path = folder / "config_sentence_transformers.json"
    config = _read_object(path, problems) if path.is_file() else {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        problems.append(f"{path.name}: prompts is not an object of strings")
        prompts = {}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        problems.append(f"{path.name}: default_prompt_name {default!r} is not among its prompts")
    return max_len, lower_case is True, prompts, default


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a JSON object; an unreadable file adds a problem and gives an empty object."""
    try:
        return read_json_object(path)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
