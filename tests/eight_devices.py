"""Run by tests/test_placement.py in a process with eight CPU devices: prints its findings as JSON.

python tests/eight_devices.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny_checkpoints import TinyLlama, write_checkpoint, write_safetensors

from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.orbax import write_converted
from jaxinfer.loading.placement import Piece, place, read_slices
from jaxinfer.loading.quantize import quantize_weights
from jaxinfer.loading.random import random_weights
from jaxinfer.loading.safetensors_header import read_safetensors
from jaxinfer.nn.layers import Numerics

MODEL = TinyLlama(hidden_size=64, intermediate_size=128, num_heads=8, num_kv_heads=8, num_layers=1)
ROWS, COLUMNS = 8192, 1024


def shardings(model: Any, mesh: Any) -> dict[str, NamedSharding]:
    """The last axis that eight devices can share is shared."""
    found = {}
    for spec in model.parameters:
        axes: list[str | None] = [None] * len(spec.shape)
        for axis in reversed(range(len(spec.shape))):
            if spec.shape[axis] % 8 == 0:
                axes[axis] = "all"
                break
        found[spec.path] = NamedSharding(mesh, PartitionSpec(*axes))
    return found


def are_equal(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def cut_arrays(weights: Any) -> int:
    """How many arrays lie in eight different parts."""
    leaves = jax.tree.leaves(weights)
    return sum(len({str(shard.index) for shard in a.addressable_shards}) == 8 for a in leaves)


def resident_of(path: Path) -> int:
    """Bytes of a file that this process has mapped and touched."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def mapped_bytes(folder: Path, *, is_transposed: bool) -> float:
    """Bytes touched for one device's rows of a stored [out, in] tensor, by the bytes needed."""
    values = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    path = folder / "matrix.safetensors"
    write_safetensors(path, {"w": values})
    view = read_safetensors(path)["w"].read()
    assert resident_of(path) < values.nbytes / 100
    shape = (COLUMNS, ROWS) if is_transposed else (ROWS, COLUMNS)
    piece = Piece("w", None, lambda: view.T if is_transposed else view)
    rows = (ROWS // 8, ROWS // 4)
    bounds = ((0, COLUMNS), rows) if is_transposed else (rows, (0, COLUMNS))
    [part] = read_slices(shape, np.dtype(np.float32), [piece], [bounds]).values()
    wanted = values[rows[0] : rows[1]]
    assert np.array_equal(part.T if is_transposed else part, wanted)
    return resident_of(path) / wanted.nbytes


def file_bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(int(value["value"]) for metric in metrics for value in metric["values"])


def findings(folder: Path) -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
    checkpoint = open_checkpoint(write_checkpoint(MODEL, folder / "tiny"))
    model = functional_model(checkpoint, Numerics())
    where = shardings(model, mesh)
    whole = load_weights(checkpoint, model)
    sharded = load_weights(checkpoint, model, shardings=where)
    found: dict[str, Any] = {
        "num_arrays": len(whole),
        "loaded": {"equal": are_equal(whole, sharded), "cut": cut_arrays(sharded)},
        "mapped": mapped_bytes(folder, is_transposed=False),
        "mapped_transposed": mapped_bytes(folder, is_transposed=True),
    }
    packed = load_weights(checkpoint, model, quantize="int4", shardings=where)
    expected = quantize_weights(model, whole, "int4")
    found["packed"] = {"equal": are_equal(expected, packed), "cut": cut_arrays(packed)}
    random = random_weights(model, 0, shardings=where)
    found["random"] = {"equal": are_equal(random_weights(model, 0), random)}
    for name, weights in (
        ("restored", whole),
        ("quantized", quantize_weights(model, whole, "int4", with_embedding=True)),
    ):
        write_converted(checkpoint, model, weights, folder / name)
        converted = open_checkpoint(folder / name)
        restored = load_weights(converted, model, keep_packed=True, shardings=where)
        found[name] = {"equal": are_equal(weights, restored), "cut": cut_arrays(restored)}
    found["bytes_read"] = restored_bytes(folder, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    items = [Piece(str(i), i, lambda i=i: np.full(3, i)) for i in range(16)]
    for name, sharding in (
        ("stacked", NamedSharding(mesh, PartitionSpec("all"))),
        ("r", replicated),
    ):
        placed = place((16, 3), np.dtype(np.float32), items, sharding)
        found[name] = np.asarray(placed)[:, 0].tolist() == list(range(16))
    return found


def restored_bytes(folder: Path, mesh: Any) -> float:
    """File bytes read for a matrix of which each of eight devices has a slice, by its bytes."""
    wide = TinyLlama(
        hidden_size=64, intermediate_size=65_536, num_heads=8, num_kv_heads=8, num_layers=1
    )
    checkpoint = open_checkpoint(write_checkpoint(wide, folder / "wide"))
    model = functional_model(checkpoint, Numerics())
    write_converted(checkpoint, model, load_weights(checkpoint, model), folder / "wide_converted")
    converted = open_checkpoint(folder / "wide_converted")
    before = file_bytes_read()
    load_weights(converted, model, shardings=shardings(model, mesh))
    return (file_bytes_read() - before) / model.num_bytes


if __name__ == "__main__":
    print(json.dumps(findings(Path(sys.argv[1]))))
