"""The result of every checkpoint reader: named tensors on disk, metadata, generation defaults.

Nothing here depends on models or parameters, or imports jax: a reader describes a file, and
`jaxinfer.loading.assign` decides which parameters its tensors are.
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
# The contents of a converted checkpoint (`jaxinfer.loading.orbax`).
MANIFEST_FILE = "jaxinfer.json"
ARRAYS_FOLDER = "arrays"
MAX_JSON_BYTES = 64 * 2**20  # configs are kilobytes; the index of a 1T model is a few megabytes

# Stored names of the number formats that are read without conversion. GGUF and safetensors use the
# same names, except for the 8-bit floats, which only safetensors has.
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


ALIGNMENT = 64  # bytes; jax on a CPU copies buffers that are aligned less


class CheckpointError(ValueError):
    """Raised for an unusable checkpoint; names the file, the value, the limit and a remedy."""

    @classmethod
    def listing(cls, where: str | Path, problems: Sequence[str]) -> CheckpointError:
        """Make one error of all `problems` found in `where`; it lists the first twenty."""
        if len(problems) == 1:
            return cls(f"{where}: {problems[0]}")
        lines = [f"  - {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
        if len(problems) > MAX_PROBLEMS_SHOWN:
            lines.append(f"  - and {len(problems) - MAX_PROBLEMS_SHOWN} more")
        return cls(f"{where}: {len(problems)} problems\n" + "\n".join(lines))


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Allocate an array that jax on a CPU uses without a copy.

    With copies, peak memory was 1.5 times the weights.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def is_aligned(values: np.ndarray) -> bool:
    """Whether jax on a CPU uses the values without a copy."""
    return values.ctypes.data % ALIGNMENT == 0


# Reads a tensor's values; quantized numbers are converted to the type that it is called with.
Loader = Callable[[np.dtype[Any]], np.ndarray]


class Bytes(NamedTuple):
    """A range of a file's bytes."""

    path: Path
    offset: int
    size: int

    def map(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        """Map the range as a read-only view, for as long as the view lives.

        Each call makes its own mapping, so the pages of a tensor leave the resident set when its
        view is dropped; one mapping for the whole file would keep every page it ever read. A view
        that is unaligned in the file is copied. Raises `CheckpointError` if the file has shrunk.
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
        """Return a loader for a tensor that these bytes store unquantized."""
        return lambda dequantized: self.map(dtype, shape)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file; its data is not read until `read` is called.

    `shape` is in NumPy's row-major order, so a linear weight is `[out, in]` in every format.
    `dtype` is the stored name ("F32", "BF16", "Q4_1", ...) and `nbytes` the size in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    _load: Loader = field(repr=False, compare=False)
    _load_packed: Callable[[], QuantRows] | None = field(default=None, repr=False, compare=False)

    def read(self, dequantized: np.dtype[Any] = FLOAT32) -> np.ndarray:
        """Read the values, in `shape`: quantized types as `dequantized`, others as stored.

        The result may be a read-only view of the mapped file: keep it no longer than needed.
        """
        return self._load(dequantized)

    @property
    def is_packable(self) -> bool:
        """Whether `read_packed` can read it without dequantizing."""
        return self._load_packed is not None

    def read_packed(self) -> QuantRows | None:
        """Read values, scales and zero points; None if the type cannot stay quantized."""
        return None if self._load_packed is None else self._load_packed()


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's generation settings; `None` or `()` where it states nothing."""

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
        """Return the checkpoint's recommended sampling parameters, updated with `changes`."""
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
    """An opened checkpoint: its headers have been read and checked, its tensors are on disk.

    `metadata` has the GGUF key-values without the vocabulary arrays, or the contents of
    `config.json`. `path` is the file (the first one of a split GGUF) or the directory. `format` is
    the format of the metadata and the tensor names. If the parameters have been converted
    (`jaxinfer.loading.orbax`), `restore` reads them, and `tensors` have only names and shapes.
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
        """Build a new tokenizer, which takes tenths of a second.

        Raises `CheckpointError` if the checkpoint has none, or one of an unsupported kind.
        """
        return self._build_tokenizer()


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises `CheckpointError` for anything else, and for a file of more than `max_bytes`.
    """
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= max_bytes else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if size > max_bytes:
        raise CheckpointError(
            f"{path}: {size:,} bytes of JSON, more than the limit of {max_bytes:,}; this is not a "
            "usual checkpoint's file, fetch it again"
        )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is a JSON {type(value).__name__}, an object is needed")
    return value
