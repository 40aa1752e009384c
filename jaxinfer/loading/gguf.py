"""Read GGUF checkpoints: one file, or the numbered shards of one model.

Tensors keep their names in the file (`blk.0.attn_q.weight`). Quantized types are dequantized in
chunks by the `gguf` package's float32 formulas; other types are memory-mapped. GGUF converters
permute the rows of q and k of Llama-like models for their rotary layout; the weight table undoes
that, not this reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.loading.checkpoint import (
    PLAIN_DTYPES,
    Bytes,
    Checkpoint,
    CheckpointError,
    GenerationDefaults,
    StoredTensor,
    aligned_empty,
)
from jaxinfer.loading.gguf_header import GgufHeader, TensorInfo, read_header
from jaxinfer.loading.quantized.gguf_blocks import READERS, read_blocks
from jaxinfer.loading.quantized.rows import QuantRows
from jaxinfer.loading.shards import shard_set
from jaxinfer.loading.tokenizers.gguf import build_tokenizer
from jaxinfer.loading.tokenizers.gguf_vocabulary import VOCABULARY_KEYS, special_ids

QUANTIZED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        "MXFP4",
    )
)
# Elements dequantized at once. The formulas' temporaries are a few times larger and should stay in
# the cache: the demo model is read in 0.4 s, and in 0.9 s with four times as many (2 cores, 2026).
CHUNK_ELEMENTS = 65_536


def open_gguf(path: Path) -> Checkpoint:
    """Open the GGUF file at `path`, or the split model that it is a shard of.

    Raises `CheckpointError`, with a remedy, for a damaged file, a missing shard, or an unsupported
    tensor type.
    """
    paths = shard_paths(path)
    headers = [read_header(shard) for shard in paths]
    metadata = headers[0].metadata
    problems: list[str] = []
    declared = metadata.get("split.count", 1)
    if declared not in (0, len(paths)):
        problems.append(
            f"has split.count {declared}, but its name says {len(paths)} shards; shards must keep "
            "their names NAME-00001-of-0000N.gguf and be in one folder"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard, header in zip(paths, headers, strict=True):
        for info in header.tensors:
            if info.name in tensors:
                problems.append(f"tensor {info.name!r} occurs in two shards")
            if not _is_readable(info.type):
                problems.append(_unreadable(info))
            tensors[info.name] = _stored(shard, info)
    if problems:
        raise CheckpointError.listing(path, problems)
    return Checkpoint(
        path=paths[0],
        format="gguf",
        name=_name(metadata, paths[0]),
        metadata={key: value for key, value in metadata.items() if key not in VOCABULARY_KEYS},
        tensors=tensors,
        generation=_generation_defaults(paths[0], headers[0]),
        _build_tokenizer=partial(build_tokenizer, paths[0], metadata),
    )


def shard_paths(path: Path) -> list[Path]:
    """List the files of the model that `path` belongs to, in order: itself, or all its shards."""
    shards = shard_set(path)
    if shards is None:
        return [path]
    names = shards.names()
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError.listing(path, [f"shard {name} is missing" for name in missing])
    return [path.parent / name for name in names]


def dequantize(
    data: Bytes, shape: tuple[int, ...], kind: GGMLQuantizationType, dtype: np.dtype[Any]
) -> np.ndarray:
    """Dequantize bytes in chunks, with temporaries of a few `CHUNK_ELEMENTS`.

    The formulas compute in float32, and the results are rounded to `dtype`.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = data.map(np.dtype(np.uint8), (data.size,))
    values = aligned_empty((data.size // block_bytes * block,), dtype)
    step = CHUNK_ELEMENTS // block
    # Damaged scales overflow here; loading reports the weights that are not finite.
    with np.errstate(all="ignore"):
        for first in range(0, data.size // block_bytes, step):
            chunk = raw[first * block_bytes : (first + step) * block_bytes]
            # One row, because the package loops over groups of 16 rows in Python.
            part = quants.dequantize(chunk.reshape(1, -1), kind)
            values[first * block : first * block + part.size] = part[0]
    return values.reshape(shape)


def _is_readable(kind: GGMLQuantizationType) -> bool:
    return kind in QUANTIZED_TYPES or kind.name in PLAIN_DTYPES


def _unreadable(info: TensorInfo) -> str:
    known = ", ".join(sorted(kind.name for kind in QUANTIZED_TYPES))
    return (
        f"tensor {info.name!r} has type {info.type.name}, which is not supported (F32, F16, BF16, "
        f"{known} are); convert the model to Q8_0, Q6_K or F16"
    )


def _stored(path: Path, info: TensorInfo) -> StoredTensor:
    data, packed = Bytes(path, info.offset, info.nbytes), None
    if info.type in QUANTIZED_TYPES:
        load = partial(dequantize, data, info.shape, info.type)
        if info.type.name in READERS:
            packed = partial(_read_packed, data, info.shape, info.type.name)
    else:
        load = data.plain(PLAIN_DTYPES.get(info.type.name, np.dtype(np.uint8)), info.shape)
    return StoredTensor(info.name, info.shape, info.type.name, info.nbytes, load, packed)


def _read_packed(data: Bytes, shape: tuple[int, ...], kind: str) -> QuantRows:
    return read_blocks(data.map(np.dtype(np.uint8), (data.size,)), shape, kind)


def _name(metadata: Mapping[str, Any], path: Path) -> str:
    name = metadata.get("general.name")
    return name if isinstance(name, str) and name else path.stem


def _generation_defaults(path: Path, header: GgufHeader) -> GenerationDefaults:
    """Read `general.sampling.*` and the special token ids of the vocabulary."""
    metadata = header.metadata
    numbers: dict[str, Any] = {}
    for field, key, kinds in (
        ("temperature", "general.sampling.temp", (int, float)),
        ("top_k", "general.sampling.top_k", (int,)),
        ("top_p", "general.sampling.top_p", (int, float)),
        ("min_p", "general.sampling.min_p", (int, float)),
        ("repetition_penalty", "general.sampling.penalty_repeat", (int, float)),
    ):
        value = metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise CheckpointError(f"{path}: {key} is {value!r}, a number is needed")
        numbers[field] = float(value) if float in kinds and value is not None else value
    ids = special_ids(path, metadata)
    return GenerationDefaults(eos_token_ids=ids.eos, bos_token_id=ids.bos, **numbers)
