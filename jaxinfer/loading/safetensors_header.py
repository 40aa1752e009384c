"""Read the header of a `.safetensors` file, checked against the file's size.

The `safetensors` package's NumPy reader does not support bfloat16, so the format is read here:
eight bytes of header length (little-endian), a JSON object of `{name: {dtype, shape,
data_offsets}}`, then the data. As the specification requires, the tensors must cover the data
exactly, without overlap or gap. 4-bit numbers are read as bytes of two numbers, uint8 [..., n / 2].
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.loading.checkpoint import PLAIN_DTYPES, Bytes, CheckpointError, StoredTensor

F4 = "F4"  # two numbers per byte; the shape counts numbers
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, by name; only the header is read.

    Raises `CheckpointError` for a file that is not a safetensors file, is truncated, or whose
    header does not match its data; one error lists all problems of the header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # Checked first, because a read allocates the requested size.
            is_whole = size >= 8 and length <= size - 8
            raw = file.read(length) if is_whole and length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not is_whole:
        raise CheckpointError(
            f"{path}: not a safetensors file, or truncated: it has {size:,} bytes, but states a "
            f"header of {length:,}; fetch the file again"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: a header of {length:,} bytes is more than the limit of "
            f"{MAX_HEADER_BYTES:,}; this is not a usual checkpoint's file, fetch it again"
        )
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    return _tensors(path, header, 8 + length, size)


def _tensors(
    path: Path, header: dict[str, Any], data_start: int, file_size: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    problems: list[str] = []
    for name, entry in header.items():
        try:
            dtype, shape, begin, end = _entry(entry)
        except ValueError as error:
            problems.append(f"tensor {name!r} {error}")
            continue
        spans.append((begin, end, name))
        data = Bytes(path, data_start + begin, end - begin)
        load = data.plain(np.dtype(np.uint8) if dtype == F4 else PLAIN_DTYPES[dtype], shape)
        tensors[name] = StoredTensor(name, shape, dtype, end - begin, load)
    if not problems:
        problems = _layout_problems(sorted(spans), file_size - data_start)
    if problems:
        raise CheckpointError.listing(path, problems)
    return tensors


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape and offsets of a header entry; raise `ValueError` if invalid."""
    if not isinstance(entry, dict):
        raise ValueError(f"is described by {entry!r}, not by an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    known = (*PLAIN_DTYPES, F4)
    if not isinstance(dtype, str) or dtype not in known:
        raise ValueError(
            f"has dtype {dtype!r}, which is not supported ({', '.join(known)} are); "
            "convert the model to BF16 or F16"
        )
    if not isinstance(shape, list) or not _are_sizes(shape):
        raise ValueError(f"has shape {shape!r}, not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets):
        raise ValueError(f"has data_offsets {offsets!r}, not two offsets")
    if dtype == F4:
        if not shape or shape[-1] % 2:
            raise ValueError(f"of {dtype} has shape {shape}, whose last dimension is odd")
        shape = [*shape[:-1], shape[-1] // 2]
    begin, end = offsets
    nbytes = math.prod(shape) * (1 if dtype == F4 else PLAIN_DTYPES[dtype].itemsize)
    if end - begin != nbytes:
        raise ValueError(
            f"of {dtype} {shape} needs {nbytes:,} bytes, its data_offsets are {begin} and {end}"
        )
    return dtype, tuple(shape), begin, end


def _are_sizes(values: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in values)


def _layout_problems(spans: list[tuple[int, int, str]], data_size: int) -> list[str]:
    """List the reasons why the sorted `spans` do not cover the data exactly once."""
    problems: list[str] = []
    covered = 0
    for begin, end, name in spans:
        if begin != covered:
            kind = "overlaps the one before it" if begin < covered else "follows a gap"
            problems.append(f"tensor {name!r} {kind}: it begins at {begin:,}, expected {covered:,}")
        covered = max(covered, end)
    if covered > data_size:
        problems.append(
            f"the tensors need {covered:,} bytes of data and the file has {data_size:,}; it is "
            "truncated, fetch it again"
        )
    elif covered < data_size:
        problems.append(f"{data_size - covered:,} bytes after the last tensor belong to no tensor")
    return problems
