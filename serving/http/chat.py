"""`POST /v1/chat/completions`: the assistant's next message in a conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.generation import Chat, Delta, Result
from jaxinfer.serving.http import response_schema as schema
from jaxinfer.serving.http.generation_response import GenerationResponse
from jaxinfer.serving.http.logprobs import TokenNames, chat_logprobs
from jaxinfer.serving.http.request_body import read_json
from jaxinfer.serving.http.request_parsing import (
    generation_requests,
    includes_usage,
    invalid_field,
    sampling_params,
)
from jaxinfer.serving.http.request_schema import ChatRequest, Message, parse_request
from jaxinfer.serving.http.serialization import (
    JsonEncoder,
    PromptLogprobs,
    ResponseIdentity,
    TextEvents,
    final_reason,
    finish_reason,
    is_empty,
    usage,
)
from jaxinfer.serving.service import Service
from jaxinfer.serving.stream import Stream
from jaxinfer.text.tokenizer import Tokenizer

_encode_chunk = JsonEncoder(schema.ChatCompletionChunk)
_encode_response = JsonEncoder(schema.ChatCompletion)


async def chat(
    request: Request, service: Service, tokenizer: Tokenizer | None, limits: LimitsConfig
) -> Response:
    """Handle the endpoint; raises `ServiceError` for a body that cannot be served."""
    body = parse_request(ChatRequest, await read_json(request, limits))
    changes: dict[str, Any] = {"max_tokens": _max_tokens(body)}
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise invalid_field("top_logprobs", "top_logprobs needs logprobs to be true")
    params = sampling_params(service, body, changes)
    requests = generation_requests(request, body, [conversation(body.messages)], params)
    response_id = f"chatcmpl-{requests[0].request_id}"
    identity = ResponseIdentity(response_id, int(time.time()), service.model.name)
    serializer = ChatSerializer(identity, body, params, TokenNames(tokenizer))
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    return GenerationResponse(
        service, requests, serializer, is_stream=bool(body.stream), field_names=names
    )


def conversation(messages: Sequence[Message]) -> Chat:
    """The messages in the form that the chat template takes."""
    return Chat([message.model_dump(exclude_none=True) for message in messages])


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        text = f"max_completion_tokens={new} and max_tokens={old} differ; give one of them"
        raise invalid_field("max_completion_tokens", text)
    return old if new is None else new


class ChatSerializer:
    """Writes chat completions; see `ResponseSerializer`."""

    def __init__(
        self,
        identity: ResponseIdentity,
        body: ChatRequest,
        params: SamplingParams,
        names: TokenNames,
    ):
        self._identity = identity
        self._names = names
        self._has_logprobs = params.logprobs is not None
        self._prompt_logprobs = PromptLogprobs(params.prompt_logprobs, names)
        self._includes_usage = includes_usage(body)
        self._events = TextEvents(_encode_chunk, self._text_chunk)
        self._begun: set[int] = set()  # choices that have had an event

    def event(self, number: int, stream: Stream, delta: Delta) -> bytes:
        """The first event of a choice has the role, with or without text."""
        is_first = delta.index not in self._begun
        if not is_first:
            if is_empty(delta):
                return b""
            if delta.finish_reason is None and not self._has_logprobs:
                return self._events.text(delta.index, delta.text)
        message: schema.ChatDelta = {"content": delta.text}
        if is_first:
            self._begun.add(delta.index)
            message = {"role": "assistant", "content": delta.text}
        choice: schema.ChatChunkChoice = {
            "index": delta.index,
            "delta": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": finish_reason(delta),
        }
        if is_first and (entries := self._prompt_logprobs.read(stream)) is not None:
            choice["prompt_logprobs"] = entries
        return self._events.chunk(self._chunk([choice]))

    def last_events(self, streams: Sequence[Stream]) -> bytes:
        if not self._includes_usage:
            return b""
        return self._events.chunk({**self._chunk([]), "usage": usage(streams)})

    def whole(self, streams: Sequence[Stream], results: Sequence[Result]) -> bytes:
        (stream,), (result,) = streams, results
        return _encode_response(
            {
                "id": self._identity.id,
                "object": "chat.completion",
                "created": self._identity.created,
                "model": self._identity.model,
                "choices": [self._choice(stream, sample) for sample in result.samples],
                "usage": usage(streams),
            }
        )

    def _choice(self, stream: Stream, sample: Delta) -> schema.ChatChoice:
        choice: schema.ChatChoice = {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(sample),
            "finish_reason": final_reason(sample),
        }
        if (entries := self._prompt_logprobs.read(stream)) is not None:
            choice["prompt_logprobs"] = entries
        return choice

    def _text_chunk(self, index: int, text: str) -> schema.ChatCompletionChunk:
        return self._chunk(
            [{"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
        )

    def _chunk(self, choices: list[schema.ChatChunkChoice]) -> schema.ChatCompletionChunk:
        chunk: schema.ChatCompletionChunk = {
            "id": self._identity.id,
            "object": "chat.completion.chunk",
            "created": self._identity.created,
            "model": self._identity.model,
            "choices": choices,
        }
        if self._includes_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, delta: Delta) -> schema.ChatLogprobs | None:
        return chat_logprobs(delta.logprobs, self._names) if self._has_logprobs else None
