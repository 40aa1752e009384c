"""The bodies of requests: OpenAI's fields, and fields of the engine's own.

Every field is honoured or refused. OpenAI's fields that this server does not support are in
`UNSUPPORTED_*`, each with the values that request nothing; null means "not given" everywhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)

from jaxinfer.sampling.params import (
    MAX_BAD_WORDS,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_SCALE,
    MAX_SEED,
)
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import CHAT_ROLES

TOKEN_ID = {"type": "integer", "minimum": 0, "title": "TokenId"}  # the document adds the maximum
MAX_ID_LEN = 256  # characters of a request id, a user, a cache salt
MAX_PROBLEMS = 5  # listed in one error
_DECIMAL = "(0|[1-9][0-9]{0,8})"  # canonical, so that no two keys mean the same token id

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {"suffix": (None, "")}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = _UNSUPPORTED | {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),  # there are no tools to call
    "prediction": (None,),
    "prompt_cache_key": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "safety_identifier": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
_UNSUPPORTED_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}


def _add_unsupported(fields: Mapping[str, tuple[Any, ...]], schema: dict[str, Any]) -> None:
    for name, values in fields.items():
        text = "Not supported: only these values, which request nothing, are accepted."
        schema["properties"][name] = {"enum": list(values), "description": text}


def _add_either(schema: dict[str, Any]) -> None:
    """State in the schema of `TokenizeRequest` that it takes a prompt or messages."""
    null = {"type": "null"}
    schema["oneOf"] = [
        {
            "properties": {"prompt": {"type": "string"}, "messages": null},
            "required": ["prompt"],
        },
        {
            "properties": {
                "messages": {"type": "array"},
                "prompt": null,
                "add_special_tokens": null,
            },
            "required": ["messages"],
        },
    ]


def strict(unsupported: Mapping[str, tuple[Any, ...]] | None = None) -> ConfigDict:
    return ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra=functools.partial(_add_unsupported, unsupported or {}),
    )


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)


def prompt_forms(value: Any) -> list[str] | list[list[int]]:
    """Reduce OpenAI's four forms of a prompt to two: texts, or lists of token ids."""
    prompts = [value] if isinstance(value, str) or (value and _is_token_ids(value)) else value
    if isinstance(prompts, list) and prompts:
        if all(isinstance(p, str) for p in prompts):
            kinds = prompts
        else:
            kinds = [p for p in prompts if p and _is_token_ids(p)]
        if len(kinds) == len(prompts) and all(prompts):
            return prompts
    raise ValueError(
        "must be a text, a list of texts, a list of token ids, or a list of such lists, none empty"
    )


def _stop(value: Any) -> list[str] | None:
    stops = [value] if isinstance(value, str) else value
    if stops is None or (isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)):
        return stops
    raise ValueError("must be a text or a list of texts, none empty")


def _token_ids(value: Any) -> list[int] | None:
    if value is None or _is_token_ids(value):
        return value
    raise ValueError("must be a list of token ids")


def _given_token_ids(value: Any) -> list[int]:
    if _is_token_ids(value):
        return value
    raise ValueError("must be a list of token ids")


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if isinstance(value, dict) and all(re.fullmatch(_DECIMAL, key) for key in value):
        return {int(key): bias for key, bias in value.items()}
    raise ValueError("must be an object of token ids, as decimal texts, to numbers")


def _off(value: Any) -> None:
    if value not in (None, False) or (value == 0 and value is not False):
        raise ValueError("is not supported by this server; leave it out")


