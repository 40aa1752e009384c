"""`POST /v1/completions`: the continuations of prompts, which are texts or token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.request import TokenLogprobs
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.generation import Delta, Prompt, Result
from jaxinfer.serving.http import response_schema as schema
from jaxinfer.serving.http.generation_response import GenerationResponse
from jaxinfer.serving.http.logprobs import Offsets, TokenNames, completion_logprobs
from jaxinfer.serving.http.request_body import read_json
from jaxinfer.serving.http.request_parsing import (
    generation_requests,
    includes_usage,
    invalid_field,
    sampling_params,
)
from jaxinfer.serving.http.request_schema import CompletionRequest, parse_request
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

DEFAULT_MAX_TOKENS = 16  # OpenAI's

_encode_chunk = JsonEncoder(schema.CompletionChunk)
_encode_response = JsonEncoder(schema.Completion)


async def complete(
    request: Request, service: Service, tokenizer: Tokenizer | None, limits: LimitsConfig
) -> Response:
    """Handle the endpoint; raises `ServiceError` for a body that cannot be served."""
    body = parse_request(CompletionRequest, await read_json(request, limits))
    changes: dict[str, Any] = {
        "max_tokens": DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    }
    if body.best_of is not None and body.best_of != (body.n or 1):
        text = f"best_of={body.best_of} is not supported; leave it out, or ask for n"
        raise invalid_field("best_of", text)
    if body.logprobs is not None:
        changes["logprobs"] = body.logprobs
        if body.echo:
            changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    params = sampling_params(service, body, changes)
    prompts: list[Prompt] = list(body.prompt)
    requests = generation_requests(request, body, prompts, params)
    echoes = None
    if body.echo:
        echoes = [_text_of(service, prompt, params) for prompt in prompts]
    response_id = f"cmpl-{requests[0].request_id}"
    identity = ResponseIdentity(response_id, int(time.time()), service.model.name)
    serializer = CompletionSerializer(identity, body, params, tokenizer, echoes)
    return GenerationResponse(
        service, requests, serializer, is_stream=bool(body.stream), field_names={}
    )


def _text_of(service: Service, prompt: Prompt, params: SamplingParams) -> str:
    if isinstance(prompt, str):
        return prompt
    assert isinstance(prompt, Sequence)
    service.check_length(prompt, "prompt")
    return service.tokenizer.decode(prompt, skip_special_tokens=params.skip_special_tokens)


class CompletionSerializer:
    """Writes text completions; see `ResponseSerializer`. `echoes` are the texts of the prompts,
    with which the choices begin."""

    def __init__(
        self,
        identity: ResponseIdentity,
        body: CompletionRequest,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        echoes: list[str] | None,
    ):
        self._identity = identity
        self._n = params.n
        self._num_top = params.logprobs
        self._skip_special_tokens = params.skip_special_tokens
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._echoes = echoes
        self._prompt_logprobs = PromptLogprobs(body.prompt_logprobs, self._names)
        self._includes_usage = includes_usage(body)
        self._events = TextEvents(_encode_chunk, self._text_chunk)
        self._offsets: dict[int, Offsets] = {}
        self._begun: set[int] = set()  # choices that have had an event

    def event(self, number: int, stream: Stream, delta: Delta) -> bytes:
        index = number * self._n + delta.index
        has_begun = index in self._begun
        if is_empty(delta) and (has_begun or self._echoes is None):
            return b""
        if has_begun and delta.finish_reason is None and self._num_top is None:
            return self._events.text(index, delta.text)
        text, logprobs, prompt_logprobs = self._parts(number, stream, delta)
        choice: schema.CompletionChunkChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(delta),
        }
        if prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs
        return self._events.chunk(self._chunk([choice]))

    def last_events(self, streams: Sequence[Stream]) -> bytes:
        if not self._includes_usage:
            return b""
        return self._events.chunk({**self._chunk([]), "usage": usage(streams)})

    def whole(self, streams: Sequence[Stream], results: Sequence[Result]) -> bytes:
        choices = [
            self._choice(number, stream, sample)
            for number, (stream, result) in enumerate(zip(streams, results, strict=True))
            for sample in result.samples
        ]
        return _encode_response(
            {
                "id": self._identity.id,
                "object": "text_completion",
                "created": self._identity.created,
                "model": self._identity.model,
                "choices": choices,
                "usage": usage(streams),
            }
        )

    def _choice(self, number: int, stream: Stream, sample: Delta) -> schema.CompletionChoice:
        text, logprobs, prompt_logprobs = self._parts(number, stream, sample)
        choice: schema.CompletionChoice = {
            "index": number * self._n + sample.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": final_reason(sample),
        }
        if prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs
        return choice

    def _parts(
        self, number: int, stream: Stream, delta: Delta
    ) -> tuple[str, schema.CompletionLogprobs | None, list[schema.ChatLogprob | None] | None]:
        """The text, `logprobs` and `prompt_logprobs` of a delta, with those of the prompt where it
        is the first of its choice."""
        index = number * self._n + delta.index
        text, of_prompt = delta.text, None
        entries: list[tuple[int, TokenLogprobs | None]] = []
        if index not in self._begun:
            self._begun.add(index)
            of_prompt = self._prompt_logprobs.read(stream)
            if self._echoes is not None:
                text = self._echoes[number] + text
                entries = self._prompt_entries(stream)
        if self._num_top is None:
            return text, None, of_prompt
        entries += [(entry.token_id, entry) for entry in delta.logprobs]
        offsets = self._offsets_of(index)
        return text, completion_logprobs(entries, self._names, offsets), of_prompt

    def _prompt_entries(self, stream: Stream) -> list[tuple[int, TokenLogprobs | None]]:
        if self._num_top is None:
            return []
        known = stream.prompt_logprobs or [None] * len(stream.prompt_token_ids)
        return [
            (token_id, entry and entry._replace(top=entry.top[: self._num_top]))
            for token_id, entry in zip(stream.prompt_token_ids, known, strict=True)
        ]

    def _offsets_of(self, index: int) -> Offsets:
        if index not in self._offsets:
            skips = self._skip_special_tokens
            self._offsets[index] = Offsets(self._tokenizer, skip_special_tokens=skips)
        return self._offsets[index]

    def _text_chunk(self, index: int, text: str) -> schema.CompletionChunk:
        return self._chunk(
            [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]
        )

    def _chunk(self, choices: list[schema.CompletionChunkChoice]) -> schema.CompletionChunk:
        chunk: schema.CompletionChunk = {
            "id": self._identity.id,
            "object": "text_completion",
            "created": self._identity.created,
            "model": self._identity.model,
            "choices": choices,
        }
        if self._includes_usage:
            chunk["usage"] = None
        return chunk
