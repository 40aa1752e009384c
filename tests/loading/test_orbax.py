"""Converted checkpoints: they restore the same model without their source, or raise an error."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.quantized_matmul import QuantArray, quantize
from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.checkpoint import Checkpoint
from jaxinfer.loading.load_report import LoadReport
from jaxinfer.loading.orbax import write_converted
from jaxinfer.loading.quantize import RECIPES
from jaxinfer.loading.restoring import dequantize_parameter
from jaxinfer.models.functional import Weights
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.quantized import QuantWeight
from jaxinfer.parallel.sharded_model import ShardedModel
from jaxinfer.sharding.mesh import device_groups
from jaxinfer.sharding.rules import Layout
from tests.support import running
from tests.support.family_bench import make_tensors, recorded, write_gguf, write_huggingface
from tests.support.family_groups import GROUPS
from tests.support.gguf_files import BYTE_TOKENS, add_byte_vocabulary, finish, new_writer
from tests.support.quantized_bench import quantize_weights
from tests.support.quantized_checkpoints import write_quantized
from tests.support.tiny_checkpoints import write_checkpoint, write_safetensors

# After a failed read, Orbax leaves other reads running, whose event loop is then closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TEXT = "the theory of an hour\n  of other things: naïve 🙂"


def numerics(dtype: str) -> Numerics:
    return Numerics(np.dtype(jnp.dtype(dtype)))


def convert(source: Path, output: Path, dtype: str = "float32") -> tuple[Checkpoint, Any]:
    checkpoint = open_checkpoint(source)
    model = functional_model(checkpoint, numerics(dtype))
    weights = load_weights(checkpoint, model)
    write_converted(checkpoint, model, weights, output)
    return checkpoint, weights


def restore(directory: Path, dtype: str = "float32") -> tuple[Checkpoint, Any]:
    checkpoint = open_checkpoint(directory)
    return checkpoint, load_weights(checkpoint, functional_model(checkpoint, numerics(dtype)))


def write_small_gguf(path: Path) -> Path:
    """Write shard 1 of 1 of a model of one block, with RoPE's factors as a tensor."""
    writer = new_writer(path)
    add_byte_vocabulary(writer)
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    rows = {"attn_q": 16, "attn_k": 8, "attn_v": 8, "attn_output": 16, "ffn_gate": 24, "ffn_up": 24}
    shapes = {f"blk.0.{name}.weight": (n, 16) for name, n in rows.items()}
    shapes |= {"token_embd.weight": (len(BYTE_TOKENS), 16), "blk.0.ffn_down.weight": (16, 24)}
    shapes |= {f"blk.0.{name}_norm.weight": (16,) for name in ("attn", "ffn")}
    shapes |= {"output_norm.weight": (16,)}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape, np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1, 1.3, 2.7, 8], np.float32))
    finish(writer)
    return path


def assert_equal(one: Weights, other: Weights) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """Convert a Hugging Face checkpoint and delete its source."""
    folder = tmp_path_factory.mktemp("converted")
    convert(write_checkpoint("sharded", folder / "source"), folder / "output")
    shutil.rmtree(folder / "source")
    return folder / "output"


@pytest.fixture
def copy(converted, tmp_path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "copy"))


@pytest.mark.parametrize("variant", ["rope_llama3_new", "all_biases_tied_mqa"])
def test_converted_hugging_face_model_restores_weights_tokenizer_and_config(variant, tmp_path):
    source = write_checkpoint(variant, tmp_path / "source")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / ".cache").mkdir()
    (source / ".cache" / "huge.json").write_text("{}")
    before, weights = convert(source, tmp_path / "output")
    tokens, config = before.tokenizer().encode(TEXT), functional_model(before, Numerics()).config
    shutil.move(source, tmp_path / "gone")
    after, restored = restore(tmp_path / "output")
    assert_equal(weights, restored)
    assert functional_model(after, Numerics()).config == config
    assert (after.name, after.format, after.generation) == (
        "source",
        "safetensors",
        before.generation,
    )
    assert after.tokenizer().encode(TEXT) == tokens
    assert after.tokenizer().has_chat_template
    files = {str(p.relative_to(tmp_path / "output")) for p in (tmp_path / "output").rglob("*.json")}
    assert "1_Pooling/config.json" in files and ".cache/huge.json" not in files
    assert not list((tmp_path / "output").glob("*.safetensors*"))


