"""Run by tests/parallel/test_sharded_loading.py in a process with eight devices: prints JSON.

What each device holds is compared with a part of the one-device weights that is cut out here, from
the layout and the device's place in the mesh, apart from the code that places weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

import tensorstore  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from jaxinfer.build import load_model  # noqa: E402
from jaxinfer.config import from_mapping  # noqa: E402
from jaxinfer.kernels.quantized_matmul.quant_array import QuantArray, unpack  # noqa: E402
from jaxinfer.loading import Checkpoint, open_checkpoint  # noqa: E402
from jaxinfer.loading.assign import functional_model, load_weights  # noqa: E402
from jaxinfer.loading.checkpoint import GenerationDefaults, StoredTensor  # noqa: E402
from jaxinfer.loading.orbax import write_converted  # noqa: E402
from jaxinfer.loading.placement import Piece, place, read_slices  # noqa: E402
from jaxinfer.loading.quantized.gguf_blocks import read_blocks  # noqa: E402
from jaxinfer.loading.random import random_weights  # noqa: E402
from jaxinfer.loading.safetensors_header import read_safetensors  # noqa: E402
from jaxinfer.loading.splitting import place_weights  # noqa: E402
from jaxinfer.loading.targets import HeadRepeats, LoadTarget  # noqa: E402
from jaxinfer.models import HF_FAMILIES  # noqa: E402
from jaxinfer.models.functional import FunctionalModel, ParameterSpec  # noqa: E402
from jaxinfer.nn.layers import FLOAT32, Numerics  # noqa: E402
from jaxinfer.nn.quantized import Quantized, QuantPair, QuantWeight  # noqa: E402
from jaxinfer.parallel.sharded_model import ShardedModel  # noqa: E402
from jaxinfer.sharding.mesh import device_groups  # noqa: E402
from jaxinfer.sharding.rules import Layout  # noqa: E402
from tests.support.family_bench import make_tensors  # noqa: E402
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint, write_safetensors  # noqa: E402

COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 8,
        "n_layer": 2,
        "n_positions": 64,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
    },
}
MESHES = ({"tensor": 8}, {"pipe": 2, "tensor": 4}, {"expert": 4, "tensor": 2})
HOW: dict[str, dict[str, Any]] = {
    "float": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "w8a8": {"quantize": "int8_w8a8"},
    "packed": {"keep_packed": True},
}


def model_of(family: str) -> FunctionalModel:
    config = COMMON | FAMILIES[family]
    row = HF_FAMILIES[config["model_type"]]
    return FunctionalModel(row, row.config_from_hf(config, {}), Numerics())


def sharded(model: FunctionalModel, sizes: Mapping[str, int]) -> ShardedModel:
    return ShardedModel(model, Layout.of(sizes), device_groups(sizes)[0])


def stored_arrays(model: FunctionalModel) -> dict[str, np.ndarray]:
    """Make tensors with the names and shapes of the family's weight table."""
    table, shapes = model.family.hf_weights(model.config), {}
    for spec in model.parameters:
        names, transform = table.lookup(spec.path, spec.dims)
        is_one = isinstance(names, str)
        shape = transform.stored_shape(spec.dims if is_one else spec.dims[1:])
        shapes |= dict.fromkeys([names] if is_one else names, shape)
    return make_tensors(shapes, seed=0)


def checkpoint_of(
    arrays: Mapping[str, np.ndarray], packed: Callable[[str], str | None] = lambda name: None
) -> Checkpoint:
    """Make a checkpoint in memory; `packed` gives the GGUF type of a matrix, or None."""
    tensors = {}
    for name, values in arrays.items():
        kind = packed(name) if values.ndim == 2 else None
        read: Any = lambda dtype, values=values: values
        read_packed: Any = None
        if kind is not None:
            raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            read_packed = lambda raw=raw, v=values, kind=kind: read_blocks(raw, v.shape, kind)
            read = lambda dtype, packed=read_packed: packed().dequantize(dtype)
        tensors[name] = StoredTensor(name, values.shape, kind or "F32", 0, read, read_packed)
    defaults = GenerationDefaults()
    return Checkpoint(Path("memory"), "safetensors", "tiny", {}, tensors, defaults, lambda: None)  # type: ignore[arg-type,return-value]


