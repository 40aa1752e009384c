"""Hidden states of encoders equal the Hugging Face reference, from either file format."""

import dataclasses
import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import CheckpointError
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model
from jaxinfer.nn.layers import Numerics
from tests.support import running
from tests.support.families_encoders import CASES
from tests.support.family_bench import (
    REFERENCES,
    make_tensors,
    recorded,
    write_gguf,
    write_huggingface,
)

TOLERANCE = 1e-4
ROWS, LENGTH = 4, 64  # one program for each model


@functools.partial(jax.jit, static_argnames=("model",))
def _hidden(weights, token_ids, lengths, *, model):
    return model.merge(weights)(token_ids, lengths)


def hidden_of(model, weights, sequences):
    """Return hidden states of sequences in one padded batch, which also has empty rows."""
    token_ids = np.full((ROWS, LENGTH), 9, np.int32)
    lengths = [*map(len, sequences)] + [0] * (ROWS - len(sequences))
    for row, tokens in enumerate(sequences):
        token_ids[row, : len(tokens)] = tokens
    hidden = _hidden(weights, token_ids, jnp.asarray(lengths, jnp.int32), model=model)
    rows = zip(np.asarray(hidden), lengths, strict=True)
    return [row[:length] for row, length in rows if length]


def _tensors(name):
    return make_tensors(recorded("encoders")[name]["shapes"], CASES[name].seed)


@functools.cache
def _loaded(name):
    with TemporaryDirectory() as folder:
        return running.load(write_huggingface(CASES[name], _tensors(name), Path(folder)))


def _equals_the_recorded(name, model, weights):
    sequences = recorded("encoders")[name]["sequences"]
    found = hidden_of(model, weights, [sequence["tokens"] for sequence in sequences])
    with np.load(REFERENCES / "encoders.npz") as arrays:
        for index, sequence in enumerate(sequences):
            difference = found[index][sequence["positions"]] - arrays[f"{name}/{index}"]
            assert np.abs(difference).max() <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_the_recorded_ones(name):
    """The hidden states were recorded by tests/references/make_encoder_references.py."""
    assert recorded("encoders")[name]["config"] == CASES[name].config_json, "record it anew"
    _equals_the_recorded(name, *_loaded(name))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].gguf])
def test_gguf_file_is_the_same_model(name, tmp_path):
    path = write_gguf(CASES[name], _tensors(name), tmp_path / "model.gguf")
    _equals_the_recorded(name, *running.load(path))


@pytest.mark.matrix
@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_transformers(name, tmp_path, record_property):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = write_huggingface(CASES[name], _tensors(name), tmp_path)
    reference = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    padding = CASES[name].config_json["pad_token_id"]
    # The last one has the padding id as a token, which takes no position in RoBERTa.
    sequences = [*CASES[name].sequences(), [0, 5, padding, 7, 8, 2]]
    found = hidden_of(*_loaded(name), sequences)
    difference = 0.0
    for tokens, hidden in zip(sequences, found, strict=True):
        with torch.inference_mode():
            mask = torch.ones(1, len(tokens), dtype=torch.long)
            expected = reference(torch.tensor([tokens]), attention_mask=mask).last_hidden_state
        difference = max(difference, float(np.abs(hidden - expected[0].numpy()).max()))
    record_property("difference", difference)
    assert difference <= TOLERANCE


@pytest.mark.parametrize(("prefix", "weight", "bias"), [("bert.", "gamma", "beta"), ("x.", "", "")])
def test_tensor_names_with_prefix_or_old_norm_names_are_read(tmp_path, prefix, weight, bias):
    tensors = {}
    for name, values in _tensors("bert").items():
        if weight:
            name = name.replace("LayerNorm.weight", f"LayerNorm.{weight}")
            name = name.replace("LayerNorm.bias", f"LayerNorm.{bias}")
        tensors[prefix + name] = values
    tensors["cls.predictions.bias"] = np.zeros(160, np.float32)
    tensors[prefix + "embeddings.position_ids"] = np.zeros((1, 128), np.float32)
    model, weights = running.load(write_huggingface(CASES["bert"], tensors, tmp_path))
    tokens = recorded("encoders")["bert"]["sequences"][0]["tokens"]
    other = hidden_of(*_loaded("bert"), [tokens])
    assert np.array_equal(hidden_of(model, weights, [tokens])[0], other[0])


def test_unused_head_is_refused_by_name(tmp_path):
    tensors = _tensors("bert") | {"classifier.weight": np.zeros((2, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"classifier\.weight"):
        running.load(write_huggingface(CASES["bert"], tensors, tmp_path))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert", {"hidden_act": "mish"}, "mish"),
        ("bert", {"hidden_size": 33}, "not a multiple"),
        ("bert", {"intermediate_size": "48"}, "intermediate_size"),
        ("bert", {"layer_norm_eps": 2.0}, "norm_eps"),
        ("roberta", {"pad_token_id": "x"}, "pad_token_id"),
        ("roberta", {"max_position_embeddings": 2}, "num_positions is 2"),
    ],
)
def test_unsupported_config_is_refused_by_name(tmp_path, name, changes, message):
    folder = write_huggingface(CASES[name], _tensors(name), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=message):
        functional_model(open_checkpoint(folder), Numerics())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.causal": True}, "causal"),
        ({"attention.head_count": 0}, "head_count"),
        ({"attention.max_alibi_bias": 8.0}, "max_alibi_bias"),
    ],
)
def test_unsupported_gguf_file_is_refused_by_name(tmp_path, changes, message):
    form = CASES["bert"].gguf
    assert form is not None
    changed = dataclasses.replace(form, metadata={**form.metadata, **changes})
    case = dataclasses.replace(CASES["bert"], gguf=changed)
    path = write_gguf(case, _tensors("bert"), tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=message):
        functional_model(open_checkpoint(path), Numerics())
