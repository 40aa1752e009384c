"""A model of every family equals its Hugging Face reference, from either file format."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.kernels.quantized_matmul import QuantArray, dequantize
from jaxinfer.models import GGUF_FAMILIES, HF_FAMILIES
from tests.support import families_encoders, running
from tests.support.family_bench import (
    REFERENCES,
    make_tensors,
    recorded,
    write_gguf,
    write_huggingface,
)
from tests.support.family_groups import ALL, GROUPS
from tests.support.quantized_bench import quantize_weights

TOLERANCE = 1e-4  # float32 logits of tiny random checkpoints
NUM_GREEDY = 24
# The reference has no class for its text model alone, so tests/models/test_config_defaults_dense.py
# compares it with the family it wraps.
WRAPPED = {"mistral3"}
WITH_GGUF = [(group, name) for group, name in ALL if GROUPS[group][name].gguf is not None]
FIRST_OF_TYPE = list(
    {GROUPS[g][name].config["model_type"]: (g, name) for g, name in reversed(ALL)}.values()
)


def _tensors(group: str, name: str):
    case = GROUPS[group][name]
    return make_tensors(recorded(group)[name]["shapes"], case.seed, case.norm_mean)


@functools.lru_cache(maxsize=2)
def _loaded(group: str, name: str):
    with TemporaryDirectory() as folder:
        case = GROUPS[group][name]
        return running.load(write_huggingface(case, _tensors(group, name), Path(folder)))


def _equals_the_recorded(group: str, name: str, model, weights) -> None:
    row = recorded(group)[name]
    with np.load(REFERENCES / f"{group}.npz") as arrays:
        for index, sequence in enumerate(row["sequences"]):
            logits = running.all_logits(model, weights, sequence["tokens"])
            difference = np.abs(logits[sequence["positions"]] - arrays[f"{name}/{index}"]).max()
            assert difference <= TOLERANCE


def test_every_registered_family_has_cases():
    """docs/models.md lists the families, in both formats, by these cases."""
    cases = [
        case for group in (*GROUPS.values(), families_encoders.CASES) for case in group.values()
    ]
    model_types = {case.config["model_type"] for case in cases} | WRAPPED
    assert set(map(id, HF_FAMILIES.values())) == {id(HF_FAMILIES[name]) for name in model_types}
    assert {case.gguf.architecture for case in cases if case.gguf} == set(GGUF_FAMILIES)


@pytest.mark.parametrize(("group", "name"), ALL)
def test_logits_equal_the_recorded_ones(group, name):
    """The logits were recorded by tests/references/make_family_references.py."""
    assert recorded(group)[name]["config"] == GROUPS[group][name].config_json, "record it anew"
    _equals_the_recorded(group, name, *_loaded(group, name))


@pytest.mark.matrix(by="group")
@pytest.mark.parametrize(("group", "name"), WITH_GGUF)
def test_gguf_file_is_the_same_model(group, name, tmp_path):
    path = write_gguf(GROUPS[group][name], _tensors(group, name), tmp_path / "model.gguf")
    _equals_the_recorded(group, name, *running.load(path))


@pytest.mark.matrix(by="group")
@pytest.mark.parametrize(("group", "name"), FIRST_OF_TYPE)
def test_quantized_weights_equal_their_dequantized_arrays(group, name):
    """Compare products with int8 weights and products with the dequantized arrays."""
    model, weights = _loaded(group, name)
    quantized = quantize_weights(model, weights, "int8")
    assert sum(isinstance(w, QuantArray) for w in quantized) >= 3 * model.config.num_layers
    dense = tuple(dequantize(w) if isinstance(w, QuantArray) else w for w in quantized)
    [tokens, *_] = GROUPS[group][name].sequences()
    found, expected = (running.all_logits(model, w, tokens) for w in (quantized, dense))
    assert np.abs(found - expected).max() <= TOLERANCE
    assert np.abs(expected - running.all_logits(model, weights, tokens)).max() > TOLERANCE


@pytest.mark.matrix(by="group")
@pytest.mark.parity
@pytest.mark.parametrize(("group", "name"), ALL)
def test_logits_and_greedy_tokens_equal_transformers(group, name, tmp_path, record_property):
    """Compare all logits of a sequence with transformers, and greedy tokens of several prompts, in
    one batch and in chunks, with its `generate` for each prompt alone."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    case = GROUPS[group][name]
    folder = write_huggingface(case, _tensors(group, name), tmp_path)

    def fresh():  # dynamic RoPE remembers the longest sequence it has seen
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    model, weights = _loaded(group, name)
    prompts = [*case.sequences(), case.sequences()[0][:3]]
    with torch.inference_mode():
        expected = fresh()(torch.tensor([prompts[1]])).logits[0].numpy()
        generated = [
            fresh()
            .generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_GREEDY,
                do_sample=False,
                eos_token_id=None,
            )[0, len(prompt) :]
            .tolist()
            for prompt in prompts
        ]
    found = running.all_logits(model, weights, prompts[1])
    difference = float(np.abs(found - expected).max())
    record_property("difference", difference)
    assert difference <= TOLERANCE

    sizes = {
        "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        "min_bucket": 16,
        "max_model_len": 128,
    }
    engine = running.engine(model, weights, sizes)
    params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY)
    requests = [engine.add(prompt, params)[0] for prompt in prompts]
    running.run(engine)
    assert [request.output_token_ids for request in requests] == generated