def numbers(weight: Any, spec: ParameterSpec) -> np.ndarray:
    """Dequantize a parameter of NumPy arrays, in the axes of `spec.shape`."""
    if isinstance(weight, QuantPair):
        axis = spec.axes.index("half")
        return np.stack([numbers(half, spec) for half in (weight.gate, weight.up)], axis)
    if isinstance(weight, QuantWeight):
        matrix = numbers(weight.weight, spec)
        if weight.order is None:
            return matrix
        assert matrix.shape[-2] == weight.order.shape[-1]  # the inputs are not sharded
        inverse = np.argsort(weight.order, axis=-1)[..., None]
        return np.take_along_axis(matrix, inverse, axis=-2)
    if not isinstance(weight, QuantArray):
        return weight
    weight.check()
    values: Any = unpack(weight.values, weight.pack_rows) if weight.bits == 4 else weight.values
    again = lambda a: np.repeat(a.astype(np.float32), weight.group_size, axis=-2)
    zeros = weight.middle if weight.zeros is None else again(weight.zeros)
    found = (values.astype(np.float32) - zeros) * again(weight.scales)
    return found.swapaxes(-1, -2) if spec.packs == "table" else found


def wrong_parts(model: ShardedModel, weights: Any, whole: Any) -> list[str]:
    """List the parameters of which some device has a wrong shard."""
    given = {s.path: (s, w) for s, w in zip(model.model.parameters, whole, strict=True)}
    wrong = []
    for spec, source, weight in zip(model.parameters, model.sources, weights, strict=True):
        stages = []
        for path in source.paths:
            own, array = given[path]
            values = numbers(jax.tree.map(np.asarray, array), own)
            if source.num_kv_heads is not None:
                axis, K = own.array_axes.index("kv_heads"), model.model.config.num_kv_heads
                heads = np.split(values, K, axis)
                times = source.num_kv_heads // K
                values = np.concatenate([h for h in heads for _ in range(times)], axis)
            stages.append(values)
        expected = np.stack(stages) if source.is_stacked else stages[0]
        for at in np.ndindex(model.mesh.devices.shape):  # type: ignore[union-attr]
            part = own_part(model, weight, at)
            if not np.array_equal(numbers(part, spec), slice_values(model, expected, spec, at)):
                wrong.append(f"{spec.path} at {at}")
    return wrong


def own_part(model: ShardedModel, weight: Any, place: tuple[int, ...]) -> Any:
    """Return the shard of one device as NumPy arrays."""
    device = model.mesh.devices[place]  # type: ignore[union-attr]
    of_device = lambda a: next(s.data for s in a.addressable_shards if s.device == device)
    return jax.tree.map(lambda a: np.asarray(of_device(a)), weight)


def slice_values(
    model: ShardedModel, values: np.ndarray, spec: ParameterSpec, place: tuple[int, ...]
) -> np.ndarray:
    """Return the shard of the device at `place`, which selects a slice along every axis."""
    at = dict(zip(model.mesh.axis_names, place, strict=True))  # type: ignore[union-attr]
    for axis, logical in enumerate(spec.array_axes):
        parts, rank = 1, 0
        for name in model.layout.axes(logical):
            parts, rank = parts * model.layout.size(name), rank * model.layout.size(name) + at[name]
        values = np.split(values, parts, axis)[rank]
    return values


def loaded(family: str) -> dict[str, Any]:
    """List wrong parameters, and count quantized arrays, for each mesh and kind of loading."""
    model = model_of(family)
    arrays = stored_arrays(model)
    checkpoints = {
        "packed": checkpoint_of(arrays, lambda name: "Q4_0"),
        "plain": checkpoint_of(arrays),
    }
    found: dict[str, Any] = {}
    models = {"-".join(sizes): sharded(model, sizes) for sizes in MESHES}
    for how, options in HOW.items():
        checkpoint = checkpoints.get(how, checkpoints["plain"])
        whole = load_weights(checkpoint, model, **options)
        for name, on_mesh in models.items():
            weights = load_weights(checkpoint, on_mesh, **options)
            same = place_weights(on_mesh, whole)
            found[f"{name} {how}"] = {
                "wrong": wrong_parts(on_mesh, weights, whole),
                "placed": wrong_parts(on_mesh, same, whole),
                "quantized": sum(isinstance(w, Quantized) for w in weights),
            }
    return found


