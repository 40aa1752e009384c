"""What every request passes before the app sees it: pure ASGI, so that a refusal costs little.

In this order: a request id in and out, the API key, and for a request to generate or to embed
whether the model does that, and the room in the queue; the body has not been looked at by then.
Whatever the app lets escape ends here as a 500 that tells nothing, and is logged.
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
    """Whether a path asks for a key, where there are keys."""
    return path.startswith("/v1/") or path in KEY_PATHS


class RequestMiddleware:
    """ASGI middleware. Leaves `request_id`, `client_request_id` (the client's own, or None) and
    `key_name` in the request's state."""

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
        is_sound = given is None or _REQUEST_ID.fullmatch(given) is not None
        engine_request_id = given.decode() if given is not None and is_sound else None
        state = scope.setdefault("state", {})
        state["client_request_id"] = engine_request_id
        state["request_id"] = engine_request_id or uuid.uuid4().hex
        state["key_name"] = ""
        reply = _HeaderSender(send, state["request_id"])
        try:
            if not is_sound:
                text = "X-Request-Id must be 1 to 128 printable ASCII characters without spaces"
                raise ServiceError(ErrorKind.INVALID, text, field="X-Request-Id")
            self._check(scope, headers, state)
        except ServiceError as error:
            if scope["path"] in INFERENCE_PATHS:
                self.metrics.refused("http", error.kind)
            await error_response(error)(scope, receive, reply)
            return
        try:
            await self.app(scope, receive, reply)
        except Exception:
            logging.exception("request %s: %s", state["request_id"], scope["path"])
            if reply.has_started:
                raise  # nothing sound can follow: the server cuts the connection
            status, body = internal_error()
            await json_response(body, status)(scope, receive, reply)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], state: dict[str, Any]) -> None:
        path = scope["path"]
        if self.keys is not None and requires_key(path):
            token = bearer_token(headers.get(b"authorization", b"").decode("latin-1"))
            name = self.keys.name_of(token)
            if name is None:
                what = "is not known" if token else "is missing"
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
    """`send` that puts the common headers on the response, where it has none of the name."""

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
