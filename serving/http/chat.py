"""`POST /v1/chat/completions`: a conversation, and the assistant's next message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.generation import Chat, Delta, Result
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
    FINISH_REASONS,
    Envelope,
    PromptLogprobs,
    has_nothing_to_show,
    to_json,
    usage,
)
from jaxinfer.serving.service import Service
from jaxinfer.serving.stream import Stream
from jaxinfer.text.tokenizer import Tokenizer


async def chat(
    request: Request, service: Service, tokenizer: Tokenizer | None, limits: LimitsConfig
) -> Response:
    """The endpoint."""
    ask = parse_request(ChatRequest, await read_json(request, limits))
    changes: dict[str, Any] = {"max_tokens": _max_tokens(ask)}
    if ask.logprobs:
        changes["logprobs"] = ask.top_logprobs or 0
    elif ask.top_logprobs is not None:
        raise invalid_field("top_logprobs", "top_logprobs needs logprobs to be true")
    params = sampling_params(service, ask, changes)
    requests = generation_requests(request, ask, [conversation(ask.messages)], params)
    kind = "chat.completion.chunk" if ask.stream else "chat.completion"
    response_id, model = f"chatcmpl-{requests[0].request_id}", service.model.name
    envelope = Envelope(response_id, kind, int(time.time()), model)
    serializer = ChatSerializer(envelope, ask, params, TokenNames(tokenizer))
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if ask.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    return GenerationResponse(
        service, requests, serializer, is_stream=bool(ask.stream), field_names=names
    )


def conversation(messages: Sequence[Message]) -> Chat:
    """For the chat template."""
    return Chat([message.model_dump(exclude_none=True) for message in messages])


def _max_tokens(ask: ChatRequest) -> int | None:
    old, new = ask.max_tokens, ask.max_completion_tokens
    if old is not None and new is not None and old != new:
        text = f"max_completion_tokens={new} and max_tokens={old} differ; give one of them"
        raise invalid_field("max_completion_tokens", text)
    return old if new is None else new


class ChatSerializer:
    """Writes chat completions; see `sse.ResponseSerializer`."""

    def __init__(
        self, envelope: Envelope, ask: ChatRequest, params: SamplingParams, names: TokenNames
    ):
        self._envelope = envelope
        self._names = names
        self._has_logprobs = params.logprobs is not None
        self._prompt_logprobs = PromptLogprobs(params.prompt_logprobs, names)
        self._wants_usage = includes_usage(ask)
        self._usage_field = ',"usage":null' if self._wants_usage else ""
        self._begun: set[int] = set()

    def event(self, number: int, stream: Stream, delta: Delta) -> bytes:
        """The first of a choice has the role, with or without text."""
        role, extra = "", ""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            role, extra = '"role":"assistant",', self._prompt_logprobs.field(stream)
        elif has_nothing_to_show(delta):
            return b""
        choice = (
            f'{{"index":{delta.index},"delta":{{{role}"content":{to_json(delta.text)}}},'
            f"{self._ending(delta)}{extra}}}"
        )
        return self._envelope.event(choice, usage_field=self._usage_field)

    def last_events(self, streams: Sequence[Stream]) -> bytes:
        if not self._wants_usage:
            return b""
        return self._envelope.event("", usage_field=f',"usage":{to_json(usage(streams))}')

    def whole(self, streams: Sequence[Stream], results: Sequence[Result]) -> bytes:
        (stream,), (result,) = streams, results
        extra = self._prompt_logprobs.field(stream)
        choices = [
            f'{{"index":{sample.index},"message":{{"role":"assistant",'
            f'"content":{to_json(sample.text)},"refusal":null}},{self._ending(sample)}{extra}}}'
            for sample in result.samples
        ]
        return self._envelope.whole(choices, streams)

    def _ending(self, delta: Delta) -> str:
        logprobs = "null"
        if self._has_logprobs:
            logprobs = to_json(chat_logprobs(delta.logprobs, self._names))
        return f'"logprobs":{logprobs},"finish_reason":{FINISH_REASONS[delta.finish_reason]}'
