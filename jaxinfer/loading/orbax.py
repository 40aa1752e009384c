"""Write and open converted checkpoints: the model's parameters as an Orbax checkpoint.

    jaxinfer.json   the manifest: format version, family, number type, the shape of every parameter,
                    and the names, shapes and types of the source's tensors
    arrays/         the parameters, an Orbax checkpoint (OCDBT, Zarr 3, uncompressed: compression
                    hardly shrinks weights and doubled the time to restore them)
    header.gguf     the key-values of a GGUF source, with its tokenizer; or
    config.json ... all files of a Hugging Face source except its weights

The model is built as from its source: the same functions read the same metadata. A quantized
parameter is a tree of arrays; the manifest has its other fields.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxinfer.loading.checkpoint import (
    ARRAYS_FOLDER,
    MANIFEST_FILE,
    Checkpoint,
    CheckpointError,
    StoredTensor,
    read_json_object,
)
from jaxinfer.loading.fingerprint import fingerprint
from jaxinfer.loading.gguf import open_gguf
from jaxinfer.loading.gguf_header import copy_key_values
from jaxinfer.loading.huggingface import INDEX_SUFFIX, open_huggingface
from jaxinfer.loading.manifest import CONVERT_AGAIN, encode_parameter
from jaxinfer.loading.output import check_output, replace_folder
from jaxinfer.loading.restoring import array_handler, named_leaves, restore
from jaxinfer.models.functional import FunctionalModel, Weights

FORMAT_VERSION = 1
HEADER_FILE = "header.gguf"
# A device reads whole chunks, so chunks are small enough to fit any sharding; a matrix of a 1B
# model has 8.
CHUNK_BYTES = 4 * 2**20
# Tensors from which the configuration is read, such as RoPE's factors, are shorter than this.
MAX_VALUE_ELEMENTS = 65_536
DESCRIPTION_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def write_converted(
    checkpoint: Checkpoint,
    model: FunctionalModel,
    weights: Weights,
    output: Path,
    *,
    quantization: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a converted checkpoint to the folder `output`, which appears atomically.

    Raises `CheckpointError` if `check_output` refuses the folder or it cannot be written.
    """
    check_output(checkpoint.path, output, overwrite=overwrite)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # A sibling, since a rename is atomic only within one file system.
        prefix = f".{output.name}.partial-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent) as temporary:
            folder = Path(temporary) / "new"
            folder.mkdir()
            _write_description(checkpoint, folder)
            _write_arrays(folder / ARRAYS_FOLDER, model, weights)
            manifest = _manifest(checkpoint, model, weights, quantization)
            (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
            replace_folder(folder, output, Path(temporary) / "old")
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written ({error})") from error


def open_converted(directory: Path) -> Checkpoint:
    """Open a converted checkpoint.

    Raises `CheckpointError` for another format version or a damaged checkpoint.
    """
    if not (directory / MANIFEST_FILE).exists():
        raise CheckpointError(
            f"{directory}: has converted arrays but no {MANIFEST_FILE}; {CONVERT_AGAIN}"
        )
    manifest = read_json_object(directory / MANIFEST_FILE)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory}: has format version {version!r}; this build reads {FORMAT_VERSION}: "
            f"{CONVERT_AGAIN}"
        )
    if not (directory / ARRAYS_FOLDER).is_dir():
        raise CheckpointError(f"{directory}: has no {ARRAYS_FOLDER} folder; {CONVERT_AGAIN}")
    is_gguf = manifest.get("source_format") == "gguf"
    described = (
        open_gguf(directory / HEADER_FILE)
        if is_gguf
        else open_huggingface(directory, needs_weights=False)
    )
    try:
        values = manifest["values"]
        tensors = {
            name: _converted_tensor(directory, name, tuple(shape), dtype, values.get(name))
            for name, (dtype, shape) in manifest["tensors"].items()
        }
        quantization = manifest["quantization"]
        restoring = partial(restore, directory, dict(manifest["parameters"]), quantization)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / MANIFEST_FILE}: is damaged ({error!r}); {CONVERT_AGAIN}"
        ) from error
    return dataclasses.replace(
        described,
        path=directory,
        name=manifest.get("name") or directory.name,
        tensors=tensors,
        restore=restoring,
    )


def _write_description(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the source's description of the model: its small files, or the GGUF key-values."""
    source = checkpoint.path
    if checkpoint.format == "gguf":
        header = source if checkpoint.restore is None else source / HEADER_FILE
        copy_key_values(header, folder / HEADER_FILE)
        return
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_hidden = any(part.startswith(".") for part in name.parts)
        is_converted = name.parts[0] in (ARRAYS_FOLDER, MANIFEST_FILE)
        if is_hidden or is_converted or name.name.endswith(INDEX_SUFFIX):
            continue
        if path.is_file() and path.suffix in DESCRIPTION_SUFFIXES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


def _manifest(
    checkpoint: Checkpoint, model: FunctionalModel, weights: Weights, quantization: str | None
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "name": checkpoint.name,
        "source_format": checkpoint.format,
        "fingerprint": fingerprint(checkpoint),
        "family": model.family.name,
        "dtype": model.numerics.dtype.name,
        "quantization": quantization,
        "num_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        "parameters": {
            spec.path: encode_parameter(weight)
            for spec, weight in zip(model.parameters, weights, strict=True)
        },
        "tensors": {name: [t.dtype, list(t.shape)] for name, t in checkpoint.tensors.items()},
        "values": _short_values(checkpoint, model),
    }


def _short_values(checkpoint: Checkpoint, model: FunctionalModel) -> dict[str, list[float]]:
    """Return the values of short tensors that belong to no parameter: configurations use them."""
    family = model.family
    make_table: Any = family.gguf_weights if checkpoint.format == "gguf" else family.hf_weights
    table = make_table(model.config)
    return {
        name: tensor.read().astype(np.float64).tolist()
        for name, tensor in checkpoint.tensors.items()
        if table.is_ignored(table.known_name(name))
        and len(tensor.shape) == 1
        and tensor.shape[0] <= MAX_VALUE_ELEMENTS
    }


def _converted_tensor(
    directory: Path, name: str, shape: tuple[int, ...], dtype: str, values: Any
) -> StoredTensor:
    """Describe a tensor of the source, of which only short ones still have values."""

    def read(dequantized: np.dtype[Any]) -> np.ndarray:
        if values is None:
            raise CheckpointError(
                f"{directory}: has converted parameters, not the tensor {name!r}; use the original "
                "checkpoint for that"
            )
        return np.asarray(values, dequantized).reshape(shape)

    return StoredTensor(name, shape, dtype, 0, read)


def _write_arrays(folder: Path, model: FunctionalModel, weights: Weights) -> None:
    arrays: dict[str, jax.Array] = {}
    for spec, weight in zip(model.parameters, weights, strict=True):
        arrays.update(named_leaves(spec.path, weight))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    with ocp.Checkpointer(array_handler()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(arrays, save_args=save_args))
