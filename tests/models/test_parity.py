"""A model equals its Hugging Face reference."""

import json

import numpy as np
import pytest

from jaxinfer import SamplingParams
from tests.support import running
from tests.support.paths import REFERENCES
from tests.support.tiny_checkpoints import VARIANTS, token_sequences, write_checkpoint

TOLERANCE = 1e-4  # float32 logits of tiny random checkpoints


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_recorded_ones(name):
    """The logits were recorded by tests/references/make_references.py."""
    rows = json.loads((REFERENCES / "tiny_llama.json").read_text("utf-8"))["variants"]
    row = next(row for row in rows if row["name"] == name)
    model, weights = running.tiny(name)
    with np.load(REFERENCES / "tiny_llama.npz") as recorded:
        for index, sequence in enumerate(row["sequences"]):
            logits = running.all_logits(model, weights, sequence["tokens"])
            difference = np.abs(logits[sequence["positions"]] - recorded[f"{name}/{index}"]).max()
            assert difference <= TOLERANCE


@pytest.mark.matrix
@pytest.mark.parity
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(name, tmp_path):
    """Compare all logits of a sequence, and 24 greedy tokens of the engine, with transformers."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = write_checkpoint(name, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, weights = running.load(folder)
    prompt = token_sequences(VARIANTS[name])[-1]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].numpy()
    assert np.abs(running.all_logits(model, weights, prompt) - expected).max() <= TOLERANCE

    # A new reference, since dynamic RoPE remembers the longest sequence it has seen.
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        generated = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
    engine = running.engine(
        model, weights, {"max_model_len": 128, "scheduler": {"max_num_batched_tokens": 16}}
    )
    params = SamplingParams(temperature=0, max_tokens=24)
    [request] = engine.add(prompt, params)
    running.run(engine)
    assert request.output_token_ids == generated
