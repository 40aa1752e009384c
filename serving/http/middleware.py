"""The middleware in front of the app, in plain ASGI, so that refusing a request costs little.

It checks, in this order: the request id, the API key, and for a request to generate or to embed
whether the model can do that and whether the queue has room. The body has not been read by then.
An exception that escapes the app is logged here and becomes a 500 without details.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from absl import logging
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.serving.auth import ApiKeys, bearer_token
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.http.errors import error_response, internal_error, json_response
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.service import Service

EMBEDDING_PATH = "/v1/embeddings"
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
INFERENCE_PATHS = GENERATION_PATHS | {EMBEDDING_PATH}
KEY_PATHS = frozenset({"/tokenize", "/detokenize", "/metrics"})

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


def requires_key(path: str) -> bool:
    """Whether a path needs a key, if the server has keys."""
    return path.startswith("/v1/") or path in KEY_PATHS


class RequestMiddleware:
    """ASGI middleware that sets `request_id`, `client_request_id` (the client's own, or None) and
    `key_name` in the state of the request."""

    def __init__(self, app: ASGIApp, *, service: Service, keys: ApiKeys | None, metrics: Metrics):
        self.app = app
        self.service = service
        self.keys = keys
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        is_valid = given is None or _REQUEST_ID.fullmatch(given) is not None
        client_id = given.decode() if given is not None and is_valid else None
        state = scope.setdefault("state", {})
        state["client_request_id"] = client_id
        state["request_id"] = client_id or uuid.uuid4().hex
        state["key_name"] = ""
        send_with_headers = _HeaderSender(send, state["request_id"])
        try:
            if not is_valid:
                text = "X-Request-Id must be 1 to 128 printable ASCII characters without spaces"
                raise ServiceError(ErrorKind.INVALID, text, field="X-Request-Id")
            self._check(scope, headers, state)
        except ServiceError as error:
            if scope["path"] in INFERENCE_PATHS:
                self.metrics.count_refusal("http", error.kind)
            await error_response(error)(scope, receive, send_with_headers)
            return
        try:
            await self.app(scope, receive, send_with_headers)
        except Exception:
            logging.exception("request %s: %s", state["request_id"], scope["path"])
            if send_with_headers.has_started:
                raise  # the response is incomplete: the server closes the connection
            status, body = internal_error()
            await json_response(body, status)(scope, receive, send_with_headers)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], state: dict[str, Any]) -> None:
        path = scope["path"]
        if self.keys is not None and requires_key(path):
            token = bearer_token(headers.get(b"authorization", b"").decode("latin-1"))
            name = self.keys.name_of(token)
            if name is None:
                what = "is unknown" if token else "is missing"
                text = f"the API key {what}; send the header Authorization: Bearer KEY"
                raise ServiceError(ErrorKind.UNAUTHENTICATED, text)
            state["key_name"] = name
        if path in INFERENCE_PATHS and scope["method"] == "POST":
            if path == EMBEDDING_PATH:
                self.service.check_can_embed()
            else:
                self.service.check_can_generate()
            self.service.loop.check_capacity()


class _HeaderSender:
    """A `send` that adds the common headers to the response, unless it sets them itself."""

    def __init__(self, send: Send, request_id: str):
        self._send = send
        self._request_id = request_id.encode()
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        if not self.has_started and message["type"] == "http.response.start":
            self.has_started = True
            headers = list(message.get("headers", ()))
            names = {name for name, _ in headers}
            headers += [header for header in _SECURITY_HEADERS if header[0] not in names]
            headers.append((b"x-request-id", self._request_id))
            message = {**message, "headers": headers}
        await self._send(message)
