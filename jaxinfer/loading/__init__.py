"""Checkpoint files: open, describe, read. What tensors mean is for `jaxinfer.loading.assign`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxinfer.loading.checkpoint import (
    Checkpoint,
    CheckpointError,
    GenerationDefaults,
    StoredTensor,
)
from jaxinfer.loading.gguf import open_gguf, shard_paths
from jaxinfer.loading.hub import download, is_hub_id
from jaxinfer.loading.huggingface import PICKLE_SUFFIXES, open_huggingface

__all__ = ["Checkpoint", "CheckpointError", "GenerationDefaults", "StoredTensor", "open_checkpoint"]

DEMO = "demo"


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a checkpoint; headers are read and checked, tensors stay on disk until asked for.

    `source` is a `.gguf` file (any shard of a split one), a Hugging Face directory, a directory
    that holds one GGUF model and no safetensors, "demo" (the demo model, fetched if it is not in
    the cache), or a hub id "organisation/name" where no such path exists. `CheckpointError`
    otherwise.
    """
    if source == DEMO:
        # Imported here, so that `python -m jaxinfer.loading.demo` does not find itself imported.
        from jaxinfer.loading.demo import demo_model_path

        return open_gguf(demo_model_path())
    if not str(source).strip():
        raise CheckpointError(f'the model is {source!r}; pass a path, a hub id or "demo"')
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.is_file():
            return _open_file(path)
        if path.exists():
            raise CheckpointError(f"{path}: neither a file nor a directory")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if isinstance(source, str) and is_hub_id(source):
        return dataclasses.replace(open_huggingface(download(source)), name=source)
    raise CheckpointError(
        f"{source}: there is no such file or directory, and it is no hub id (organisation/name); "
        'pass a .gguf file, a Hugging Face directory, a hub id or "demo"'
    )


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return open_gguf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: a single .safetensors file has no config.json; pass the directory "
            f"{path.parent}"
        )
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path}: pickled weights can run code when opened and are refused; convert the model "
            "to safetensors (save_pretrained of transformers writes it)"
        )
    raise CheckpointError(f"{path}: not a .gguf file; pass one, or a Hugging Face directory")


def _open_directory(path: Path) -> Checkpoint:
    files = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
    if not files or any(path.glob("*.safetensors")):
        return open_huggingface(path)  # whose error says what a directory needs
    others = [file.name for file in files if file not in shard_paths(files[0])]
    if others:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: holds several GGUF models ({names}); pass the file of one")
    return open_gguf(files[0])
