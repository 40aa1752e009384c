"""The GPT-like decoder: batch invariance of its structures, position tables, old files."""

import random

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine.admission import InvalidRequestError
from jaxinfer.nn.layers import Numerics
from jaxinfer.options import ConfigError
from tests.support import running
from tests.support.families_gpt import CASES
from tests.support.family_bench import make_tensors, recorded, write_huggingface


def tensors_of(name: str):
    return make_tensors(recorded("gpt")[name]["shapes"], CASES[name].seed)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    return running.load(write_huggingface(CASES["gpt2"], tensors_of("gpt2"), folder))


@pytest.mark.parametrize("name", ["gpt_neox", "bloom"])
def test_batch_invariant_mode_is_equal_bit_for_bit(name, tmp_path):
    """A request has the same floats alone and in chunks among others."""
    folder = write_huggingface(CASES[name], tensors_of(name), tmp_path)
    model, weights = running.load(folder, Numerics(batch_invariant=True))
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 160) for _ in range(n)] for n in (30, 3, 17)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    # Steps of one token and of 32 are one tile and two; together, prompts have other chunks.
    sizes = {"batch_invariant": True, "cache": {"prefix_cache": False}}
    engine = running.engine(model, weights, sizes)

    def logprobs(*together):
        requests = [engine.add(prompt, params)[0] for prompt in together]
        running.run(engine)
        return [request.logprobs.output for request in requests]

    assert logprobs(*prompts) == [logprobs(prompt)[0] for prompt in prompts]


def test_position_past_the_table_is_refused(gpt2):
    model, weights = gpt2
    with pytest.raises(ConfigError, match="max_model_len is 129; this model has a table of 128"):
        running.engine(model, weights, {"max_model_len": 129})
    engine = running.engine(model, weights, {"max_model_len": None})
    assert engine.max_model_len == 128
    with pytest.raises(InvalidRequestError, match="the context holds 128"):
        engine.add([5] * 128, SamplingParams(temperature=0))
    [request] = engine.add([5] * 120, SamplingParams(temperature=0, ignore_eos=True))
    running.run(engine)
    assert len(request.output_token_ids) == 8


def test_alibi_model_accepts_a_longer_max_model_len(tmp_path):
    model, weights = running.load(write_huggingface(CASES["bloom"], tensors_of("bloom"), tmp_path))
    assert running.engine(model, weights, {"max_model_len": 300}).max_model_len == 300


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("gpt2", {"h.0.attn.bias": (1, 1, 128, 128), "h.1.attn.masked_bias": ()}),
        ("bloom", {}),
    ],
)
def test_file_without_a_head_is_the_same_model(name, extra, tmp_path):
    """Like the publishers' files, they have no `transformer.` prefix, and a causal mask."""
    tensors = tensors_of(name)
    bare = {key.removeprefix("transformer."): values for key, values in tensors.items()}
    bare |= {key: np.ones(shape, np.float32) for key, shape in extra.items()}
    whole = running.load(write_huggingface(CASES[name], tensors, tmp_path / "whole"))
    saved = running.load(write_huggingface(CASES[name], bare, tmp_path / "bare"))
    for ours, theirs in zip(saved[1], whole[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_old_neox_file_with_masks_and_frequencies_is_read(tmp_path):
    tensors = tensors_of("gpt_neox")
    block = "gpt_neox.layers.0.attention."
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        tensors[block + name] = np.ones(4, np.float32)
    model, _ = running.load(write_huggingface(CASES["gpt_neox"], tensors, tmp_path))
    assert model.config.head_dim == 8
