"""The bodies of responses: one definition that documents them and that encodes them.

Each body is a `TypedDict`. FastAPI derives the OpenAPI document from it, pyright checks the code
that builds it, and `serialization.JsonEncoder` writes it as JSON: a value that does not match its
definition raises there.
"""

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,  # pydantic needs these before Python 3.12
)

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]
Count = Annotated[int, Field(ge=0)]

_closed = with_config(ConfigDict(extra="forbid"))


@_closed
class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@_closed
class ErrorBody(TypedDict):
    error: ErrorDetail


@_closed
class PromptDetails(TypedDict):
    cached_tokens: Count  # found in the prefix cache


@_closed
class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails


@_closed
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@_closed
class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


@_closed
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


@_closed
class CompletionChoice(TypedDict):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: NotRequired[list[ChatLogprob | None]]


@_closed
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@_closed
class CompletionChunkChoice(TypedDict):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None  # set in the last event of a choice
    prompt_logprobs: NotRequired[list[ChatLogprob | None]]


@_closed
class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]  # with `include_usage`: set in the last event


@_closed
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


@_closed
class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


@_closed
class ChatChoice(TypedDict):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: NotRequired[list[ChatLogprob | None]]


@_closed
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage


@_closed
class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]  # in the first event of a choice
    content: str


@_closed
class ChatChunkChoice(TypedDict):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None  # set in the last event of a choice
    prompt_logprobs: NotRequired[list[ChatLogprob | None]]


@_closed
class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]  # with `include_usage`: set in the last event


@_closed
class Embedding(TypedDict):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str  # base64 of little-endian float32


@_closed
class EmbeddingUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


@_closed
class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@_closed
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count  # tokens of prompt and output together
    vocab_size: Count
    num_parameters: Count
    dtype: str
    has_chat_template: bool
    embedding_dim: Count  # length of an encoder's vectors; 0: the model generates


@_closed
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


@_closed
class Tokens(TypedDict):
    tokens: list[Count]
    count: Count
    max_model_len: Count


@_closed
class Text(TypedDict):
    prompt: str


@_closed
class HealthBody(TypedDict):
    status: str


@_closed
class StepBody(TypedDict):
    num_rows: Count
    num_tokens: Count
    total_s: float
    wait_s: float


@with_config(ConfigDict(extra="allow"))
class Stats(TypedDict):
    """The engine's counters, as `EngineStats` names them, and the recent token rate."""

    last_step: StepBody
    tokens_per_second: float


def responses(
    body: Any, *statuses: int, chunk: type[Any] | None = None
) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of an endpoint that returns `body`, or an error of these statuses.

    With `chunk` the endpoint also streams: `chunk` is the body of each server-sent event.
    """
    success: dict[str, Any] = {"model": body}
    if chunk is not None:
        success["content"] = {"text/event-stream": {"schema": _event_schema(chunk)}}
    errors = {status: {"model": ErrorBody} for status in (*statuses, 500)}
    return {200: success, **errors}


def _event_schema(chunk: type[Any]) -> dict[str, Any]:
    bodies = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in (chunk, ErrorBody)]
    body = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": bodies},
    }
    return {
        "description": "One server-sent event. Its data is the JSON of a chunk, or of an error "
        "after which the stream ends; the data of the last event is `[DONE]`.",
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, body]}},
        "required": ["data"],
    }
