"""Converts between the messages of `inference.proto` and the types of the service.

The server and the client use it. A field that is not set is absent from the resulting mapping, so
that the checkpoint's default applies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxinfer.engine.request import FinishReason, TokenLogprobs
from jaxinfer.engine.stats import EngineStats, StepStats
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import (
    CHAT_ROLES,
    Chat,
    Delta,
    Embeddings,
    Prompt,
    Result,
    Timing,
    Usage,
)
from jaxinfer.serving.protos.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer.serving.service import ModelInfo
from jaxinfer.serving.stream import Stream

_REASONS = {reason: getattr(pb, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_REASONS_BY_NUMBER = {number: reason for reason, number in _REASONS.items()}
_PARAMS = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name) - {"up_to_context"}


# The server reads requests.


def read_prompt(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    """The text, token ids or conversation of a request; `ServiceError` if it has none."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "chat":
        messages = request.chat.messages
        return Chat([{"role": _role(m.role), "content": m.content} for m in messages])
    if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
        return list(request.token_ids.ids)
    names = ", ".join(f.name for f in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
    text = f"the request has no prompt; set one of {names}"
    raise ServiceError(ErrorKind.INVALID, text, field="prompt")


def read_inputs(request: pb.EmbedRequest) -> list[str | list[int]]:
    """The texts and lists of token ids to embed; `ServiceError` for an empty input."""
    inputs: list[str | list[int]] = []
    for index, item in enumerate(request.input):
        kind = item.WhichOneof("input")
        if kind is None or not (item.text or item.token_ids.ids):
            text = f"input {index} is empty; set text or token_ids"
            raise ServiceError(ErrorKind.INVALID, text, field="input")
        inputs.append(item.text if kind == "text" else list(item.token_ids.ids))
    return inputs


def _role(name: str) -> str:
    if name not in CHAT_ROLES:
        text = f"role {name!r:.80} is none of {', '.join(CHAT_ROLES)}; there are no tools here"
        raise ServiceError(ErrorKind.INVALID, text, field="messages")
    return CHAT_ROLES[name]


def read_params(params: pb.SamplingParams) -> dict[str, Any]:
    """The fields that are set, by their names in `SamplingParams`."""
    fields: dict[str, Any] = {}
    for field, value in params.ListFields():
        if isinstance(value, pb.TokenIds):
            fields[field.name] = list(value.ids)
        elif isinstance(value, pb.Strings):
            fields[field.name] = list(value.values)
        elif isinstance(value, pb.LogitBias):
            fields[field.name] = dict(value.biases)
        elif isinstance(value, pb.UpToContext):
            fields["max_tokens"] = None
        else:
            fields[field.name] = value
    return fields


# The server writes responses.


def started(stream: Stream) -> pb.GenerateResponse:
    """The first message of a stream."""
    message = pb.Started(request_id=stream.id, prompt_tokens=stream.usage.prompt_tokens)
    return pb.GenerateResponse(started=message)


def sample(delta: Delta) -> pb.Sample:
    """The message of a delta."""
    message = pb.Sample(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(_token_logprobs(item) for item in delta.logprobs)
    if delta.finish_reason is not None:
        message.finish_reason = _REASONS[delta.finish_reason]
    return message


def finished(stream: Stream) -> pb.Finished:
    """The part of the last message that is known once a stream has ended."""
    usage, timing = stream.usage, stream.timing
    message = pb.Finished(
        usage=pb.Usage(**dataclasses.asdict(usage)), timing=pb.Timing(**dataclasses.asdict(timing))
    )
    if stream.prompt_logprobs is not None:
        message.prompt_logprobs.tokens.extend(
            pb.TokenLogprobs(token_id=token_id) if item is None else _token_logprobs(item)
            for token_id, item in zip(stream.prompt_token_ids, stream.prompt_logprobs, strict=True)
        )
    return message


def embeddings(result: Embeddings) -> pb.EmbedResponse:
    """The response; vectors are added one by one, so that other threads can run in between."""
    message = pb.EmbedResponse(usage=pb.Usage(prompt_tokens=sum(result.num_tokens)))
    for vector, num_tokens in zip(result.vectors, result.num_tokens, strict=True):
        message.embeddings.add(values=vector.tolist(), num_tokens=num_tokens)
    return message


def model(info: ModelInfo) -> pb.Model:
    return pb.Model(**dataclasses.asdict(info))


def stats(stats: EngineStats) -> pb.Stats:
    last_step = pb.StepStats(**stats.last_step._asdict())
    return pb.Stats(**{**stats._asdict(), "last_step": last_step})


def _token_logprobs(item: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.Logprob(token_id=i, logprob=logprob) for i, logprob in item.top]
    return pb.TokenLogprobs(token_id=item.token_id, logprob=item.logprob, top=top)


# The client writes requests.


def write_chat(messages: Iterable[Mapping[str, str]]) -> pb.Chat:
    """A conversation; raises `TypeError` for keys other than `role` and `content`."""
    chat = pb.Chat()
    for message in messages:
        unknown = message.keys() - {"role", "content"}
        if unknown:
            raise TypeError(f"messages: {_listed(unknown)} is unknown; set only role and content")
        chat.messages.add(**message)
    return chat


def write_params(fields: Mapping[str, Any]) -> pb.SamplingParams:
    """The message with `fields` set. None leaves a field unset, but for `max_tokens`: the context.

    Raises `TypeError` for unknown names and wrong types, and `ValueError` for numbers beyond 64
    bits; both name the field.
    """
    unknown = fields.keys() - _PARAMS
    if unknown:
        raise TypeError(f"unknown options {_listed(unknown)}; there are {_listed(_PARAMS)}")
    params = pb.SamplingParams()
    for name, value in fields.items():
        if value is not None:
            set_field(params, name, value)
        elif name == "max_tokens":
            params.up_to_context.SetInParent()
    return params


def set_field(message: Any, name: str, value: Any) -> None:
    """Set a field of a request, which may be a collection; errors name the field."""
    target = getattr(message, name)
    try:
        if isinstance(target, pb.TokenIds):
            target.SetInParent()  # marks it as set even if it is empty
            target.ids.extend(value)
        elif isinstance(target, pb.Strings):
            target.SetInParent()
            target.values.extend([value] if isinstance(value, str) else value)
        elif isinstance(target, pb.LogitBias):
            target.SetInParent()
            target.biases.update(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}={value!r:.80}: {error}") from error


# The client reads responses.


def read_sample(message: pb.Sample) -> Delta:
    return Delta(
        message.index,
        message.text,
        list(message.token_ids),
        [_read_token_logprobs(item) for item in message.logprobs],
        _REASONS_BY_NUMBER.get(message.finish_reason),
    )


def read_usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.output_tokens)


def read_timing(message: pb.Timing) -> Timing:
    return Timing(**{field.name: value for field, value in message.ListFields()})


def read_prompt_logprobs(message: pb.Finished) -> list[TokenLogprobs | None] | None:
    if not message.HasField("prompt_logprobs"):
        return None
    tokens = message.prompt_logprobs.tokens
    return [_read_token_logprobs(t) if t.HasField("logprob") else None for t in tokens]


def read_result(message: pb.CompleteResponse) -> Result:
    end = message.finished
    return Result(
        [read_sample(item) for item in message.samples],
        read_prompt_logprobs(end),
        read_usage(end.usage),
        read_timing(end.timing),
    )


def read_embeddings(message: pb.EmbedResponse) -> Embeddings:
    vectors = [np.array(item.values, np.float32) for item in message.embeddings]
    return Embeddings(np.stack(vectors), [item.num_tokens for item in message.embeddings])


def read_model(message: pb.Model) -> ModelInfo:
    names = [field.name for field in dataclasses.fields(ModelInfo)]
    return ModelInfo(**{name: getattr(message, name) for name in names})


def read_stats(message: pb.Stats) -> EngineStats:
    fields = {name: getattr(message, name) for name in EngineStats._fields}
    last = StepStats(**{name: getattr(message.last_step, name) for name in StepStats._fields})
    return EngineStats(**{**fields, "last_step": last})


def _read_token_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((item.token_id, item.logprob) for item in message.top)
    return TokenLogprobs(message.token_id, message.logprob, top)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
