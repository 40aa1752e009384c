"""Read Hugging Face model directories.

The files that are read are `config.json`, the weights, `generation_config.json`
(`jaxinfer.loading.generation`), and, on `Checkpoint.tokenizer()`, the tokenizer files. The weights
are the first of these: the files that `model.safetensors.index.json` lists, or those of another
`*.safetensors.index.json` if it is the only one; `model.safetensors`; a complete set of shards
`NAME-00001-of-0000N.safetensors`; the only other `.safetensors` file. `consolidated*` (a
publisher's second copy, with its own tensor names) and `adapter_*` are ignored. Pickled weights
(`.bin`, `.pt`, `.pth`, `.ckpt`) are never opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxinfer.loading.checkpoint import (
    Checkpoint,
    CheckpointError,
    StoredTensor,
    read_json_object,
)
from jaxinfer.loading.generation import generation_defaults
from jaxinfer.loading.quantized.scheme import merge_quantized_layers
from jaxinfer.loading.safetensors_header import read_safetensors
from jaxinfer.loading.shards import shard_set
from jaxinfer.loading.tokenizers.huggingface import build_tokenizer

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_FILE = "model" + INDEX_SUFFIX
IGNORED_PREFIXES = ("consolidated", "adapter_")


def open_huggingface(
    directory: Path, *, config_file: str = CONFIG_FILE, needs_weights: bool = True
) -> Checkpoint:
    """Open the model directory `directory`.

    Without `needs_weights` only the configuration is required and there are no tensors. Raises one
    `CheckpointError` that lists everything that is missing or damaged.
    """
    problems: list[str] = []

    def read(path: Path) -> dict[str, Any]:
        try:
            return read_json_object(path)
        except CheckpointError as error:
            problems.append(str(error))
            return {}

    config = read(directory / config_file)
    generation: dict[str, Any] = {}
    if (directory / "generation_config.json").exists():
        generation = read(directory / "generation_config.json")
    tensors: dict[str, StoredTensor] = {}
    if needs_weights:
        try:
            tensors = _read_weights(directory)
        except CheckpointError as error:
            problems.append(str(error))
    if tensors and config.get("quantization_config"):
        tensors = merge_quantized_layers(
            directory, tensors, config["quantization_config"], problems
        )
    defaults = generation_defaults(directory, generation, config, problems)
    if problems:
        raise CheckpointError.listing(directory, problems)
    return Checkpoint(
        path=directory,
        format="safetensors",
        name=directory.resolve().name,
        metadata=config,
        tensors=tensors,
        generation=defaults,
        _build_tokenizer=partial(build_tokenizer, directory, defaults),
    )


def weight_files(directory: Path) -> list[Path]:
    """List the files that contain the weights of a directory that can be opened."""
    kind, names = _find_weights(directory)
    if kind == "index":
        names = sorted(set(read_json_object(directory / names[0])["weight_map"].values()))
    return [directory / name for name in names]


def _read_weights(directory: Path) -> dict[str, StoredTensor]:
    kind, names = _find_weights(directory)
    if kind == "index":
        return _read_shards(directory, names[0])
    if kind == "single":
        return read_safetensors(directory / names[0])
    return _read_numbered(directory, names)


def _find_weights(directory: Path) -> tuple[Literal["index", "single", "numbered"], list[str]]:
    """Return the files that define the weights, and of what kind they are.

    Raises `CheckpointError` if there are none.
    """
    names = sorted(path.name for path in directory.iterdir())
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX) and _is_candidate(name)]
    # If both exist, the index takes precedence: the single file is then a leftover or a shard.
    if INDEX_FILE in indexes:
        return "index", [INDEX_FILE]
    files = [name for name in names if name.endswith(".safetensors") and _is_candidate(name)]
    if WEIGHTS_FILE in files:
        return "single", [WEIGHTS_FILE]
    if len(indexes) == 1:
        return "index", indexes
    if len(files) == 1 and shard_set(directory / files[0]) is None:
        return "single", files
    if files:
        return "numbered", files
    raise CheckpointError(_missing_weights_message(names))


def _is_candidate(name: str) -> bool:
    return not name.startswith(IGNORED_PREFIXES)


def _missing_weights_message(names: Iterable[str]) -> str:
    """Say why a directory of these files has no weights, with a remedy."""
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return (
            f"has {', '.join(others)}, which is not a model in Hugging Face's layout (but an "
            f"adapter, or weights with a publisher's own tensor names); fetch {WEIGHTS_FILE} or "
            f"the shards with {INDEX_FILE}"
        )
    if pickles:
        return (
            f"has only pickled weights ({', '.join(pickles)}), which can run code when opened "
            "and are refused; convert the model to safetensors (save_pretrained of transformers "
            "writes it) or use a repository that has it"
        )
    return (
        f"has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}; fetch them, or run the "
        "configuration with random weights (--set load_format=random)"
    )


def _read_numbered(directory: Path, files: list[str]) -> dict[str, StoredTensor]:
    """Read the tensors of a complete set of shards that has no index."""
    shards, *others = {shard_set(directory / name) for name in files}
    if shards is None or others:
        raise CheckpointError(
            f"has {', '.join(files)}, but no {WEIGHTS_FILE}, and no {INDEX_FILE} says which of "
            f"them are the model; rename a single file to {WEIGHTS_FILE}, or fetch the index"
        )
    problems = [f"shard {name} is missing" for name in shards.names() if name not in files]
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        try:
            stored = read_safetensors(directory / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        twice = sorted(stored.keys() & tensors.keys())
        problems += [f"{name} has tensor {tensor!r}, as another shard does" for tensor in twice]
        tensors |= stored
    if problems:
        raise CheckpointError.listing(directory, problems)
    return tensors


def _read_shards(directory: Path, index: str) -> dict[str, StoredTensor]:
    """Read the tensors of all shards; the index and the shards must agree exactly."""
    weight_map = read_json_object(directory / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name and name == Path(name).name for name in weight_map.values()
    ):
        raise CheckpointError(f"{index}: weight_map is not an object of plain file names")
    problems: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        listed = {tensor for tensor, name in weight_map.items() if name == shard}
        if not (directory / shard).is_file():
            problems.append(f"shard {shard} is missing ({len(listed)} tensors)")
            continue
        try:
            stored = read_safetensors(directory / shard)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [f"{shard} lacks tensor {name!r}" for name in sorted(listed - stored.keys())]
        problems += [
            f"{shard} has tensor {name!r}, which {index} places in {weight_map.get(name)}"
            for name in sorted(stored.keys() - listed)
        ]
        tensors |= stored
    if problems:
        raise CheckpointError.listing(index, problems)
    return tensors
