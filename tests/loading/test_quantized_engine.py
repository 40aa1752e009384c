"""Engines with quantized weights: tokens, batch invariance, memory, and the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from jaxinfer import LLM, ConfigError, SamplingParams
from jaxinfer.config import from_mapping
from jaxinfer.loading import Checkpoint, open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.loading.load_report import LoadReport
from jaxinfer.loading.quantize import get_recipe
from jaxinfer.models.functional import Weights
from jaxinfer.nn.layers import Numerics
from jaxinfer.nn.quantized import Quantized
from tests.support import running
from tests.support.quantized_bench import IDS, relative, tiny_model, tiny_weights
from tests.support.quantized_checkpoints import TINY, write_quantized

ONE_PROGRAM = {"min_bucket": 32}  # the most tokens of a step


@pytest.mark.parametrize("name", ["awq", "gptq act-order"])
def test_packed_and_dequantized_weights_generate_the_same_tokens(name):
    packed, _, plain = tiny_weights(name)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = []
    for weights in (packed, plain):
        engine = running.engine(tiny_model(), weights, ONE_PROGRAM)
        assert engine.runner.memory.weight_bytes == sum(w.nbytes for w in weights)
        requests = [engine.add(IDS[start : start + 20], params)[0] for start in (0, 7, 20)]
        running.run(engine)
        tokens.append(running.tokens_of(requests))
    assert tokens[0] == tokens[1]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["awq", "w8a8 int8"])
def test_batch_invariant_quantized_engine_gives_equal_bits(name):
    packed: Weights = tiny_weights(name)[0]
    model = tiny_model(Numerics(batch_invariant=True))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    engine = running.engine(model, packed, {"batch_invariant": True, **ONE_PROGRAM})
    found = []
    for prompts in ([IDS[:20]], [IDS[:20], IDS[5:44], IDS[3:8]]):
        requests = [engine.add(prompt, params)[0] for prompt in prompts]
        running.run(engine)
        found.append((requests[0].output_token_ids, requests[0].logprobs))
    assert found[0] == found[1]


def test_quantization_options_are_honoured_or_refused(tmp_path):
    quantized, plain = write_quantized("awq", tmp_path)
    small = {"max_model_len": 32, "warm_up": False, "cache": {"page_size": 8, "num_pages": 8}}

    def num_quantized(folder: Path, **options: Any) -> int:
        llm = LLM(str(folder), from_mapping(small | options), show_progress=False)
        weights = llm.engine.weights
        return sum(isinstance(w, Quantized) for w in weights)

    assert num_quantized(quantized, weights="packed") == 6 * TINY.num_layers
    assert num_quantized(quantized) == 0  # "auto" on a CPU
    assert num_quantized(plain, quantize="int8") == 6 * TINY.num_layers + 1  # and the head
    with pytest.raises(ConfigError, match="weights is 'packed', but no weight is quantized"):
        num_quantized(plain, weights="packed")
    packed, _, dense = tiny_weights("awq")
    with pytest.raises(ConfigError, match="weights is 'dequantized', but some"):
        running.engine(tiny_model(), packed, {"weights": "dequantized"})
    with pytest.raises(ConfigError, match="quantize is 'int4', but no weight"):
        running.engine(tiny_model(), dense, {"quantize": "int4"})
    with pytest.raises(ConfigError, match="quantize is 'int3'; it must be one of"):
        get_recipe("int3")


def requantized(checkpoint: Checkpoint, kind: str, path: Path) -> Checkpoint:
    """Write the demo model with its matrices in another GGUF type."""
    writer = GGUFWriter(path, "llama")
    for key, value in checkpoint.metadata.items():
        if key.startswith("llama."):
            write: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            write(key, value)
    to = GGMLQuantizationType[kind]
    for name, tensor in checkpoint.tensors.items():
        values = tensor.read()
        if len(tensor.shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quants.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


@pytest.mark.ci
def test_packed_demo_model_is_no_larger_than_its_file(tmp_path):
    demo = open_checkpoint("demo")
    model = functional_model(demo, Numerics())
    ids = np.random.default_rng(0).integers(1000, 40_000, 48).tolist()
    for checkpoint in (demo, requantized(demo, "Q8_0", tmp_path / "q8_0.gguf")):
        packed = load_weights(checkpoint, model, keep_packed=True)
        size = sum(weight.nbytes for weight in packed)
        assert size <= 1.0 * checkpoint.path.stat().st_size  # the requirement is 1.15
        line = LoadReport().summary(model, packed)
        assert "134,515,008 parameters" in line and "quantized: 181 of 242" in line
        expected = running.all_logits(model, load_weights(checkpoint, model), ids)
        assert (
            relative(running.all_logits(model, packed, ids), expected) <= 2e-3
        )  # the requirement is 1e-2
