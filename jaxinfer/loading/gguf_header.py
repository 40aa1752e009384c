"""Read the header of a GGUF file, key-values and tensor directory, with every length checked.

The `gguf` package's own reader trusts the counts and lengths in the file and takes two seconds for
a 49,152-token vocabulary, so this reader replaces it. It allocates in proportion to the bytes in
the file, never to a number that the file states. The layout is that of the GGUF specification,
versions 2 and 3 (little-endian; version 1 has 32-bit lengths and predates every current model).
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxinfer.loading.checkpoint import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # the specification's, where general.alignment is absent
MAX_KEY_VALUES = 65_536
MAX_TENSORS = 262_144
MAX_NAME_BYTES = 65_535  # the specification's limit for keys
MAX_ARRAY_STRINGS = 8_388_608  # the largest vocabularies in use have 262,144 tokens
MAX_TUPLE = 65_536  # longer numeric arrays stay numpy arrays
MAX_DIMS = 4
MAX_ALIGNMENT = 65_536

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS: Mapping[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


class TensorInfo(NamedTuple):
    """An entry of the tensor directory; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """A checked header. Arrays in `metadata` are tuples; long numeric ones are NumPy arrays."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


class _Cursor:
    """A position in the mapped file that never moves past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.position = 0

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def take(self, size: int, what: str) -> int:
        """Advance by `size` bytes and return the offset of the first one."""
        start = self.position
        if size > self.end - start:
            raise self.error(
                f"truncated or corrupt: {what} needs {size:,} bytes at offset {start:,}, but the "
                f"file ends at {self.end:,}; fetch the file again"
            )
        self.position = start + size
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.take(8, what))[0]

    def text(self, what: str, max_bytes: int | None = None) -> str:
        size = self.u64(f"the length of {what}")
        if max_bytes is not None and size > max_bytes:
            raise self.error(f"{what} has {size:,} bytes, more than the limit of {max_bytes:,}")
        start = self.take(size, what)
        return self.decode(self.data[start : start + size], what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 ({error})") from error

    def value(self, kind: int, what: str) -> Any:
        """Read one metadata value of type `kind`."""
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.ARRAY:
            return self.array(what)
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.error(f"{what} has unknown value type {kind}; known are 0 to 12")
        start = self.take(dtype.itemsize, what)
        number = np.frombuffer(self.data, dtype, 1, start)[0].item()
        return bool(number) if kind == GGUFValueType.BOOL else number

    def array(self, what: str) -> tuple[Any, ...] | np.ndarray:
        kind = self.u32(f"the element type of {what}")
        count = self.u64(f"the length of {what}")
        if kind == GGUFValueType.STRING:
            return self.strings(count, what)
        dtype = _SCALARS.get(kind)
        if dtype is None:
            nested = " (nested arrays are not supported)" if kind == GGUFValueType.ARRAY else ""
            raise self.error(f"{what} is an array of value type {kind}{nested}")
        start = self.take(count * dtype.itemsize, f"{what} ({count:,} entries)")
        numbers = np.frombuffer(self.data, dtype, count, start)
        if kind == GGUFValueType.BOOL:
            numbers = numbers.astype(np.bool_)
        return tuple(numbers.tolist()) if count <= MAX_TUPLE else numbers.copy()

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        if count > MAX_ARRAY_STRINGS:
            raise self.error(
                f"{what} claims {count:,} strings, more than the limit of {MAX_ARRAY_STRINGS:,}"
            )
        # Each string has at least its 8-byte length, so the count is checked before the loop.
        if count * 8 > self.end - self.position:
            raise self.error(f"truncated or corrupt: {what} claims {count:,} strings")
        # Inlined instead of calling text(): a small model already has 100,000 strings.
        data, position, end, unpack = self.data, self.position, self.end, _U64.unpack_from
        texts: list[str] = []
        for index in range(count):
            size = unpack(data, position)[0] if end - position >= 8 else end
            start = position + 8
            position = start + size
            if position > end:
                raise self.error(f"truncated or corrupt: string {index} of {what} ({size:,} bytes)")
            texts.append(self.decode(data[start:position], what))
        self.position = position
        return tuple(texts)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`.

    Raises `CheckpointError`: for structural damage at the first problem, for the tensor directory
    with all of its problems. Time and memory are bounded by the size of the header.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _read(_Cursor(path, data))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    except CheckpointError:
        raise
    except ValueError as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: not a GGUF file ({error})") from error


def copy_key_values(source: Path, target: Path) -> None:
    """Write a GGUF file that has only the key-values of `source`, without those of a split."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(source, data)
        _, num_key_values = _read_preamble(cursor)
        version = data[len(MAGIC) : len(MAGIC) + _U32.size]
        kept = [
            data[start:end]
            for start, end, key, _ in _read_key_values(cursor, num_key_values)
            if not key.startswith("split.")
        ]
        counts = _U64.pack(0) + _U64.pack(len(kept))
        target.write_bytes(MAGIC + version + counts + b"".join(kept))


def _read(cursor: _Cursor) -> GgufHeader:
    num_tensors, num_key_values = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _, _, key, value in _read_key_values(cursor, num_key_values):
        if key in metadata:
            raise cursor.error(f"key {key!r} occurs twice; the file is corrupt")
        metadata[key] = value
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment % 8:
        raise cursor.error(
            f"general.alignment is {alignment!r}, not a multiple of 8 up to {MAX_ALIGNMENT}"
        )
    return GgufHeader(metadata, _read_directory(cursor, num_tensors, alignment))


def _read_key_values(cursor: _Cursor, count: int) -> Iterator[tuple[int, int, str, Any]]:
    """Yield the start offset, end offset, key and value of each key-value."""
    for index in range(count):
        start = cursor.position
        key = cursor.text(f"key {index}", MAX_NAME_BYTES)
        value = cursor.value(cursor.u32(f"the type of {key!r}"), repr(key))
        yield start, cursor.position, key, value


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of key-values."""
    start = cursor.take(4, "the magic number")
    magic = cursor.data[start : start + 4]
    if magic != MAGIC:
        raise cursor.error(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = cursor.u32("the version")
    if version not in SUPPORTED_VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in SUPPORTED_VERSIONS:
            raise cursor.error("big-endian GGUF is not supported; convert it to little-endian")
        raise cursor.error(
            f"GGUF version {version} is not supported (2 and 3 are); convert the model again "
            "with a current converter"
        )
    num_tensors = cursor.u64("the tensor count")
    num_key_values = cursor.u64("the key-value count")
    for count, limit, what in (
        (num_tensors, MAX_TENSORS, "tensors"),
        (num_key_values, MAX_KEY_VALUES, "key-values"),
    ):
        if count > limit:
            raise cursor.error(f"claims {count:,} {what}, more than the limit of {limit:,}")
    return num_tensors, num_key_values


def _read_directory(cursor: _Cursor, num_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    """Read the tensor directory, with absolute offsets; raise one error for all its problems."""
    entries = []
    for index in range(num_tensors):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES)
        num_dims = cursor.u32(f"the rank of {name!r}")
        if num_dims > MAX_DIMS:
            raise cursor.error(f"tensor {name!r} claims {num_dims} dimensions, GGUF has {MAX_DIMS}")
        dims = tuple(cursor.u64(f"the shape of {name!r}") for _ in range(num_dims))
        kind = cursor.u32(f"the type of {name!r}")
        entries.append((name, dims[::-1], kind, cursor.u64(f"the offset of {name!r}")))
    data_start = -(-cursor.position // alignment) * alignment

    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        try:
            info = _tensor_info(name, shape, kind, data_start + offset)
        except ValueError as error:
            problems.append(f"tensor {name!r} {error}")
            continue
        if name in tensors:
            problems.append(f"tensor {name!r} occurs twice")
        if offset % alignment:
            problems.append(f"tensor {name!r} is at {offset}, not a multiple of {alignment}")
        if info.offset + info.nbytes > cursor.end:
            problems.append(
                f"tensor {name!r} ends at byte {info.offset + info.nbytes:,}, but the file at "
                f"{cursor.end:,}; the file is truncated, fetch it again"
            )
        tensors[name] = info
    problems += _overlaps(tensors.values())
    if problems:
        raise CheckpointError.listing(cursor.path, problems)
    return tuple(tensors.values())


def _tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(
            f"has unknown type {kind}; convert the model to Q8_0, Q6_K or F16"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if 0 in shape:
        raise ValueError(f"is empty: shape {shape}")
    if (shape[-1] if shape else 1) % block:
        raise ValueError(
            f"of shape {shape} has rows that are not a multiple of {ggml_type.name}'s block of "
            f"{block}"
        )
    return TensorInfo(name, shape, ggml_type, offset, math.prod(shape) // block * block_bytes)


def _overlaps(tensors: Any) -> list[str]:
    ordered = sorted(tensors, key=lambda info: info.offset)
    return [
        f"tensors {left.name!r} and {right.name!r} overlap"
        for left, right in itertools.pairwise(ordered)
        if left.offset + left.nbytes > right.offset
    ]