def test_converted_gguf_model_restores_weights_tokenizer_and_config(tmp_path):
    source = write_small_gguf(tmp_path / "model-00001-of-00001.gguf")
    before, weights = convert(source, tmp_path / "output")
    model = functional_model(before, Numerics())
    ids = before.tokenizer().encode("hey hey")
    source.unlink()
    after, restored = restore(tmp_path / "output")
    assert_equal(weights, restored)
    assert functional_model(after, Numerics()).config == model.config  # reads rope_freqs.weight
    assert after.format == "gguf"
    assert after.metadata == {k: v for k, v in before.metadata.items() if "split." not in k}
    assert after.tokenizer().encode("hey hey") == ids
    # Convert again, from the converted checkpoint.
    convert(tmp_path / "output", tmp_path / "second")
    assert_equal(weights, restore(tmp_path / "second")[1])


@pytest.mark.parametrize("kind", RECIPES)
def test_quantized_parameters_restore_quantized(kind, tmp_path):
    checkpoint = open_checkpoint(write_checkpoint("mha", tmp_path / "source"))
    model = functional_model(checkpoint, numerics("bfloat16"))
    weights = quantize_weights(model, load_weights(checkpoint, model), kind)
    write_converted(checkpoint, model, weights, tmp_path / "output", quantization=kind)
    converted = open_checkpoint(tmp_path / "output")
    cases: tuple[Any, ...] = ({"keep_packed": True}, {"quantize": kind})
    for options in cases:
        assert_equal(weights, load_weights(converted, model, **options))
    with pytest.raises(CheckpointError, match="--quantize="):
        load_weights(converted, model, quantize="int4" if kind == "int8" else "int8")
    assert json.loads((tmp_path / "output" / "jaxinfer.json").read_text())["quantization"] == kind


@pytest.mark.parametrize("kind", ["int8", "int4", "int8_w8a8"])
def test_quantized_parameters_restore_dequantized_by_default(kind, tmp_path):
    checkpoint = open_checkpoint(write_checkpoint("tied", tmp_path / "source"))
    model = functional_model(checkpoint, Numerics())
    weights: Any = load_weights(checkpoint, model)
    quantized = quantize_weights(model, weights, kind, with_embedding=True)
    write_converted(checkpoint, model, quantized, tmp_path / "output", quantization=kind)
    _, restored = restore(tmp_path / "output")
    for spec, weight, array in zip(model.parameters, weights, restored, strict=True):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
        largest = np.abs(weight).max()
        assert np.abs(np.asarray(array) - np.asarray(weight)).max() < largest * 0.15


@pytest.mark.parametrize("name", ["awq", "gptq act-order", "w8a8 float8 static"])
def test_converted_quantized_checkpoint_restores_packed_or_dequantized(name, tmp_path):
    checkpoint = open_checkpoint(write_quantized(name, tmp_path)[0])
    model = functional_model(checkpoint, Numerics())
    packed = load_weights(checkpoint, model, keep_packed=True)
    write_converted(checkpoint, model, packed, tmp_path / "output")
    converted = open_checkpoint(tmp_path / "output")
    assert_equal(packed, load_weights(converted, model, keep_packed=True))
    assert_equal(load_weights(checkpoint, model), load_weights(converted, model))


