"""How a checkpoint wants its texts embedded: pooling, normalization, length, prompts.

A directory of sentence-transformers says it in files of its own:

    modules.json                        the steps: a transformer, pooling, perhaps normalization
    1_Pooling/config.json               how hidden states become one vector (`pooling.py`)
    sentence_bert_config.json           max_seq_length, do_lower_case
    config_sentence_transformers.json   prompts by name, as "query: ", and the default one

Without `modules.json` nothing is known: the mean of the tokens, as it is. A GGUF file has
`bert.pooling_type`; the format's own runtime hands out normalized vectors, and so does this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from jaxinfer.embedding.pooling import MODES
from jaxinfer.loading.checkpoint import (
    MAX_JSON_BYTES,
    Checkpoint,
    CheckpointError,
    read_json_object,
)

_STEPS = ("Transformer", "Pooling", "Normalize")
_MODE_BY_KEY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# llama.cpp's numbers: none (a vector a token), mean, cls, last, rank (a reranker's score).
_GGUF_MODES = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken"}


@dataclass(frozen=True)
class SentenceOptions:
    """What a checkpoint says about embedding a text with it, or what holds where it is silent."""

    pooling: tuple[str, ...] = ("mean",)  # of `pooling.MODES`
    normalize: bool = False  # to length 1
    max_len: int | None = None  # tokens of a text; None: the model's
    lower_case: bool = False  # before tokenization
    prompts: Mapping[str, str] = field(default_factory=dict)  # what goes before a text, by name
    default_prompt_name: str | None = None


def sentence_options(checkpoint: Checkpoint) -> SentenceOptions:
    """The options of an opened checkpoint; `CheckpointError` lists all that cannot be honoured."""
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
        what = "a reranker, whose output is a score" if kind == 4 else "not known"
        problems.append(f"bert.pooling_type is {kind!r}, {what}; 0 to 3 are supported")
    return SentenceOptions((_GGUF_MODES.get(kind, "mean"),), normalize=True)


def _from_directory(folder: Path, problems: list[str]) -> SentenceOptions:
    modules = _modules(folder / "modules.json", problems)
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
            path = _path(module, problems)
            if path is not None:
                config = _object(folder / path / "config.json", problems)
                pooling = _pooling(path, config, problems)
        elif name == "Normalize":
            normalize = True
        elif module.get("path"):
            problems.append(
                f"modules.json: the transformer lies in {module.get('path')!r}; put its files into "
                "this directory and set the path to an empty text"
            )
    known = [name for name in names if name in _STEPS]
    if known not in ([*_STEPS], [*_STEPS[:2]]) and not problems:
        problems.append(
            f"modules.json: the steps are {', '.join(names)}; Transformer, Pooling and perhaps "
            "Normalize, in this order, are supported"
        )
    return SentenceOptions(pooling, normalize, *_of_texts(folder, problems))


def _path(module: Mapping[str, Any], problems: list[str]) -> str | None:
    """Where a step's files lie; None, and a problem, for what leaves the checkpoint's folder."""
    path = module.get("path")
    parts = PurePosixPath(path).parts if isinstance(path, str) else ("..",)
    if ".." in parts or any(part.startswith("/") or ":" in part or "\\" in part for part in parts):
        problems.append(f"modules.json: the path {path!r} is no folder inside the checkpoint's")
        return None
    return str(path)


def _modules(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        is_small = path.stat().st_size <= MAX_JSON_BYTES
        modules = json.loads(path.read_bytes()) if is_small else None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: cannot be read ({error})")
        return []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        problems.append(f"{path.name}: holds no list of steps")
        return []
    return modules


def _pooling(folder: str, config: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    """The modes, from `pooling_mode` or the older switches, one a mode."""
    if config.get("include_prompt", True) is not True:
        problems.append(
            f"{folder}/config.json: include_prompt is {config['include_prompt']!r}; leaving a "
            "prompt's tokens out of the pooling is not supported"
        )
    given = config.get("pooling_mode")
    if given is None:
        switches = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
        given = [_MODE_BY_KEY.get(key, key) for key, value in switches.items() if value]
    modes = [given] if isinstance(given, str) else given or ["mean"]
    unknown = [mode for mode in modes if mode not in MODES] if isinstance(modes, list) else modes
    if unknown:
        problems.append(
            f"{folder}/config.json: the pooling {unknown!r} is not known; {', '.join(MODES)} are"
        )
        return ("mean",)
    return tuple(sorted(modes, key=MODES.index))


def _of_texts(
    folder: Path, problems: list[str]
) -> tuple[int | None, bool, Mapping[str, str], str | None]:
    """Length, lower case, prompts and the default one's name."""
    # The older files are named after the model they were made for.
    paths = sorted(folder.glob("sentence_*_config.json"))
    config = _object(paths[0], problems) if paths else {}
    max_len = config.get("max_seq_length")
    if max_len is not None and (type(max_len) is not int or max_len < 1):
        problems.append(f"{paths[0].name}: max_seq_length is {max_len!r}, no number of tokens")
    lower_case = config.get("do_lower_case", False)
    if not isinstance(lower_case, bool):
        problems.append(f"{paths[0].name}: do_lower_case is {lower_case!r}, not true or false")
    path = folder / "config_sentence_transformers.json"
    config = _object(path, problems) if path.is_file() else {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        problems.append(f"{path.name}: prompts is no object of texts")
        prompts = {}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        problems.append(f"{path.name}: default_prompt_name {default!r} is none of its prompts")
    return max_len, lower_case is True, prompts, default


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
