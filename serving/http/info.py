"""The endpoints about the server and its model, and the tokenizer's."""

from __future__ import annotations

import collections
import time
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.stats import EngineStats
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.http import response_schema as schema
from jaxinfer.serving.http.chat import conversation
from jaxinfer.serving.http.errors import json_response
from jaxinfer.serving.http.request_body import read_json
from jaxinfer.serving.http.request_parsing import invalid_field
from jaxinfer.serving.http.request_schema import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from jaxinfer.serving.http.serialization import JsonEncoder
from jaxinfer.serving.service import Service

RATE_WINDOW_S = 5.0

_encode_model = JsonEncoder(schema.Model)
_encode_models = JsonEncoder(schema.ModelList)
_encode_tokens = JsonEncoder(schema.Tokens)
_encode_text = JsonEncoder(schema.Text)
_encode_stats = JsonEncoder(schema.Stats)
_encode_health = JsonEncoder(schema.HealthBody)


def model_fields(service: Service) -> schema.Model:
    """OpenAI's description of a model, with fields of this server's own."""
    model = service.model
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "jaxinfer",
        "max_model_len": model.max_len,
        "vocab_size": model.vocab_size,
        "num_parameters": model.num_parameters,
        "dtype": model.dtype,
        "has_chat_template": model.has_chat_template,
        "embedding_dim": model.embedding_dim,
    }


def list_models(service: Service) -> Response:
    """The response of `GET /v1/models`."""
    return json_response(_encode_models({"object": "list", "data": [model_fields(service)]}))


def get_model(service: Service, name: str) -> Response:
    """The response of `GET /v1/models/{name}`; raises `ServiceError` for another model's name."""
    if not name:
        raise ServiceError(ErrorKind.NOT_FOUND, "the model's name is empty", field="model")
    service.check_model(name)
    return json_response(_encode_model(model_fields(service)))


async def tokenize(request: Request, service: Service, limits: LimitsConfig) -> Response:
    """Convert `prompt` or `messages` to the token ids that a request to generate would have."""
    body = parse_request(TokenizeRequest, await read_json(request, limits))
    service.check_model(body.model or "")
    if (body.prompt is None) == (body.messages is None):
        raise invalid_field("prompt", "give either prompt or messages")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            text = "add_special_tokens is for prompt; a chat template adds its own"
            raise invalid_field("add_special_tokens", text)
        tokens = await service.tokenize(conversation(body.messages))
    else:
        adds = body.add_special_tokens is not False
        tokens = await service.tokenize(body.prompt or "", add_special_tokens=adds)
    max_len = service.model.max_len
    return json_response(
        _encode_tokens({"tokens": tokens, "count": len(tokens), "max_model_len": max_len})
    )


async def detokenize(request: Request, service: Service, limits: LimitsConfig) -> Response:
    """Convert at most a context of token ids to their text, special tokens written out."""
    body = parse_request(DetokenizeRequest, await read_json(request, limits))
    service.check_model(body.model or "")
    max_len = service.model.max_len
    if len(body.tokens) > max_len:
        text = f"tokens has {len(body.tokens)} ids; the context holds {max_len}: send fewer at once"
        raise invalid_field("tokens", text)
    try:
        text = await service.detokenize(body.tokens)
    except ServiceError as error:
        raise invalid_field("tokens", error.message) from error
    return json_response(_encode_text({"prompt": text}))


class RateMeter:
    """The recent rate in tokens a second, from the counter's values at earlier reads."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def read(self, stats: EngineStats) -> float:
        """The rate since the oldest read in `RATE_WINDOW_S`, or that of the last step."""
        now = time.monotonic()
        while self._seen and now - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        oldest = self._seen[0] if self._seen else None
        self._seen.append((now, stats.num_generated))
        if oldest is not None and now > oldest[0]:
            return (stats.num_generated - oldest[1]) / (now - oldest[0])
        step = stats.last_step
        return step.num_rows / step.total_s if stats.num_running and step.total_s else 0.0


def stats_response(service: Service, meter: RateMeter) -> Response:
    """The response of `GET /v1/stats`."""
    stats = service.stats
    counters = stats._asdict()
    counters["last_step"] = stats.last_step._asdict()
    body = cast(schema.Stats, {**counters, "tokens_per_second": meter.read(stats)})
    return json_response(_encode_stats(body))


def health_response(is_healthy: bool, state: str) -> Response:
    """The response to a probe: 200 or 503, with the state's name."""
    return json_response(_encode_health({"status": state}), 200 if is_healthy else 503)
