"""Response bodies to JSON bytes, with little work for each token.

A chunk that brings nothing but text is the common case of a stream. All such chunks of one choice
differ in that text alone, so the chunk is encoded once, around a marker, and the text of each token
is put in the marker's place, in a third of the time of encoding the whole chunk.
"""

from __future__ import annotations

import json.encoder
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter

from jaxinfer.engine.request import FinishReason
from jaxinfer.serving.generation import Delta
from jaxinfer.serving.http import response_schema as schema
from jaxinfer.serving.http.logprobs import TokenNames, prompt_logprobs
from jaxinfer.serving.stream import Stream

T = TypeVar("T")

# A client never learns the marker before it is used, so no text of one can hold it.
MARKER = uuid.uuid4().hex

_FINISH_REASONS: Mapping[FinishReason, schema.FinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "stop",
}


class JsonEncoder(Generic[T]):
    """Encodes values of one type of `response_schema` as compact UTF-8 JSON.

    A value that does not match the type raises `PydanticSerializationError`.
    """

    def __init__(self, kind: type[T]):
        self._to_json = TypeAdapter(kind).serializer.to_json

    def __call__(self, value: T) -> bytes:
        return self._to_json(value, warnings="error")


class JsonTemplate:
    """An encoded value in which one string, `MARKER`, is still to be replaced."""

    def __init__(self, encoded: bytes, *, prefix: bytes = b"", suffix: bytes = b""):
        before, after = encoded.split(f'"{MARKER}"'.encode())
        self._before, self._after = prefix + before, after + suffix

    def fill(self, value: str) -> bytes:
        """The value with `value`, which is JSON itself, in the marker's place."""
        return self._before + value.encode() + self._after


class TextEvents(Generic[T]):
    """The events of one streamed response, each a chunk of type `T`."""

    def __init__(self, encode: JsonEncoder[T], text_chunk: Callable[[int, str], T]):
        """`text_chunk(index, text)` is the chunk that brings text alone to a choice."""
        self._encode = encode
        self._text_chunk = text_chunk
        self._templates: dict[int, JsonTemplate] = {}  # keyed by choice

    def chunk(self, chunk: T) -> bytes:
        return event(self._encode(chunk))

    def text(self, index: int, text: str) -> bytes:
        """The event of `text_chunk(index, text)`."""
        template = self._templates.get(index)
        if template is None:
            encoded = self._encode(self._text_chunk(index, MARKER))
            template = JsonTemplate(encoded, prefix=b"data: ", suffix=b"\n\n")
            self._templates[index] = template
        return template.fill(json.encoder.encode_basestring(text))


class ResponseIdentity(NamedTuple):
    """The fields that a response and all its chunks have in common."""

    id: str
    created: int  # seconds of the Unix epoch
    model: str


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


def usage(streams: Sequence[Stream]) -> schema.Usage:
    """The token counts of a response's requests together."""
    num_prompt = sum(stream.usage.prompt_tokens for stream in streams)
    num_output = sum(stream.usage.output_tokens for stream in streams)
    num_cached = sum(stream.usage.cached_tokens for stream in streams)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def finish_reason(delta: Delta) -> schema.FinishReason | None:
    """OpenAI's name of the reason; None while the sample goes on."""
    return None if delta.finish_reason is None else _FINISH_REASONS[delta.finish_reason]


def final_reason(sample: Delta) -> schema.FinishReason:
    """OpenAI's name of the reason why a complete sample ended."""
    assert sample.finish_reason is not None
    return _FINISH_REASONS[sample.finish_reason]


class PromptLogprobs:
    """The field `prompt_logprobs` of a choice, sent with its first token."""

    def __init__(self, num_top: int | None, names: TokenNames):
        self._num_top = num_top
        self._names = names

    def read(self, stream: Stream) -> list[schema.ChatLogprob | None] | None:
        """The field's value; None where the request does not ask for it."""
        if self._num_top is None:
            return None
        entries = [
            None if entry is None else entry._replace(top=entry.top[: self._num_top])
            for entry in stream.prompt_logprobs or ()
        ]
        return prompt_logprobs(entries, self._names)


def is_empty(delta: Delta) -> bool:
    """Whether a delta shows nothing yet: a part of a character, or of a possible stop string."""
    return not delta.text and not delta.logprobs and delta.finish_reason is None