@pytest.mark.parametrize("group", GROUPS)
def test_converted_model_of_every_family_group_restores(group, tmp_path):
    name, case = next((name, case) for name, case in GROUPS[group].items() if case.gguf)
    tensors = make_tensors(recorded(group)[name]["shapes"], case.seed, case.norm_mean)
    sources = [
        write_huggingface(case, tensors, tmp_path / "source"),
        write_gguf(case, tensors, tmp_path / "source.gguf"),
    ]
    for number, source in enumerate(sources):
        before, weights = convert(source, tmp_path / f"output{number}")
        after, restored = restore(tmp_path / f"output{number}")
        assert_equal(weights, restored)
        models = [functional_model(checkpoint, Numerics()) for checkpoint in (before, after)]
        assert models[0].config == models[1].config


def test_dequantize_restores_the_order_of_act_order_rows():
    matrix = np.random.default_rng(0).standard_normal((2, 32, 8)).astype(np.float32)
    order = np.stack([np.random.default_rng(i).permutation(32) for i in range(2)])
    rows = np.take_along_axis(matrix, order[..., None], axis=1)
    weight = QuantWeight(quantize(rows, 8, 32), jnp.asarray(order, jnp.int32))
    spec: Any = SimpleNamespace(dtype=jnp.float32, packs="matrix")
    np.testing.assert_allclose(dequantize_parameter(weight, spec), matrix, atol=0.02)


def test_unquantized_parameters_restore_in_the_requested_dtype(converted):
    _, stored = restore(converted)
    _, cast = restore(converted, "bfloat16")
    for a, b in zip(stored, cast, strict=True):
        assert b.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a.astype(jnp.bfloat16)), np.asarray(b))


def test_dtype_too_narrow_for_stored_values_is_refused(tmp_path):
    source = write_checkpoint("mqa", tmp_path / "source")
    tensors = dict(open_checkpoint(source).tensors)
    values = {name: tensor.read().copy() for name, tensor in tensors.items()}
    values["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    write_safetensors(source / "model.safetensors", values)
    convert(source, tmp_path / "output", "bfloat16")
    restore(tmp_path / "output", "float32")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.down\.weight.*as float16.*narrow"):
        restore(tmp_path / "output", "float16")


def test_non_finite_scales_are_refused_on_restore(tmp_path):
    checkpoint = open_checkpoint(write_checkpoint("mqa", tmp_path / "source"))
    model = functional_model(checkpoint, Numerics())
    weights = list(quantize_weights(model, load_weights(checkpoint, model), "int8"))
    i = next(i for i, weight in enumerate(weights) if isinstance(weight, QuantArray))
    bad: Any = weights[i]
    weights[i] = dataclasses.replace(bad, scales=bad.scales.at[0, 1].set(np.nan))
    write_converted(checkpoint, model, tuple(weights), tmp_path / "output", quantization="int8")
    converted = open_checkpoint(tmp_path / "output")
    with pytest.raises(CheckpointError, match="holds values that are NaN or infinite as float32"):
        load_weights(converted, model, keep_packed=True)
    on_mesh = ShardedModel(model, Layout.of({}), device_groups({})[0])
    with pytest.raises(CheckpointError, match=r"output: blocks\.\S* holds 32 values that are NaN"):
        load_weights(converted, on_mesh)


def test_restore_logs_a_weights_summary(converted, monkeypatch):
    lines: list[str] = []
    keep = lambda report, model, weights: lines.append(report.summary(model, weights))
    monkeypatch.setattr(LoadReport, "log", keep)
    restore(converted)
    assert len(lines) == 1 and lines[0].startswith("weights: ")


def test_float16_scales_restore_as_float32_on_a_tpu(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_checkpoint("mqa", tmp_path / "source"))
    model = functional_model(checkpoint, Numerics())
    weights = quantize_weights(model, load_weights(checkpoint, model), "int4")
    write_converted(checkpoint, model, weights, tmp_path / "output", quantization="int4")
    monkeypatch.setattr("jaxinfer.loading.splitting.platform", lambda: "tpu")
    restored = load_weights(open_checkpoint(tmp_path / "output"), model, keep_packed=True)
    for before, after in zip(weights, restored, strict=True):
        if isinstance(before, QuantArray) and isinstance(after, QuantArray):
            assert before.scales.dtype == "float16" and after.scales.dtype == "float32"
            np.testing.assert_array_equal(np.asarray(before.scales), np.asarray(after.scales))


def test_converted_checkpoint_gives_the_same_logits(converted, tmp_path):
    model, weights = running.load(write_checkpoint("sharded", tmp_path))
    restored = restore(converted)[1]
    tokens = list(range(4, 20))
    np.testing.assert_array_equal(
        running.all_logits(model, weights, tokens), running.all_logits(model, restored, tokens)
    )


def test_restore_progress_sums_to_the_bytes(converted):
    checkpoint = open_checkpoint(converted)
    model = functional_model(checkpoint, Numerics())
    seen: list[int] = []
    load_weights(checkpoint, model, on_progress=seen.append)
    assert sum(seen) == model.num_bytes


# Errors say what is wrong, with a remedy.


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        restore(directory)
    assert "jaxinfer convert" in str(caught.value)
    return str(caught.value)


def edit(directory: Path, **changes: object) -> None:
    path = directory / "jaxinfer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_manifest_is_refused_by_name(copy):
    (copy / "jaxinfer.json").unlink()
    assert "but no jaxinfer.json" in refused(copy)


def test_missing_arrays_folder_is_refused_by_name(copy):
    shutil.rmtree(copy / "arrays")
    assert "has no arrays folder" in refused(copy)


def test_other_format_version_is_refused(copy):
    edit(copy, format_version=99)
    assert "format version 99" in refused(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("tensors", "parameters", "values") for value in (5, None)),
        ("tensors", {"a": 5}),
        ("parameters", {"a": 5}),
    ],
)
def test_damaged_manifest_is_refused(key, value, copy):
    edit(copy, **{key: value})
    with pytest.raises(CheckpointError):
        restore(copy)


