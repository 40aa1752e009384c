"""Hugging Face model directories.

Read are `config.json`, the weights (`model.safetensors`, or the shards that
`model.safetensors.index.json` lists), `generation_config.json`, and, on `Checkpoint.tokenizer()`,
the tokenizer files. Precedence: what generation needs (EOS ids and the like) is taken key by key
from `generation_config.json`, then from `config.json`; `null` counts as silent. Pickled weights
(`.bin`, `.pt`, `.pth`, `.ckpt`) are never opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxinfer.loading.checkpoint import (
    Checkpoint,
    CheckpointError,
    GenerationDefaults,
    StoredTensor,
    read_json_object,
)
from jaxinfer.loading.huggingface_tokenizer import build_tokenizer
from jaxinfer.loading.safetensors_header import read_safetensors

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_huggingface(directory: Path) -> Checkpoint:
    """Open the model directory `directory`.

    `CheckpointError` lists everything that is missing or damaged at once.
    """
    problems: list[str] = []
    config: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    try:
        config = read_json_object(directory / "config.json")
    except CheckpointError as error:
        problems.append(str(error))
    try:
        if (directory / "generation_config.json").exists():
            generation = read_json_object(directory / "generation_config.json")
    except CheckpointError as error:
        problems.append(str(error))
    try:
        tensors = _read_weights(directory)
    except CheckpointError as error:
        problems.append(str(error))
    defaults = _generation_defaults(generation, config, problems)
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


def _read_weights(directory: Path) -> dict[str, StoredTensor]:
    # The index decides where both exist: a stray single file is then a leftover or a shard.
    if (directory / INDEX_FILE).exists():
        return _read_shards(directory)
    if (directory / WEIGHTS_FILE).exists():
        return read_safetensors(directory / WEIGHTS_FILE)
    names = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        raise CheckpointError(
            f"holds {', '.join(others)} but neither {WEIGHTS_FILE} nor {INDEX_FILE}; rename a "
            f"single file to {WEIGHTS_FILE}, or fetch the index of the shards"
        )
    if pickles:
        raise CheckpointError(
            f"holds only pickled weights ({', '.join(pickles)}), which can run code when opened "
            "and are refused; convert the model to safetensors (save_pretrained of transformers "
            "writes it) or use a repository that has it"
        )
    raise CheckpointError(f"holds no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}")


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards; index and shards must agree exactly."""
    weight_map = read_json_object(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name and name == Path(name).name for name in weight_map.values()
    ):
        raise CheckpointError(f"{INDEX_FILE}: weight_map is not an object of plain file names")
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
            f"{shard} has tensor {name!r}, which {INDEX_FILE} places in {weight_map.get(name)}"
            for name in sorted(stored.keys() - listed)
        ]
        tensors |= stored
    if problems:
        raise CheckpointError.listing(INDEX_FILE, problems)
    return tensors


def _generation_defaults(
    generation: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]
) -> GenerationDefaults:
    """`generation_config.json` over `config.json`; wrong types are added to `problems`."""

    def read(key: str, kinds: tuple[type, ...], what: str) -> Any:
        for name, source in (("generation_config.json", generation), ("config.json", config)):
            value = source.get(key)
            if value is None:
                continue
            if type(value) in kinds:
                return float(value) if float in kinds else value
            problems.append(f"{name}: {key} is {value!r}, {what} is needed")
        return None

    number = ((int, float), "a number")
    eos = read("eos_token_id", (int, list), "a token id or a list of them")
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    bos = read("bos_token_id", (int,), "a token id")
    pad = read("pad_token_id", (int,), "a token id")
    pad = None if pad == -1 else pad  # how the first LLaMA configs say that there is none
    for key, value in [("bos", bos), ("pad", pad), *(("eos", item) for item in eos)]:
        if value is not None and (type(value) is not int or value < 0):
            problems.append(f"{key}_token_id is {value!r}, a token id is needed")
            return GenerationDefaults()
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos,
        pad_token_id=pad,
        do_sample=read("do_sample", (bool,), "true or false"),
        temperature=read("temperature", *number),
        top_k=read("top_k", (int,), "a whole number"),
        top_p=read("top_p", *number),
        min_p=read("min_p", *number),
        repetition_penalty=read("repetition_penalty", *number),
    )