def _content(value: Any) -> str:
    """The text of a message; OpenAI's parts of type text are concatenated."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a list of parts of type text")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"a part is of type {kind!r}; this server takes only text")
        if kind != "text" or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('each part must be {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in value)


def _role(value: Any) -> str:
    role = CHAT_ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        raise ValueError(f"must be one of {', '.join(CHAT_ROLES)}; there are no tools here")
    return role


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "items": TOKEN_ID}
_SOME_TOKEN_IDS = _TOKEN_IDS | {"minItems": 1}
_STOP_SCHEMA = _nullable({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})
PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _SOME_TOKEN_IDS,
        {"type": "array", "items": _SOME_TOKEN_IDS, "minItems": 1},
    ]
}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]
}
_ROLE_SCHEMA = {"enum": ["system", "developer", "user", "assistant"]}
_LOGIT_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": f"^{_DECIMAL}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIAS,
}
# Exactly 0, or large enough to divide by.
_TEMPERATURE_SCHEMA = {
    "anyOf": [
        {"type": "number", "enum": [0]},
        {"type": "number", "minimum": 1 / MAX_SCALE, "maximum": MAX_SCALE},
        {"type": "null"},
    ]
}

Penalty = Annotated[float, Field(ge=-2, le=2)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_ID_LEN)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
MaxTokens = Annotated[int, Field(ge=0, le=MAX_INT32)]


class StreamOptions(BaseModel):
    model_config = strict()
    include_usage: bool | None = None
    include_obfuscation: Annotated[
        Any, PlainValidator(_off), WithJsonSchema({"enum": [None, False]})
    ] = None


class GenerationFields(BaseModel):
    """The fields of both endpoints, named as in `SamplingParams` where it has them."""

    model_config = strict()
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=MAX_ID_LEN)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[Any, PlainValidator(_stop), WithJsonSchema(_STOP_SCHEMA)] = None
    temperature: Annotated[float | None, WithJsonSchema(_TEMPERATURE_SCHEMA)] = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[
        Any, PlainValidator(_logit_bias), WithJsonSchema(_nullable(_LOGIT_BIAS_SCHEMA))
    ] = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1 / MAX_SCALE, le=MAX_SCALE)] | None = None
    min_tokens: MaxTokens | None = None
    stop_token_ids: Annotated[
        Any, PlainValidator(_token_ids), WithJsonSchema(_nullable(_TOKEN_IDS))
    ] = None
    ignore_eos: bool | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS)] | None
    ) = None
    allowed_token_ids: Annotated[
        Any, PlainValidator(_token_ids), WithJsonSchema(_nullable(_SOME_TOKEN_IDS))
    ] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_LEN)] | None = None
    request_id: Name | None = None
    timeout_s: Annotated[float, Field(ge=0)] | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the client set."""
        values = ((name, getattr(self, name)) for name in SAMPLING_FIELDS)
        return {name: value for name, value in values if value is not None}


SAMPLING_FIELDS = (
    *("n", "seed", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("ignore_eos", "bad_words", "allowed_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "prompt_logprobs"),
)


class CompletionRequest(GenerationFields):
    model_config = strict(UNSUPPORTED_COMPLETION)
    prompt: Annotated[Any, PlainValidator(prompt_forms), WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: MaxTokens | None = None  # 16
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None


class Message(BaseModel):
    """A message; its `name` is passed to the chat template, which may ignore it."""

    model_config = strict(_UNSUPPORTED_MESSAGE)
    role: Annotated[Any, PlainValidator(_role), WithJsonSchema(_ROLE_SCHEMA)]
    content: Annotated[Any, PlainValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
    name: str | None = None


class ChatRequest(GenerationFields):
    model_config = strict(UNSUPPORTED_CHAT)
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: MaxTokens | None = None  # up to the context
    max_completion_tokens: MaxTokens | None = None  # the same, by its newer name
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None


class TokenizeRequest(BaseModel):
    """Either `prompt`, or `messages`, whose template writes its own special tokens."""

    model_config = strict() | ConfigDict(json_schema_extra=_add_either)
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # true


class DetokenizeRequest(BaseModel):
    model_config = strict()
    model: str | None = None
    tokens: Annotated[Any, PlainValidator(_given_token_ids), WithJsonSchema(_TOKEN_IDS)]


Request = TypeVar("Request", bound=BaseModel)


def parse_request(kind: type[Request], body: dict[str, Any]) -> Request:
    """Validate a body; the `ServiceError` names the first field at fault and lists all problems."""
    unsupported = {CompletionRequest: UNSUPPORTED_COMPLETION, ChatRequest: UNSUPPORTED_CHAT}
    body = _without(body, unsupported.get(kind, {}), "")
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [
            _without(m, _UNSUPPORTED_MESSAGE, f"messages[{i}].") if isinstance(m, dict) else m
            for i, m in enumerate(messages)
        ]
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        texts = [_describe(dict(p)) for p in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            texts.append(f"and {len(problems) - MAX_PROBLEMS} more")
        text, field = "; ".join(texts), _path(problems[0]["loc"])
        raise ServiceError(ErrorKind.INVALID, text, field=field) from error


def _without(
    body: dict[str, Any], unsupported: Mapping[str, tuple[Any, ...]], prefix: str
) -> dict[str, Any]:
    """The body without unsupported fields; raises `ServiceError` if one requests something."""
    for name, values in unsupported.items():
        if name in body and not any(_is_same(body[name], value) for value in values):
            text = f"{prefix}{name} is not supported by this server; leave it out"
            raise ServiceError(ErrorKind.INVALID, text, field=prefix + name)
    return {name: value for name, value in body.items() if name not in unsupported}


def _is_same(given: Any, value: Any) -> bool:
    return type(given) is type(value) and given == value  # 0 is not False


def _describe(problem: dict[str, Any]) -> str:
    path = _path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{path} is not a field of this request"
    if problem["type"] == "missing":
        return f"{path} is missing"
    text = problem["msg"].removeprefix("Value error, ")
    given = repr(problem["input"])
    given = given if len(given) <= 80 else f"{given[:80]}..."
    return f"{path}: {text[0].lower()}{text[1:]}; it is {given}"


def _path(loc: tuple[int | str, ...]) -> str:
    """A location as a path, such as `messages[0].content`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