def test_all_mismatched_parameters_are_named_in_one_error(copy):
    parameters = json.loads((copy / "jaxinfer.json").read_text())["parameters"]
    del parameters["norm.weight"]
    parameters["embed.weight"]["shape"] = [1, 2]
    parameters["extra"] = {"shape": [1], "dtype": "float32"}
    edit(copy, parameters=parameters)
    error_text = refused(copy)
    for message in (
        "extra belongs to no",
        "embed.weight has shape [1, 2]",
        "norm.weight is missing",
    ):
        assert message in error_text


@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_damaged_arrays_are_refused(damage, copy):
    for path in (copy / "arrays").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            if damage == "deleted":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "cannot be restored" in refused(copy)


def test_existing_output_is_kept_without_overwrite(copy, tmp_path):
    checkpoint = open_checkpoint(write_checkpoint("mqa", tmp_path / "source"))
    model = functional_model(checkpoint, Numerics())
    weights: Any = load_weights(checkpoint, model)
    with pytest.raises(CheckpointError, match="pass --overwrite"):
        write_converted(checkpoint, model, weights, copy)
    assert open_checkpoint(copy).name == "source"
    assert not np.array_equal(restore(copy)[1][-1], weights[-1])
    write_converted(checkpoint, model, weights, copy, overwrite=True)
    assert_equal(weights, restore(copy)[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "source"]


def test_interrupted_write_leaves_no_output(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_checkpoint("mqa", tmp_path / "source"))
    model = functional_model(checkpoint, Numerics())

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxinfer.loading.orbax._manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_converted(checkpoint, model, load_weights(checkpoint, model), tmp_path / "output")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_converted_checkpoint_refuses_to_quantize_on_load(converted):
    checkpoint = open_checkpoint(converted)
    model = functional_model(checkpoint, Numerics())
    with pytest.raises(CheckpointError, match="--quantize=int8"):
        load_weights(checkpoint, model, quantize="int8")
