"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serving.errors import ErrorKind, ServiceError

# Kinds that another try does not help, whatever a client makes of the status: OpenAI's clients
# repeat 408 and 409 by themselves unless told.
_NOT_RETRYABLE = {ErrorKind.DEADLINE, ErrorKind.SLOW_READER, ErrorKind.IN_USE}


def error_json(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The body of an error. ASCII: a message may quote text that UTF-8 cannot hold."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def service_error_json(error: ServiceError) -> bytes:
    return error_json(error.message, error.kind.openai_type, param=error.field, code=_code(error))


def error_response(error: ServiceError) -> Response:
    """The whole response; status and headers say what a client may do next."""
    headers = {}
    status = error.kind.http_status
    if status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    elif error.kind in _NOT_RETRYABLE:
        headers["X-Should-Retry"] = "false"
    elif error.kind is ErrorKind.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(service_error_json(error), status, headers)


def json_response(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(body, status, headers, media_type="application/json")


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    texts = {
        404: f"{what}: there is nothing at this path; /openapi.json lists what there is",
        405: f"{what}: this path has other methods; the header Allow lists them",
    }
    message = texts.get(error.status_code, error.detail)
    body = error_json(message, "invalid_request_error", code=f"http_{error.status_code}")
    return json_response(body, error.status_code, dict(error.headers or {}))


def internal_error() -> tuple[int, bytes]:
    """For what should not happen: it is in the log, and none of it goes to the client."""
    text = "the server failed at this request; its log tells why, under the X-Request-Id"
    return 500, error_json(text, ErrorKind.INTERNAL.openai_type, code="internal")


def _code(error: ServiceError) -> str:
    special: dict[tuple[Any, ...], str] = {
        (ErrorKind.NOT_FOUND, "model"): "model_not_found",
        (ErrorKind.UNAUTHENTICATED, None): "invalid_api_key",
        (ErrorKind.OVERLOADED, None): "rate_limit_exceeded",
    }
    return special.get((error.kind, error.field), error.kind.name.lower())