def with_act_order() -> dict[str, Any]:
    """Load weights with an activation order; a weight with sharded inputs is dequantized."""
    model, rng = model_of("llama"), np.random.default_rng(0)
    checkpoint = checkpoint_of(stored_arrays(model), lambda name: "Q4_0")
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.is_packable and "embed" not in name:
            rows = tensor.read_packed()
            order = rng.permutation(tensor.shape[1]).astype(np.int32)
            rows = dataclasses.replace(rows, order=order)  # type: ignore[type-var]
            tensor = StoredTensor(
                name, tensor.shape, "GPTQ", 0, rows.dequantize, lambda rows=rows: rows
            )
        tensors[name] = tensor
    checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    on_mesh = sharded(model, MESHES[1])
    weights = load_weights(checkpoint, on_mesh, keep_packed=True)
    whole = load_weights(checkpoint, model, keep_packed=True)
    dense = {
        spec.path
        for spec, weight in zip(on_mesh.parameters, weights, strict=True)
        if spec.packs is not None and not isinstance(weight, Quantized)
    }
    return {"dense": sorted(dense), "wrong": wrong_parts(on_mesh, weights, whole)}


def stages_unlike() -> dict[str, Any]:
    """Load two layers stored in different types; stacked weights are dequantized and logged."""
    model = model_of("llama")
    kind = lambda name: "Q8_0" if ".1.mlp." in name else "Q4_0"
    checkpoint = checkpoint_of(stored_arrays(model), kind)
    on_mesh, lines = sharded(model, MESHES[1]), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("absl").addHandler(handler)
    weights = load_weights(checkpoint, on_mesh, keep_packed=True)
    logging.getLogger("absl").removeHandler(handler)
    dense = {
        spec.path
        for spec, weight in zip(on_mesh.parameters, weights, strict=True)
        if "mlp" in spec.path and not isinstance(weight, Quantized) and "norm" not in spec.path
    }
    whole = load_weights(checkpoint, model)
    return {"dense": sorted(dense), "wrong": wrong_parts(on_mesh, weights, whole), "lines": lines}


def drawn() -> list[str]:
    """List the wrong parameters of random weights."""
    model = model_of("llama")
    on_mesh = sharded(model, MESHES[1])
    wrong = wrong_parts(on_mesh, random_weights(on_mesh, 3), random_weights(model, 3))
    whole = random_weights(model, 3, quantize="int4")
    return wrong + wrong_parts(on_mesh, random_weights(on_mesh, 3, quantize="int4"), whole)


def restored(folder: Path) -> dict[str, Any]:
    """Convert on one device and restore on meshes.

    Returns wrong parameters, and the bytes read relative to those of the weights, for matrices of
    several chunks.
    """
    wide = TinyLlama(hidden_size=64, intermediate_size=32_768, num_heads=8, num_kv_heads=2)
    found: dict[str, Any] = {}
    for how, form, sizes in (
        ("float", wide, MESHES[1]),
        ("int8", dataclasses.replace(wide, intermediate_size=128), MESHES[1]),
        ("int4", dataclasses.replace(wide, intermediate_size=128), MESHES[0]),
    ):
        checkpoint = open_checkpoint(write_checkpoint(form, folder / f"{how} source"))
        model = functional_model(checkpoint, Numerics())
        whole = load_weights(checkpoint, model, **HOW[how])
        write_converted(checkpoint, model, whole, folder / how)
        converted, on_mesh = open_checkpoint(folder / how), sharded(model, sizes)
        before = file_bytes_read()
        weights = load_weights(converted, on_mesh, keep_packed=True)
        found[f"{how} read"] = (file_bytes_read() - before) / model.num_bytes
        found[how] = wrong_parts(on_mesh, weights, whole)
    plain = load_weights(converted, on_mesh)
    found["dequantized"] = wrong_parts(on_mesh, plain, load_weights(converted, model))
    found["quantized"] = sum(isinstance(weight, Quantized) for weight in plain)
    return found


