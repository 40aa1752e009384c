"""Open and read checkpoint files. `jaxinfer.loading.assign` turns their tensors into weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxinfer.loading.checkpoint import (
    ARRAYS_FOLDER,
    MANIFEST_FILE,
    Checkpoint,
    CheckpointError,
    GenerationDefaults,
    StoredTensor,
)
from jaxinfer.loading.gguf import open_gguf, shard_paths
from jaxinfer.loading.hub import download, is_hub_id
from jaxinfer.loading.huggingface import CONFIG_FILE, PICKLE_SUFFIXES, open_huggingface

__all__ = ["Checkpoint", "CheckpointError", "GenerationDefaults", "StoredTensor", "open_checkpoint"]

DEMO = "demo"


def open_checkpoint(source: str | Path, *, needs_weights: bool = True) -> Checkpoint:
    """Open a checkpoint: its headers are read and checked, its tensors stay on disk.

    `source` is a `.gguf` file (any shard of a split one), a Hugging Face directory, a directory
    that `jaxinfer convert` wrote, a directory that holds one GGUF model and no safetensors,
    "demo" (the demo model, downloaded if it is not in the cache), or a hub id "organisation/name"
    if no such path exists. Without `needs_weights` (for random weights) it may also be a directory
    that has only a `config.json`, or such a `.json` file. Raises `CheckpointError` otherwise.
    """
    if source == DEMO:
        # Imported here, so that `python -m jaxinfer.loading.demo` runs a module not yet imported.
        from jaxinfer.loading.demo import demo_model_path

        return open_gguf(demo_model_path())
    if not str(source).strip():
        raise CheckpointError(f'the model is {source!r}; pass a path, a hub id or "demo"')
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _open_directory(path, needs_weights)
        if path.is_file():
            return _open_file(path, needs_weights)
        if path.exists():
            raise CheckpointError(f"{path}: neither a file nor a directory")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if isinstance(source, str) and is_hub_id(source):
        opened = open_huggingface(download(source), needs_weights=needs_weights)
        return dataclasses.replace(opened, name=source)
    raise CheckpointError(
        f"{source}: is not a file, a directory or a hub id (organisation/name); "
        'pass a .gguf file, a Hugging Face directory, a hub id or "demo"'
    )


def _open_file(path: Path, needs_weights: bool) -> Checkpoint:
    if path.suffix == ".gguf":
        return open_gguf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: a .safetensors file has no config.json; pass its directory {path.parent}"
        )
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path}: pickled weights can run code when opened and are refused; convert the model "
            "to safetensors (save_pretrained of transformers writes it)"
        )
    if path.suffix == ".json":
        if needs_weights:
            raise CheckpointError(
                f"{path}: is a configuration without weights; pass the directory of the model, or "
                "run it with random weights (--set load_format=random)"
            )
        opened = open_huggingface(path.parent, config_file=path.name, needs_weights=False)
        return opened if path.name == CONFIG_FILE else dataclasses.replace(opened, name=path.stem)
    raise CheckpointError(f"{path}: not a .gguf file; pass one, or a Hugging Face directory")


def _open_directory(path: Path, needs_weights: bool) -> Checkpoint:
    if (path / MANIFEST_FILE).exists() or (path / ARRAYS_FOLDER).is_dir():
        # Imported here: jax and Orbax take a second to import, and other formats do not need them.
        from jaxinfer.loading.orbax import open_converted

        return open_converted(path)
    files = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
    if not files or any(path.glob("*.safetensors")):
        # Its errors say which files a directory needs.
        return open_huggingface(path, needs_weights=needs_weights)
    shards = shard_paths(files[0])
    if any(file not in shards for file in files):
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: has several GGUF models ({names}); pass the file of one")
    return open_gguf(files[0])
