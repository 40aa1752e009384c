"""The endpoints that tell about the server and its model, and those that count tokens."""

from __future__ import annotations

import collections
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.engine.stats import EngineStats
from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.http.chat import conversation
from jaxinfer.serving.http.errors import json_response
from jaxinfer.serving.http.request_body import read_json
from jaxinfer.serving.http.request_parsing import invalid_field
from jaxinfer.serving.http.request_schema import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from jaxinfer.serving.http.serialization import to_json
from jaxinfer.serving.service import Service

RATE_WINDOW_S = 5.0


def model_fields(service: Service) -> dict[str, Any]:
    """OpenAI's description of a model, and what else there is to know of this one."""
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
    body = {"object": "list", "data": [model_fields(service)]}
    return json_response(to_json(body).encode())


def get_model(service: Service, name: str) -> Response:
    if not name:
        raise ServiceError(ErrorKind.NOT_FOUND, "the model's name is empty", field="model")
    service.check_model(name)
    return json_response(to_json(model_fields(service)).encode())


async def tokenize(request: Request, service: Service, limits: LimitsConfig) -> Response:
    """`prompt` or `messages` to the token ids that a request to generate would have."""
    ask = parse_request(TokenizeRequest, await read_json(request, limits))
    service.check_model(ask.model or "")
    if (ask.prompt is None) == (ask.messages is None):
        raise invalid_field("prompt", "give either prompt or messages")
    if ask.messages is not None:
        if ask.add_special_tokens is not None:
            text = "add_special_tokens is for prompt; a chat template writes its own"
            raise invalid_field("add_special_tokens", text)
        tokens = await service.tokenize(conversation(ask.messages))
    else:
        adds = ask.add_special_tokens is not False
        tokens = await service.tokenize(ask.prompt or "", add_special_tokens=adds)
    body = {"tokens": tokens, "count": len(tokens), "max_model_len": service.model.max_len}
    return json_response(to_json(body).encode())


async def detokenize(request: Request, service: Service, limits: LimitsConfig) -> Response:
    """The text of `tokens`, special tokens written out; as many as the model's context holds."""
    ask = parse_request(DetokenizeRequest, await read_json(request, limits))
    service.check_model(ask.model or "")
    max_len = service.model.max_len
    if len(ask.tokens) > max_len:
        text = f"tokens has {len(ask.tokens)} ids; the context holds {max_len}: send fewer at once"
        raise invalid_field("tokens", text)
    try:
        text = await service.detokenize(ask.tokens)
    except ServiceError as error:
        raise invalid_field("tokens", error.message) from error
    return json_response(to_json({"prompt": text}).encode())


class RateMeter:
    """Tokens a second of late, from the counter as it stood whenever someone asked."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def read(self, stats: EngineStats) -> float:
        """Over the readings of `RATE_WINDOW_S`; the first one goes by the last step."""
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
    stats = service.stats
    body = stats._asdict()
    body["last_step"] = stats.last_step._asdict()
    body["tokens_per_second"] = meter.read(stats)
    return json_response(to_json(body).encode())


def health_response(is_well: bool, state: str) -> Response:
    return json_response(to_json({"status": state}).encode(), 200 if is_well else 503)
