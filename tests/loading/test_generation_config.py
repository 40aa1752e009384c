"""Generation defaults: request, generation_config.json, config.json and our defaults in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from absl import logging

from jaxinfer import LLM, CheckpointError, SamplingParams
from jaxinfer.config import from_mapping
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.checkpoint import GenerationDefaults
from jaxinfer.loading.generation import UNSUPPORTED_KEYS
from jaxinfer.sampling.params import SamplingParamsError
from jaxinfer.serving.service import Service
from tests.support.tiny_checkpoints import TinyLlama, write_checkpoint


def write(folder: Path, generation: dict[str, Any] | None, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def opened(folder: Path, generation: dict[str, Any] | None, **config: Any) -> GenerationDefaults:
    return open_checkpoint(write(folder, generation, config), needs_weights=False).generation


FIELDS: dict[str, tuple[str, Any, Any]] = {
    "temperature": ("temperature", 0.5, 0.9),
    "top_k": ("top_k", 7, 9),
    "top_p": ("top_p", 0.5, 0.9),
    "min_p": ("min_p", 0.5, 0.1),
    "repetition_penalty": ("repetition_penalty", 1.5, 1.1),
    "max_new_tokens": ("max_tokens", 17, 19),
    "stop_strings": ("stop", ["x"], ["y"]),
}


@pytest.mark.parametrize("key", FIELDS)
def test_request_precedes_generation_config_precedes_config_precedes_default(key, tmp_path):
    field, first, second = FIELDS[key]

    def chosen(generation: Any, config: Any, **request: Any) -> Any:
        config = {} if config is None else {key: config}
        defaults = opened(tmp_path, None if generation is None else {key: generation}, **config)
        return getattr(defaults.sampling_params(**request), field)

    as_stored = lambda value: tuple(value) if isinstance(value, list) else value
    assert chosen(first, second) == as_stored(first)
    assert chosen(None, second) == as_stored(second)
    assert chosen(None, None) == getattr(SamplingParams(), field)
    requested = second if key != "stop_strings" else tuple(second)
    assert chosen(first, None, **{field: requested}) == requested


def test_generation_config_precedes_config_for_each_key(tmp_path):
    generation = {"eos_token_id": [2, 5, 2], "bos_token_id": None, "temperature": 0.7}
    generation |= {"top_k": 40, "top_p": 1, "repetition_penalty": 1.1, "do_sample": True}
    config = {"eos_token_id": 7, "bos_token_id": 1, "temperature": 0.1}
    defaults = opened(tmp_path, generation, **config)
    assert (defaults.eos_token_ids, defaults.bos_token_id) == ((2, 5), 1)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.7, 40, 1)
    assert (defaults.min_p, defaults.repetition_penalty, defaults.do_sample) == (None, 1.1, True)


def test_checkpoint_without_settings_has_no_defaults(tmp_path):
    assert opened(tmp_path, None) == opened(tmp_path, {}) == GenerationDefaults()


def test_all_defaults_of_the_wrong_type_are_reported(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, {"temperature": "hot", "top_k": 1.5}, eos_token_id=2, min_p=True)
    for message in ("temperature is 'hot'", "top_k is 1.5", "min_p is True"):
        assert message in str(caught.value)


@pytest.mark.parametrize("eos", [[2, "x"], [-1], -2, [True]])
def test_invalid_eos_ids_are_refused(eos, tmp_path):
    with pytest.raises(CheckpointError, match="eos_token_id is"):
        opened(tmp_path, {"eos_token_id": eos})


def test_do_sample_false_is_greedy_at_any_temperature(tmp_path):
    defaults = opened(tmp_path, {"do_sample": False, "temperature": 0.7})
    assert defaults.sampling_params().is_greedy
    assert defaults.sampling_params(temperature=0.3).temperature == 0.3


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"temperature": -1}, "temperature=-1.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"stop_strings": [1]}, "stop=(1,)"),
        ({"stop_strings": 5}, "stop_strings is 5"),
        ({"max_new_tokens": "many"}, "max_new_tokens is 'many'"),
        ({"max_new_tokens": -1}, "max_tokens=-1"),
    ],
)
def test_invalid_generation_defaults_are_refused_on_open(generation, named, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, generation)
    assert named in str(caught.value)


EFFECTIVE: dict[str, Any] = {
    "bad_words_ids": [[5]],
    "begin_suppress_tokens": [1],
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "exponential_decay_length_penalty": [5, 1.1],
    "forced_bos_token_id": 5,
    "forced_decoder_ids": [[1, 2]],
    "forced_eos_token_id": 5,
    "guidance_scale": 1.5,
    "max_time": 5.0,
    "min_length": 5,
    "min_new_tokens": 5,
    "no_repeat_ngram_size": 3,
    "num_beam_groups": 2,
    "num_beams": 4,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "sequence_bias": [[[1], 2.0]],
    "suppress_tokens": [5],
    "top_h": 0.4,
    "typical_p": 0.9,
    "watermarking_config": {"bias": 2.0},
}


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: seen.append(text % values))
    return seen


def test_unsupported_generation_settings_are_named_in_one_warning(tmp_path, warnings):
    assert EFFECTIVE.keys() == UNSUPPORTED_KEYS.keys()
    opened(tmp_path, EFFECTIVE)
    [error_text] = warnings
    assert all(f"{key}={value!r}" in error_text for key, value in EFFECTIVE.items())
    opened(tmp_path, {"num_beams": 1}, no_repeat_ngram_size=2)
    assert "no_repeat_ngram_size=2" in warnings[1]


def test_neutral_generation_settings_cause_no_warning(tmp_path, warnings):
    neutral = {key: values[0] for key, values in UNSUPPORTED_KEYS.items() if values}
    opened(tmp_path, neutral | {"transformers_version": "5.0", "max_length": 20, "use_cache": True})
    opened(tmp_path, dict.fromkeys(UNSUPPORTED_KEYS))
    opened(tmp_path, {"max_length": 4096}, max_position_embeddings=4096)
    assert not warnings


def test_max_length_below_the_context_is_named_in_a_warning(tmp_path, warnings):
    opened(tmp_path, {"max_length": 512}, max_position_embeddings=4096)
    assert "max_length=512" in warnings[0]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = write_checkpoint(TinyLlama(num_layers=1), tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 5}
    write(folder, {"max_new_tokens": 3, "do_sample": False, "eos_token_id": [6, 7]}, config)
    options = {
        "max_model_len": 64,
        "warm_up": False,
        "cache": {"page_size": 16, "num_pages": 8},
        "scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 1},
    }
    return LLM(folder, from_mapping(options), show_progress=False)


def test_llm_default_params_are_the_checkpoints(llm):
    assert set(llm.engine.eos_token_ids) == {6, 7}
    params = llm.default_params()
    assert (params.max_tokens, params.temperature) == (3, 0)
    [output] = llm.generate([[10, 11, 12]])
    [same] = llm.generate([[10, 11, 12]], SamplingParams(temperature=0, max_tokens=3))
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert 1 <= len(output.outputs[0].token_ids) <= 3
    longer = llm.default_params(max_tokens=9, ignore_eos=True)
    assert len(llm.generate([[10, 11, 12]], longer)[0].outputs[0].token_ids) == 9


def test_service_default_params_are_the_checkpoints(llm):
    # `params` needs no engine loop.
    service = Service(llm.engine, None, generation=llm.generation)  # type: ignore[arg-type]
    assert service.params({}) == llm.default_params()
    assert service.params({"max_tokens": 8, "temperature": 0.5}).max_tokens == 8
    with pytest.raises(SamplingParamsError):
        llm.default_params(top_p=2.0)
