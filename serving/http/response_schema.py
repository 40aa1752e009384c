"""What the endpoints answer, for the OpenAPI document. Answers themselves are written as bytes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
Count = Annotated[int, Field(ge=0)]


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseModel):
    error: ErrorDetail


class PromptDetails(ResponseModel):
    cached_tokens: Count  # found in the prefix cache


class Usage(ResponseModel):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(ResponseModel):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: list[ChatLogprob | None] = []


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatLogprobs(ResponseModel):
    content: list[ChatLogprob]
    refusal: None


class ChatChoice(ResponseModel):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: list[ChatLogprob | None] = []


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Embedding(ResponseModel):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str  # base64 of little-endian float32


class EmbeddingUsage(ResponseModel):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(ResponseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Model(ResponseModel):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count  # tokens of prompt and output together
    vocab_size: Count
    num_parameters: Count
    dtype: str
    has_chat_template: bool
    embedding_dim: Count  # numbers of an encoder's vector; 0: the model generates


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(ResponseModel):
    tokens: list[Count]
    count: Count
    max_model_len: Count


class Text(ResponseModel):
    prompt: str


class HealthBody(ResponseModel):
    status: str


class StepBody(ResponseModel):
    num_rows: Count
    num_tokens: Count
    total_s: float
    wait_s: float


class Stats(BaseModel):
    """The engine's counters, as `EngineStats` has them, and the rate of the last seconds."""

    model_config = ConfigDict(extra="allow")
    last_step: StepBody
    tokens_per_second: float


_EVENT = {
    "description": "One of the server-sent events; its data is a JSON object of the same fields as "
    "the whole answer, with `delta` for `message`, or an `error`. `[DONE]` is the last one.",
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def responses(kind: Any, *statuses: int, is_streamed: bool = False) -> dict[int | str, Any]:
    """FastAPI's `responses` of an endpoint that responses with `kind` or one of these errors."""
    good: dict[str, Any] = {"model": kind}
    if is_streamed:
        good["content"] = {"text/event-stream": {"schema": _EVENT}}
    errors = {status: {"model": ErrorBody} for status in (*statuses, 500)}
    return {200: good, **errors}
