"""`POST /v1/completions`: prompts, as text or as token ids, and what follows each of them."""

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

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(
    request: Request, service: Service, tokenizer: Tokenizer | None, limits: LimitsConfig
) -> Response:
    """The endpoint."""
    ask = parse_request(CompletionRequest, await read_json(request, limits))
    changes: dict[str, Any] = {
        "max_tokens": DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    }
    if ask.best_of is not None and ask.best_of != (ask.n or 1):
        raise invalid_field(
            "best_of", f"best_of={ask.best_of} is not supported; leave it out, or ask for n"
        )
    if ask.logprobs is not None:
        changes["logprobs"] = ask.logprobs
        if ask.echo:
            changes["prompt_logprobs"] = max(ask.logprobs, ask.prompt_logprobs or 0)
    params = sampling_params(service, ask, changes)
    prompts: list[Prompt] = list(ask.prompt)
    requests = generation_requests(request, ask, prompts, params)
    echoes = None
    if ask.echo:
        echoes = [_text_of(service, prompt, params) for prompt in prompts]
    serializer = CompletionSerializer(
        Envelope(
            f"cmpl-{requests[0].request_id}",
            "text_completion",
            int(time.time()),
            service.model.name,
        ),
        ask,
        params,
        tokenizer,
        echoes,
    )
    return GenerationResponse(
        service, requests, serializer, is_stream=bool(ask.stream), field_names={}
    )


def _text_of(service: Service, prompt: Prompt, params: SamplingParams) -> str:
    if isinstance(prompt, str):
        return prompt
    assert isinstance(prompt, Sequence)
    service.check_length(prompt, "prompt")
    return service.tokenizer.decode(prompt, skip_special_tokens=params.skip_special_tokens)


class CompletionSerializer:
    """Writes text completions. `echoes` are the texts of the prompts, which begin the choices."""

    def __init__(
        self,
        envelope: Envelope,
        ask: CompletionRequest,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        echoes: list[str] | None,
    ):
        self._envelope = envelope
        self._n = params.n
        self._num_top = params.logprobs
        self._skip_special_tokens = params.skip_special_tokens
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._echoes = echoes
        self._prompt_logprobs = PromptLogprobs(ask.prompt_logprobs, self._names)
        self._wants_usage = includes_usage(ask)
        self._usage_field = ',"usage":null' if self._wants_usage else ""
        self._offsets: dict[int, Offsets] = {}
        self._begun: set[int] = set()

    def event(self, number: int, stream: Stream, delta: Delta) -> bytes:
        index = number * self._n + delta.index
        if has_nothing_to_show(delta) and (index in self._begun or self._echoes is None):
            return b""
        choice = self._choice(number, stream, delta)
        return self._envelope.event(choice, usage_field=self._usage_field)

    def last_events(self, streams: Sequence[Stream]) -> bytes:
        if not self._wants_usage:
            return b""
        return self._envelope.event("", usage_field=f',"usage":{to_json(usage(streams))}')

    def whole(self, streams: Sequence[Stream], results: Sequence[Result]) -> bytes:
        choices = [
            self._choice(number, stream, sample)
            for number, (stream, result) in enumerate(zip(streams, results, strict=True))
            for sample in result.samples
        ]
        return self._envelope.whole(choices, streams)

    def _choice(self, number: int, stream: Stream, delta: Delta) -> str:
        index = number * self._n + delta.index
        text, extra = delta.text, ""
        entries: list[tuple[int, TokenLogprobs | None]] = []
        if index not in self._begun:
            self._begun.add(index)
            extra = self._prompt_logprobs.field(stream)
            if self._echoes is not None:
                text = self._echoes[number] + text
                entries = self._prompt_entries(stream)
        logprobs = "null"
        if self._num_top is not None:
            entries += [(entry.token_id, entry) for entry in delta.logprobs]
            logprobs = to_json(
                completion_logprobs(entries, self._names, self._offsets_of(number, index))
            )
        finish = FINISH_REASONS[delta.finish_reason]
        return (
            f'{{"index":{index},"text":{to_json(text)},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{extra}}}'
        )

    def _prompt_entries(self, stream: Stream) -> list[tuple[int, TokenLogprobs | None]]:
        if self._num_top is None:
            return []
        known = stream.prompt_logprobs or [None] * len(stream.prompt_token_ids)
        return [
            (token_id, entry and entry._replace(top=entry.top[: self._num_top]))
            for token_id, entry in zip(stream.prompt_token_ids, known, strict=True)
        ]

    def _offsets_of(self, number: int, index: int) -> Offsets:
        if index not in self._offsets:
            skips = self._skip_special_tokens
            self._offsets[index] = Offsets(self._tokenizer, skip_special_tokens=skips)
        return self._offsets[index]
