"""What every checkpoint reader hands on: named tensors on disk, metadata, generation defaults.

Nothing here knows about models or parameters, and nothing imports jax: a reader describes a file,
`jaxinfer.loading.assign` decides what its tensors mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jaxinfer.loading.quantized.rows import QuantRows
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

FLOAT32 = np.dtype(np.float32)
MAX_PROBLEMS_SHOWN = 20
# Of a converted checkpoint (`jaxinfer.loading.orbax`).
MANIFEST_FILE = "jaxinfer.json"
ARRAYS_FOLDER = "arrays"
MAX_JSON_BYTES = 64 * 2**20  # configs are kilobytes; the index of a 1T model is a few megabytes

# Stored names of the number formats that are read as they are; GGUF and safetensors agree on them
# save for the 8-bit floats, which only safetensors has.
PLAIN_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),  # powers of two: scales
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


ALIGNMENT = 64  # bytes: what jax on a CPU takes over as it is; another buffer it would copy


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: names the file, the value, the limit and the way out."""

    @classmethod
    def listing(cls, where: str | Path, problems: Sequence[str]) -> CheckpointError:
        """One error for all `problems` found in `where`, the first twenty spelled out."""
        if len(problems) == 1:
            return cls(f"{where}: {problems[0]}")
        lines = [f"  - {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
        if len(problems) > MAX_PROBLEMS_SHOWN:
            lines.append(f"  - and {len(problems) - MAX_PROBLEMS_SHOWN} more")
        return cls(f"{where}: {len(problems)} problems\n" + "\n".join(lines))


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A buffer that jax on a CPU need not copy: peak memory was 1.5 times the weights."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def is_aligned(values: np.ndarray) -> bool:
    """Whether jax on a CPU takes the values over as they are."""
    return values.ctypes.data % ALIGNMENT == 0


# From the type that quantized numbers become to the values.
Loader = Callable[[np.dtype[Any]], np.ndarray]


class Bytes(NamedTuple):
    """A stretch of a file."""

    path: Path
    offset: int
    size: int

    def map(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        """A read-only view of the stretch, mapped for as long as the view lives.

        Each call maps anew, so pages touched by one tensor leave the resident set when its view is
        dropped; one mapping for the whole file would keep every page it ever read. A view that
        the file's layout leaves unaligned is copied. `CheckpointError` if the file has shrunk.
        """
        if self.size == 0:
            return np.empty(shape, dtype)
        try:
            raw = np.memmap(self.path, np.uint8, "r", self.offset, (self.size,))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: bytes {self.offset} to {self.offset + self.size} could not be mapped"
                f" ({error}); was the file changed or cut while in use? Fetch it again."
            ) from error
        view = raw.view(np.ndarray).view(dtype).reshape(shape)
        return view if view.flags.aligned else view.copy()

    def plain(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Loader:
        """How a tensor of these bytes is read that is stored as plain numbers."""
        return lambda dequantized: self.map(dtype, shape)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file; nothing is read until `read`.

    `shape` is numpy's row-major order, so a linear weight is `[out, in]` in every format. `dtype`
    is the stored name ("F32", "BF16", "Q4_1", ...) and `nbytes` the size in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    _load: Loader = field(repr=False, compare=False)
    _load_packed: Callable[[], QuantRows] | None = field(default=None, repr=False, compare=False)

    def read(self, dequantized: np.dtype[Any] = FLOAT32) -> np.ndarray:
        """The values, `shape`-shaped: quantized types as `dequantized`, others in their own dtype.

        The result may be a read-only view of the mapped file: keep it no longer than needed.
        """
        return self._load(dequantized)

    @property
    def is_packable(self) -> bool:
        """Whether it is of a quantized type that `read_packed` gives as it is."""
        return self._load_packed is not None

    def read_packed(self) -> QuantRows | None:
        """The values, scales and zero points of a type that can stay quantized; None of others."""
        return None if self._load_packed is None else self._load_packed()


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about generating with it; `None` or `()` where it is silent."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """What the checkpoint recommends, then `changes`."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.do_sample is False:
            given["temperature"] = 0.0
        if self.max_new_tokens is not None:
            given["max_tokens"] = self.max_new_tokens
        if self.stop_strings:
            given["stop"] = self.stop_strings
        return SamplingParams(**{**given, **changes})


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: headers are read and checked, tensors are still on disk.

    `metadata` holds the GGUF key-values without the vocabulary arrays, or the dictionary of
    `config.json`. `path` is the file (the first one of a split GGUF) or the directory. `format` is
    the one that metadata and tensor names follow; where the parameters have been converted
    (`jaxinfer.loading.orbax`), `restore` reads them, and tensors are names and shapes alone.
    """

    path: Path
    format: Literal["gguf", "safetensors"]
    name: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    generation: GenerationDefaults
    _build_tokenizer: Callable[[], Tokenizer] = field(repr=False, compare=False)
    restore: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer: a new one each call (tenths of a second), so keep it.

        `CheckpointError` if the checkpoint carries none, or one of a kind not supported.
        """
        return self._build_tokenizer()


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file; `CheckpointError` for anything else, or past `max_bytes`."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= max_bytes else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if size > max_bytes:
        raise CheckpointError(
            f"{path}: {size:,} bytes of JSON, more than the limit of {max_bytes:,}; this is no "
            "file of a usual checkpoint"
        )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, an object is needed")
    return value