def file_bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(int(value["value"]) for metric in metrics for value in metric["values"])


def resident_of(path: Path) -> int:
    """Return the resident bytes of a file that this process has mapped."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def touched(folder: Path) -> dict[str, float]:
    """Return the resident bytes of a file relative to the bytes that one device needs.

    The device needs rows or columns of a matrix, the second of two stages, or one of two KV heads
    that eight devices share.
    """
    F, D = 8192, 512
    values = np.arange(F * D, dtype=np.float32).reshape(F, D)  # stored outputs first
    quarter, found = (F // 4, F // 2), {}
    for name, wanted, shape, repeats, lines in (
        ("rows", (quarter, (0, D)), (F, D), None, quarter),
        ("columns", ((0, D), quarter), (D, F), None, quarter),
        ("stage", ((1, 2), (0, D), quarter), (2, D, F), None, quarter),
        ("heads", ((0, D), (F * 7 // 2, F * 4)), (D, F * 4), HeadRepeats(-1, 2, 8), (F // 2, F)),
    ):
        path = folder / f"{name}.safetensors"
        write_safetensors(path, {"w": values})
        view = read_safetensors(path)["w"].read()
        assert resident_of(path) < values.nbytes / 100
        read = lambda view=view, name=name: view if name == "rows" else view.T
        pieces = [Piece("w", (1,) if name == "stage" else (), read)]
        if name == "stage":
            pieces.insert(0, Piece("of devices elsewhere", (0,), lambda: 1 / 0))  # type: ignore
        [part] = read_slices(shape, FLOAT32, pieces, [wanted], repeats).values()
        expected = values[slice(*lines)]
        assert np.array_equal(part.reshape(shape[-2], -1) if name != "rows" else part.T, expected.T)
        found[name] = resident_of(path) / part.nbytes
    return found


def items() -> dict[str, bool]:
    """Place a parameter with one tensor per item of its first axis, sharded or replicated."""
    found, mesh = {}, device_groups(MESHES[0])[0]
    spec = ParameterSpec("w", (16, 3), FLOAT32, (16, 3), ("experts", "model"))
    pieces = [Piece(str(i), (i,), lambda i=i: np.full(3, i)) for i in range(16)]
    for name, split in (("cut", PartitionSpec("tensor")), ("whole", PartitionSpec())):
        target = LoadTarget(spec, (spec,), sharding=NamedSharding(mesh, split))
        found[name] = np.asarray(place(target, pieces))[:, 0].tolist() == list(range(16))
    return found


def opened(folder: Path) -> dict[str, Any]:
    """Load a checkpoint from its path: list wrong shards, and the errors of meshes that do not fit.

    The tensors contain NaN in the latter case, so reading them would be another error.
    """
    form = TinyLlama(num_heads=8, num_kv_heads=2)
    source = write_checkpoint(form, folder / "tiny")
    keys = {"cache": {"num_pages": 4, "page_size": 16}, "warm_up": False}

    def load(**mesh: int) -> Any:
        return load_model(source, from_mapping(keys | {"mesh": mesh}), show_progress=False)[0]

    checkpoint = open_checkpoint(source)
    whole = load_weights(checkpoint, functional_model(checkpoint, Numerics()))
    engine = load(pipe=2, tensor=4)
    found: dict[str, Any] = {"wrong": wrong_parts(engine.runner.model, engine.weights, whole)}
    file = source / "model.safetensors"
    size = int.from_bytes(file.read_bytes()[:8], "little") + 8
    file.write_bytes(file.read_bytes()[:size] + b"\xff" * (file.stat().st_size - size))  # NaN
    for mesh in ({"pipe": 8}, {"tensor": 3}, {"pipe": 2, "tensor": 4}):
        try:
            load(**mesh)
        except ValueError as error:
            found["-".join(mesh)] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    result = {"loaded": {name: loaded(name) for name in FAMILIES}, "unlike": stages_unlike()}
    result |= {"act-order": with_act_order(), "drawn": drawn(), "restored": restored(folder)}
    result |= {"touched": touched(folder), "items": items(), "opened": opened(folder)}
    print(json.dumps(result))
