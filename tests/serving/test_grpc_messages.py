"""Conversion between messages and the service's types, and freshness of generated code."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine.request import FinishReason, TokenLogprobs
from jaxinfer.engine.stats import EngineStats, StepStats
from jaxinfer.serving import grpc_messages as messages
from jaxinfer.serving.client_request import EmbedOptions, Options
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import (
    Chat,
    Delta,
    EmbeddingRequest,
    GenerationRequest,
    Timing,
    Usage,
)
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.service import ModelInfo

make_protos = importlib.import_module("jaxinfer.tools.make_protos")

FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
# No value is the default, so each shows that it arrives.
CHANGED = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "seed": 2**32 - 1,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {5: -100.0, 7: 0.3},
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["no", "ñandú"],
    "min_tokens": 2,
    "max_tokens": 3,
    "stop": ["end", "\n\n"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "n": 2,
    "logprobs": 0,
    "prompt_logprobs": 1,
}
# Defaults and "off" values: set is not the same as not set.
EDGES = {
    "temperature": 0.0,
    "top_k": 0,
    "seed": 0,
    "logit_bias": {},
    "bad_words": [],
    "stop": [],
    "stop_token_ids": [],
    "min_tokens": 0,
    "max_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "logprobs": 0,
}


def over_the_wire(fields: dict) -> dict:
    data = messages.write_params(fields).SerializeToString()
    return messages.read_params(pb.SamplingParams.FromString(data))


def test_every_sampling_parameter_is_optional_in_the_proto():
    descriptor = pb.SamplingParams.DESCRIPTOR
    assert set(descriptor.fields_by_name) - {"up_to_context"} == FIELDS
    assert all(field.has_presence for field in descriptor.fields)
    assert set(CHANGED) == FIELDS, "the test above all covers every field"


def test_every_request_field_is_in_the_proto_and_the_client():
    of_the_server = {"prompt", "protocol", "operation"}
    ours = {field.name for field in dataclasses.fields(GenerationRequest)} - of_the_server
    assert ours < set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert set(Options.__annotations__) == FIELDS | (ours - {"params"}) | {"model"}

    ours = {field.name for field in dataclasses.fields(EmbeddingRequest)} - {"inputs", "protocol"}
    in_proto = set(pb.EmbedRequest.DESCRIPTOR.fields_by_name)
    assert in_proto == ours | {"input", "model"} == {"input", *EmbedOptions.__annotations__}


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (pb.Stats, EngineStats._fields),
        (pb.StepStats, StepStats._fields),
        (pb.Model, [field.name for field in dataclasses.fields(ModelInfo)]),
        (pb.Usage, [field.name for field in dataclasses.fields(Usage)]),
        (pb.Timing, [field.name for field in dataclasses.fields(Timing)]),
        (pb.Sample, [name for name in Delta._fields if name != "embedding"]),
        (pb.TokenLogprobs, TokenLogprobs._fields),
    ],
)
def test_result_types_have_the_same_fields_in_the_proto(message, fields):
    assert set(message.DESCRIPTOR.fields_by_name) == set(fields)


def test_every_finish_reason_has_a_number():
    for reason in FinishReason:
        delta = Delta(1, "text", [1, 2], [], reason)
        assert messages.read_sample(messages.sample(delta)) == delta


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_sampling_parameter_arrives_unchanged(name):
    assert over_the_wire({name: CHANGED[name]}) == {name: CHANGED[name]}


@pytest.mark.parametrize("name", sorted(EDGES))
def test_parameter_set_to_an_empty_value_is_set(name):
    assert over_the_wire({name: EDGES[name]}) == {name: EDGES[name]}


def test_unset_parameters_are_left_to_the_checkpoint():
    assert over_the_wire({}) == {}
    assert over_the_wire({"seed": None, "logit_bias": None, "logprobs": None}) == {}


def test_unlimited_max_tokens_is_not_the_default():
    assert over_the_wire({"max_tokens": None}) == {"max_tokens": None}


def test_all_parameters_round_trip_together():
    assert SamplingParams(**over_the_wire(CHANGED)) == SamplingParams(**CHANGED)


def test_out_of_range_numbers_arrive_to_be_refused():
    for name, value in [("top_k", 2**40), ("seed", -1), ("n", 2**31), ("temperature", math.nan)]:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**over_the_wire({name: value}))
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(**over_the_wire({"stop_token_ids": [2**32 + 5]}))


def test_unsendable_options_are_refused_by_name():
    with pytest.raises(TypeError, match="temprature"):
        messages.write_params({"temprature": 1})
    with pytest.raises(TypeError, match="up_to_context"):
        messages.write_params({"up_to_context": True})
    with pytest.raises(TypeError, match="top_k='many'"):
        messages.write_params({"top_k": "many"})
    with pytest.raises(ValueError, match="seed=1267"):
        messages.write_params({"seed": 2**100})
    with pytest.raises(TypeError, match="messages: name"):
        messages.write_chat([{"role": "user", "content": "hello", "name": "Ann"}])
    with pytest.raises(ValueError, match="text"):
        messages.set_field(pb.GenerateRequest(), "text", "\ud800")


def test_prompt_has_one_of_three_forms():
    assert messages.read_prompt(pb.GenerateRequest(text="")) == ""
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))
    assert messages.read_prompt(ids) == [1, 2]
    chat = messages.write_chat([{"role": "user", "content": "hello"}])
    prompt = messages.read_prompt(pb.GenerateRequest(chat=chat))
    assert prompt == Chat([{"role": "user", "content": "hello"}])
    for request in (pb.GenerateRequest(), pb.TokenizeRequest()):
        with pytest.raises(ServiceError, match="text") as caught:
            messages.read_prompt(request)
        assert caught.value.kind is ErrorKind.INVALID and caught.value.field == "prompt"


def test_engine_stats_round_trip():
    numbers = iter(range(1, 100))
    step = StepStats(**{name: next(numbers) for name in StepStats._fields})
    stats = EngineStats(
        **{name: next(numbers) for name in EngineStats._fields[:-1]}, last_step=step
    )
    assert messages.read_stats(messages.stats(stats)) == stats
    info = ModelInfo("name", 10, 20, 30, "float32", True, 40)
    assert messages.read_model(messages.model(info)) == info


def test_generated_code_is_fresh():
    assert not make_protos.stale(make_protos.generate())


def test_stale_code_is_detected_and_compiler_version_ignored(tmp_path):
    source = (make_protos.ROOT / "jaxinfer/v1/inference.proto").read_text()
    path = tmp_path / "jaxinfer/v1/inference.proto"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    files = make_protos.generate(tmp_path)
    assert len(make_protos.stale(files)) == 3, "none is written yet"
    for name, text in files.items():
        name.write_text(
            text.replace("GRPC_GENERATED_VERSION = '1.", "GRPC_GENERATED_VERSION = '9.")
        )
    assert not make_protos.stale(files)
    path.write_text(source.replace("uint32 index = 1;", "uint32 place = 1;"))
    stale = {file.name for file in make_protos.stale(make_protos.generate(tmp_path))}
    assert stale == {"inference_pb2.py", "inference_pb2.pyi"}
