"""Checks of the recorded references: their weights, logits and prompts."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from tests.support import reference_llama
from tests.support.paths import REFERENCES
from tests.support.tiny_checkpoints import (
    VARIANTS,
    byte_level_tokenizer,
    config_json,
    token_sequences,
    weights,
    weights_sha256,
    write_checkpoint,
)

ROTARY = [name for name in VARIANTS if name.startswith("rope_")]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    content = json.loads((REFERENCES / "tiny_llama.json").read_text("utf-8"))
    return {row["name"]: row for row in content["variants"]}


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads((REFERENCES / "smollm2_golden.json").read_text("utf-8"))


def recorded_logits(name: str, index: int) -> np.ndarray:
    with np.load(REFERENCES / "tiny_llama.npz") as arrays:
        return arrays[f"{name}/{index}"]


def test_recorded_checkpoints_are_the_variants(rows):
    assert list(rows) == list(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_recorded_weights_hash_equals_the_checkpoint_made_here(rows, name):
    row, tiny = rows[name], VARIANTS[name]
    assert row["weights_sha256"] == weights_sha256(weights(tiny))
    assert row["config"] == json.loads(json.dumps(config_json(tiny)))
    assert [sequence["tokens"] for sequence in row["sequences"]] == token_sequences(tiny)


@pytest.mark.matrix
@pytest.mark.parametrize("name", VARIANTS)
def test_recorded_logits_equal_the_float64_forward(rows, name):
    tiny = VARIANTS[name]
    for index, sequence in enumerate(rows[name]["sequences"]):
        oracle = reference_llama.forward(config_json(tiny), weights(tiny), sequence["tokens"])
        difference = np.abs(oracle[sequence["positions"]] - recorded_logits(name, index)).max()
        assert difference < 1e-4


@pytest.mark.parametrize("name", ROTARY)
def test_recorded_logits_differ_from_plain_rope(name):
    """The recorded logits are far from those of plain RoPE, so that the parity test can fail."""
    tiny = VARIANTS[name]
    config = config_json(tiny)
    plain = {key: value for key, value in config.items() if not key.startswith("rope_")}
    tokens = token_sequences(tiny)[-1]
    want = reference_llama.forward(plain, weights(tiny), tokens)
    last = recorded_logits(name, len(tiny.sequence_lens) - 1)[-1]
    assert np.abs(want[-1] - last).max() > 0.1


@pytest.mark.parametrize("name", ["gqa", "bfloat16", "sharded", "all_biases_tied_mqa"])
def test_written_files_contain_the_tensors(tmp_path, name):
    kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
    expected = weights(VARIANTS[name])
    seen = set()
    for file in write_checkpoint(name, tmp_path).glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            names = list(opened.keys())
            for key in names:
                part = opened.get_slice(key)
                assert tuple(part.get_shape()) == expected[key].shape
                assert kinds[part.get_dtype()] == expected[key].dtype
                seen.add(key)
    assert seen == set(expected)


@pytest.mark.parametrize("text", ["the thing and one", "Größe 漢字 🎉\n\t", "", " <s> \x00"])
def test_tokenizer_round_trips(text):
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_golden_prompts_are_complete(golden):
    prompts = golden["prompts"]
    assert len(prompts) == 20 and len({prompt["name"] for prompt in prompts}) == 20
    assert all(len(prompt["tokens"]) == golden["num_tokens"] == 64 for prompt in prompts)
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    assert min(lengths) == 3 and 150 <= max(lengths) <= 256
    assert sum("messages" in prompt for prompt in prompts) >= 3


def test_golden_tokens_start_with_the_largest_recorded_logit(golden):
    for prompt in golden["prompts"]:
        logits = prompt["prompt_logits"]
        values = logits["values"][:32]
        assert values == sorted(values, reverse=True)
        assert prompt["tokens"][0] == logits["ids"][0]
        assert prompt["chosen_logits"][0] == values[0]
        assert abs(prompt["leads"][0] - (values[0] - values[1])) < 1e-3


@pytest.mark.matrix
@pytest.mark.parity
@pytest.mark.parametrize("name", VARIANTS)
def test_recorded_logits_equal_transformers_here(rows, tmp_path, name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = write_checkpoint(name, tmp_path)
    for index, sequence in enumerate(rows[name]["sequences"]):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([sequence["tokens"]])).logits[0].numpy()
        difference = np.abs(logits[sequence["positions"]] - recorded_logits(name, index)).max()
        assert difference < 1e-4
