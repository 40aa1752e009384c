"""Mixtures of experts, read from their files and run by the engine."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import save_file

from jaxinfer import SamplingParams
from jaxinfer.kernels.quantized_matmul import QuantArray, dequantize
from jaxinfer.loading import CheckpointError, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.mxfp4 import read_mxfp4
from jaxinfer.nn.layers import FLOAT32, Numerics
from tests.support import running
from tests.support.families_moe import CASES
from tests.support.family_bench import make_tensors, recorded, write_gguf, write_huggingface

PROMPTS = [[5, 9, 12, 33, 7], [40, 3, 3, 8, 90, 21, 60, 4, 11, 25], [77] * 17]


def tensors_of(name: str):
    return make_tensors(recorded("moe")[name]["shapes"], CASES[name].seed)


def logprobs(engine, prompts) -> list:
    params = SamplingParams(temperature=0, logprobs=3, max_tokens=6, ignore_eos=True)
    requests = [engine.add(prompt, params)[0] for prompt in prompts]
    running.run(engine)
    return [request.logprobs.output for request in requests]


@pytest.mark.parametrize(("name", "min_bucket"), [("qwen2_moe", 1), ("gpt_oss", 32)])
def test_batch_invariant_mode_is_equal_bit_for_bit(name, min_bucket, tmp_path):
    """An expert computes several tokens in a tile; a token's bits do not depend on the others."""
    folder = write_huggingface(CASES[name], tensors_of(name), tmp_path)
    model, weights = running.load(folder, Numerics(batch_invariant=True))
    options = {"batch_invariant": True, "min_bucket": min_bucket, "cache": {"prefix_cache": False}}
    engine = running.engine(model, weights, options)
    alone = [row for prompt in PROMPTS for row in logprobs(engine, [prompt])]
    assert logprobs(engine, PROMPTS) == alone
    assert logprobs(engine, PROMPTS[::-1]) == alone[::-1]


def block_quantized(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Return an experts' matrix [E, in, out] of gpt-oss as its published file stores it.

    The blocks are random, with the values as a seed.
    """
    E, num_inputs, outputs = map(int, values.shape)
    rng = np.random.default_rng(int(abs(values.sum()) * 1e3))
    blocks = rng.integers(0, 256, (E, outputs, num_inputs // 32, 16), np.uint8)
    scales = rng.integers(121, 125, (E, outputs, num_inputs // 32)).astype(np.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """Write the same gpt-oss to two folders: with experts in MXFP4, and dequantized."""
    case, tensors = CASES["gpt_oss"], tensors_of("gpt_oss")
    case = dataclasses.replace(case, config=dict(case.config) | {"intermediate_size": 64})
    packed, plain = {}, {}
    for name, values in tensors.items():
        values = np.resize(values, [{48: 64, 96: 128}.get(int(n), int(n)) for n in values.shape])
        if name.endswith(("gate_up_proj", "down_proj")):
            stored = block_quantized(name, values)
            packed |= stored
            read = read_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            values = read.dequantize(FLOAT32)
        else:
            packed[name] = values
        plain[name] = np.ascontiguousarray(values)
    root = tmp_path_factory.mktemp("mxfp4")
    write_huggingface(case, plain, root / "plain")
    write_huggingface(case, {}, root / "packed")
    save_file(packed, root / "packed" / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = case.config_json | {"quantization_config": method}
    (root / "packed" / "config.json").write_text(json.dumps(config), "utf-8")
    return root


def test_mxfp4_gpt_oss_equals_its_dequantized_model(mxfp4):
    """The weights stay packed on the device; gate and up are interleaved columns in the file."""
    model, weights = running.load(mxfp4 / "plain")
    checkpoint = open_checkpoint(mxfp4 / "packed")
    dequantized = load_weights(checkpoint, model)
    for spec, expected, found in zip(model.parameters, weights, dequantized, strict=True):
        np.testing.assert_array_equal(found, expected, spec.path)
    packed = load_weights(checkpoint, functional_model(checkpoint, Numerics()), keep_packed=True)
    experts = [w for w in packed if isinstance(w, QuantArray)]
    assert len(experts) == 3 * model.config.num_layers
    for expected, found in zip(weights, packed, strict=True):
        if isinstance(found, QuantArray):
            np.testing.assert_array_equal(dequantize(found), expected)
    found, expected = (running.all_logits(model, w, PROMPTS[1]) for w in (packed, weights))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parity
def test_mxfp4_values_equal_transformers():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    reference = pytest.importorskip(
        "transformers.integrations.mxfp4", reason="transformers is not installed"
    )
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(100, 140, (2, 6, 3)).astype(np.uint8)
    expected = reference.convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    found = read_mxfp4(blocks, scales).dequantize(FLOAT32)
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.fixture
def stored_otherwise(monkeypatch):
    """Make the GGUF writer store stacked experts in another way."""
    write = gguf.GGUFWriter.add_tensor

    def install(change) -> None:
        def add_tensor(writer, name, values):
            for stored in change(name, values) if "_exps.weight" in name else [(name, values)]:
                write(writer, *stored)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)

    return install


def test_mxfp4_gguf_file_equals_the_dequantized_model(mxfp4, tmp_path, stored_otherwise):
    """As in the published files, experts have GGUF's type 39 and other tensors are float32."""
    model, weights = running.load(mxfp4 / "plain")
    kind = GGMLQuantizationType.MXFP4
    # Name, bytes, shape (as the bytes have it), type.
    stored_otherwise(lambda name, values: [(name, quants.quantize(values, kind), None, kind)])
    form = CASES["gpt_oss"].gguf
    assert form is not None
    wide = {"feed_forward_length": 64, "expert_feed_forward_length": 64}
    form = dataclasses.replace(form, metadata=dict(form.metadata) | wide)
    case = dataclasses.replace(CASES["gpt_oss"], gguf=form)
    plain = open_checkpoint(mxfp4 / "plain").tensors.items()
    tensors = {name: np.array(tensor.read()) for name, tensor in plain}
    checkpoint = open_checkpoint(write_gguf(case, tensors, tmp_path / "model.gguf"))
    assert sum(tensor.dtype == "MXFP4" for tensor in checkpoint.tensors.values()) == 6
    for keep_packed in (False, True):
        read = load_weights(checkpoint, model, keep_packed=keep_packed)
        assert sum(isinstance(found, QuantArray) for found in read) == 6 * keep_packed
        for expected, found in zip(weights, read, strict=True):
            found = dequantize(found) if isinstance(found, QuantArray) else found
            np.testing.assert_array_equal(found, expected)


def test_older_gguf_file_with_a_tensor_per_expert_is_read(tmp_path, stored_otherwise):
    folder = write_huggingface(CASES["mixtral"], tensors_of("mixtral"), tmp_path / "folder")
    _, weights = running.load(folder)
    stored_otherwise(
        lambda name, values: [
            (name.replace("_exps", f".{expert}"), np.ascontiguousarray(matrix))
            for expert, matrix in enumerate(values)
        ]
    )
    path = write_gguf(CASES["mixtral"], tensors_of("mixtral"), tmp_path / "model.gguf")
    assert "blk.1.ffn_down.5.weight" in open_checkpoint(path).tensors
    for expected, found in zip(weights, running.load(path)[1], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_missing_expert_is_named(tmp_path):
    tensors = tensors_of("qwen3_moe")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    folder = write_huggingface(CASES["qwen3_moe"], tensors, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.4\.up_proj\.weight is mis"
    ):
        running.load(folder)
