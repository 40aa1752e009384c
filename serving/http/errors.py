"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.http.response_schema import ErrorBody

# A retry does not help with these kinds. Their statuses do not say so: OpenAI's clients retry 408
# and 409 by themselves unless told.
_NOT_RETRYABLE = {ErrorKind.DEADLINE, ErrorKind.SLOW_READER, ErrorKind.IN_USE}


def error_json(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The body of an error, in ASCII: a message may quote text that UTF-8 cannot hold."""
    body: ErrorBody = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return json.dumps(body).encode()


def service_error_json(error: ServiceError) -> bytes:
    return error_json(error.message, error.kind.openai_type, param=error.field, code=_code(error))


def error_response(error: ServiceError) -> Response:
    """The response to a failed request; status and headers say what the client may do next."""
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
    """The response to what the router refuses: an unknown path or method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    texts = {
        404: f"{what}: there is no such path; /openapi.json lists the paths",
        405: f"{what}: the path does not allow this method; the header Allow lists those it does",
    }
    message = texts.get(error.status_code, error.detail)
    body = error_json(message, "invalid_request_error", code=f"http_{error.status_code}")
    return json_response(body, error.status_code, dict(error.headers or {}))


def internal_error() -> tuple[int, bytes]:
    """Status and body for a defect: its details go to the log alone, not to the client."""
    text = "the server failed at this request; its log has the reason, under the X-Request-Id"
    return 500, error_json(text, ErrorKind.INTERNAL.openai_type, code="internal")


def _code(error: ServiceError) -> str:
    special: dict[tuple[Any, ...], str] = {
        (ErrorKind.NOT_FOUND, "model"): "model_not_found",
        (ErrorKind.UNAUTHENTICATED, None): "invalid_api_key",
        (ErrorKind.OVERLOADED, None): "rate_limit_exceeded",
    }
    return special.get((error.kind, error.field), error.kind.name.lower())
