"""Converted checkpoints: parameters as the models hold them, in arrays that Orbax keeps.

    jaxinfer.json   the manifest: format version, family, number type, every parameter's shape, and
                    of the tensors it came from the names, shapes and types
    arrays/         the parameters, an Orbax checkpoint (OCDBT, Zarr 3, not compressed: the numbers
                    of a model hardly shrink, and restoring them took twice as long)
    header.gguf     of a GGUF file the key-values, with its tokenizer; or, of a Hugging Face
    config.json ... directory all its files but the weights

The model is built as it would be from the file it came from: the same functions read the same
metadata. A quantized parameter is a tree of arrays, whose other fields the manifest keeps.
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
from jaxinfer.loading.output import check_output, put_in_place
from jaxinfer.loading.restoring import handler, named_leaves, restore
from jaxinfer.models.functional import FunctionalModel, Weights

FORMAT_VERSION = 1
HEADER_FILE = "header.gguf"
# A device reads whole chunks. Small ones are cut to fit any sharding; a matrix of a 1B model has 8.
CHUNK_BYTES = 4 * 2**20
# A tensor that no parameter holds but the configuration is read from, as RoPE's factors, is short.
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
    """Write a converted checkpoint into the folder `output`, which appears whole or not at all.

    `CheckpointError` if `check_output` refuses it, or it cannot be written.
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
            put_in_place(folder, output, Path(temporary) / "old")
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written ({error})") from error


def open_converted(directory: Path) -> Checkpoint:
    """Open what `write_converted` wrote. `CheckpointError` for another version or a damaged one."""
    if not (directory / MANIFEST_FILE).exists():
        raise CheckpointError(
            f"{directory}: holds converted arrays without their {MANIFEST_FILE}; {CONVERT_AGAIN}"
        )
    manifest = read_json_object(directory / MANIFEST_FILE)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory}: is of format version {version!r}; this build reads {FORMAT_VERSION}: "
            f"{CONVERT_AGAIN}"
        )
    if not (directory / ARRAYS_FOLDER).is_dir():
        raise CheckpointError(f"{directory}: holds no {ARRAYS_FOLDER} folder; {CONVERT_AGAIN}")
    is_gguf = manifest.get("source_format") == "gguf"
    described = (
        open_gguf(directory / HEADER_FILE)
        if is_gguf
        else open_huggingface(directory, needs_weights=False)
    )
    try:
        values = manifest["values"]
        tensors = {
            name: _without_data(directory, name, tuple(shape), dtype, values.get(name))
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
    """Everything of the source that describes the model: small files, or the GGUF key-values."""
    source = checkpoint.path
    if checkpoint.format == "gguf":
        header = source if checkpoint.restore is None else source / HEADER_FILE
        copy_key_values(header, folder / HEADER_FILE)
        return
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_hidden = any(part.startswith(".") for part in name.parts)
        is_ours = name.parts[0] in (ARRAYS_FOLDER, MANIFEST_FILE)
        if is_hidden or is_ours or name.name.endswith(INDEX_SUFFIX):
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
    """Those of the short tensors that belong to no parameter: configurations are read from them."""
    family = model.family
    table_of: Any = family.gguf_weights if checkpoint.format == "gguf" else family.hf_weights
    table = table_of(model.config)
    return {
        name: tensor.read().astype(np.float64).tolist()
        for name, tensor in checkpoint.tensors.items()
        if table.is_ignored(table.known_name(name))
        and len(tensor.shape) == 1
        and tensor.shape[0] <= MAX_VALUE_ELEMENTS
    }


def _without_data(
    directory: Path, name: str, shape: tuple[int, ...], dtype: str, values: Any
) -> StoredTensor:
    """What is left of a tensor that was converted."""

    def read(dequantized: np.dtype[Any]) -> np.ndarray:
        if values is None:
            raise CheckpointError(
                f"{directory}: holds parameters, not the tensor {name!r} they were made from; use "
                "the original checkpoint for that"
            )
        return np.asarray(values, dequantized).reshape(shape)

    return StoredTensor(name, shape, dtype, 0, read)


def _write_arrays(folder: Path, model: FunctionalModel, weights: Weights) -> None:
    arrays: dict[str, jax.Array] = {}
    for spec, weight in zip(model.parameters, weights, strict=True):
        arrays.update(named_leaves(spec.path, weight))
    cut = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    with ocp.Checkpointer(handler()) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(arrays, save_args=cut))
