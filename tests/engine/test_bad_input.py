"""Bad requests and checkpoints are refused with value and limit; other requests go on."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import CheckpointError, InvalidRequestError, SamplingParams
from jaxinfer.loading import open_checkpoint
from jaxinfer.loading.assign import functional_model, load_weights
from jaxinfer.nn.layers import Numerics
from tests.support import running
from tests.support.tiny_checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONGROPE = {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0] * 4}
UNTIL_EOS = {"temperature": 0, "max_tokens": 3, "ignore_eos": False}


@pytest.fixture(scope="module")
def engine():
    return running.engine(*running.tiny("gqa"))


@pytest.fixture(scope="module")
def expected(engine):
    """The output for [3, 4, 5] without other requests."""
    [request] = engine.add([3, 4, 5], GREEDY)
    running.run(engine)
    return request.output_token_ids


BAD_REQUESTS = {
    "empty prompt": ([], {}, "empty"),
    "prompt as long as the context": ([5] * 96, {}, "96"),
    "token id past the vocabulary": ([1, 272], {}, "272"),
    "negative token id": ([1, -1], {}, "-1"),
    "token id that is no number": ([1, "a"], {}, "'a'"),
    "token id that is a truth value": ([1, True], {}, "True"),
    "bias of an unknown token": ([1], {"logit_bias": {300: 1.0}}, "300"),
    "allowed token unknown": ([1], {"allowed_token_ids": [999]}, "999"),
    "stop token unknown": ([1], {"stop_token_ids": [-5]}, "-5"),
    "stop string without a tokenizer": ([1], {"stop": "x"}, "tokenizer"),
    "bad words without a tokenizer": ([1], {"bad_words": ["x"]}, "tokenizer"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_others_go_on(engine, expected, case):
    prompt, fields, named = BAD_REQUESTS[case]
    [good] = engine.add([3, 4, 5], GREEDY)
    engine.step()
    with pytest.raises((InvalidRequestError, ValueError), match=named):
        engine.add(prompt, SamplingParams(temperature=0, **fields))
    running.run(engine)
    assert good.output_token_ids == expected
    assert engine.pool.num_owned == 0


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_tokens": -1}, {"top_p": 0.0}],
)
def test_impossible_parameters_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)  # type: ignore[call-arg]


def test_a_request_that_the_pool_cannot_hold_is_refused_with_numbers():
    engine = running.engine(*running.tiny("gqa"), {"cache": {"num_pages": 3}})
    with pytest.raises(InvalidRequestError, match=r"30 tokens.*25 \(3 pages of 8\).*num_pages"):
        engine.add([1] * 10, SamplingParams(max_tokens=20))
    [open_end] = engine.add([1] * 10, SamplingParams(temperature=0, max_tokens=None))
    running.run(engine)
    assert open_end.read_len == 25 and open_end.finish_reason == "length"


def test_a_duplicate_id_is_refused(engine):
    engine.add([1, 2], GREEDY, request_id="a")
    with pytest.raises(InvalidRequestError, match="'a'"):
        engine.add([1, 2], GREEDY, request_id="a")
    running.run(engine)
    engine.add([1, 2], GREEDY, request_id="a")  # free again
    running.run(engine)


def test_max_tokens_zero_finishes_with_no_token(engine):
    [request] = engine.add([1, 2, 3], SamplingParams(max_tokens=0))
    updates = running.run(engine)
    assert [(u.token_ids, u.finish_reason) for u in updates] == [([], "length")]
    assert request.output_token_ids == []


def test_output_ends_where_the_context_is_full(engine):
    [request] = engine.add([1] * 90, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    running.run(engine)
    assert len(request.output_token_ids) == 6 and request.finish_reason == "length"


def test_aborting_what_is_unknown_or_over_says_so(engine):
    assert engine.abort("nobody") is False
    [request] = engine.add([1, 2, 3], GREEDY)
    assert engine.abort(request.id) is True
    assert engine.abort(request.id) is False
    [update] = running.run(engine)
    assert update.finish_reason == "abort" and engine.pool.num_owned == 0


def _write(tmp_path, change):
    """Write a tiny checkpoint whose tensors `change` has modified."""
    folder = write_checkpoint("gqa", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    return checkpoint, functional_model(checkpoint, Numerics())


def test_all_missing_unknown_and_misshapen_tensors_are_named_at_once(tmp_path):
    def change(tensors):
        tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors.pop("model.norm.weight")
        tensors["model.layers.0.extra"] = tensors["model.layers.0.input_layernorm.weight"].copy()
        name = "model.layers.1.self_attn.q_proj.weight"
        tensors[name] = tensors[name][:-8].copy()

    checkpoint, model = _write(tmp_path, change)
    with pytest.raises(CheckpointError) as error:
        load_weights(checkpoint, model)
    for part in ("0.mlp.up_proj", "model.norm", "0.extra", "1.self_attn.q_proj", "expected"):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(tmp_path, value):
    def change(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = value

    checkpoint, model = _write(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.*1 values"):
        load_weights(checkpoint, model)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "swish9"}, "swish9"),
        ({"num_attention_heads": 3}, "num_heads 3"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ],
)
def test_a_config_that_does_not_hold_together_is_refused(tmp_path, change, named):
    folder = write_checkpoint("gqa", tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **change}), "utf-8")
    with pytest.raises(CheckpointError, match=named):
        functional_model(open_checkpoint(folder), Numerics())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**9}, "1,000,000,000 layers"),
        ({"max_position_embeddings": None}, "None"),
        ({"max_position_embeddings": 128.0}, r"128\.0"),
        ({"head_dim": 8.0}, r"8\.0"),
        ({"rope_theta": 0}, "theta is 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, r"factor is 0\.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": -2.0}}, r"factor is -2\.0"),
        ({"rope_scaling": LONGROPE}, "RoPE's short_factor has 1 numbers; it needs 4"),
    ],
)
def test_config_that_cannot_be_computed_is_refused_before_the_model_is_built(
    tmp_path, changes, named
):
    folder = write_checkpoint("mha", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=named):
        functional_model(open_checkpoint(folder), Numerics())


def test_end_of_text_id_beyond_the_embedding_is_ignored():
    engine = running.engine(*running.tiny("mha"), eos_token_ids=[10**6])
    assert not engine.eos_token_ids
    [request] = engine.add([1, 2, 3], SamplingParams(**UNTIL_EOS, min_tokens=2))
    running.run(engine)
    assert len(request.output_token_ids) == 3


def test_priority_that_cannot_be_ordered_is_refused_without_a_trace():
    engine = running.engine(*running.tiny("mha"), {"scheduler": {"policy": "priority"}})
    engine.add([1, 2, 3], SamplingParams(**UNTIL_EOS))
    with pytest.raises(InvalidRequestError, match="priority is 'high'"):
        engine.add([1, 2, 3], SamplingParams(**UNTIL_EOS), priority="high")  # type: ignore[arg-type]
    assert engine.num_requests == 1
