"""Turns a validated body into requests to the service, for both generation endpoints."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import GenerationRequest, Prompt
from jaxinfer.serving.http.request_schema import GenerationFields
from jaxinfer.serving.service import Service


def sampling_params(
    service: Service, body: GenerationFields, changes: Mapping[str, Any]
) -> SamplingParams:
    """The sampling parameters of a body, overridden by `changes`.

    Checks the other fields that both endpoints have; raises `ServiceError`.
    """
    service.check_model(body.model or "")
    if body.stream_options is not None and not body.stream:
        raise invalid_field("stream_options", "stream_options needs stream to be true")
    return service.params({**body.sampling_fields(), **changes})


def generation_requests(
    request: Request, body: GenerationFields, prompts: Sequence[Prompt], params: SamplingParams
) -> list[GenerationRequest]:
    """A request for each prompt."""
    state = request.scope["state"]
    base = engine_request_id(request, body.request_id)
    ids = [base] if len(prompts) == 1 else [f"{base}.{i}" for i in range(len(prompts))]
    return [
        GenerationRequest(
            prompt,
            params,
            request_id=request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            timeout_s=body.timeout_s,
            protocol="http",
            user=body.user or state["key_name"],
        )
        for prompt, request_id in zip(prompts, ids, strict=True)
    ]


def engine_request_id(request: Request, given: str | None) -> str:
    """The id of a request in the engine loop.

    The client's `request_id` is used as it is, and refused while it is in use. Several requests may
    share an `X-Request-Id`, so that header becomes only the beginning of the id.
    """
    state = request.scope["state"]
    if given is None and state["client_request_id"] is not None:
        return f"{state['request_id']}.{uuid.uuid4().hex[:12]}"
    return given or state["request_id"]


def includes_usage(body: GenerationFields) -> bool:
    """Whether the last event of the stream is to bring the token counts."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def invalid_field(field: str, text: str) -> ServiceError:
    """The error of a field that cannot be honoured."""
    return ServiceError(ErrorKind.INVALID, text, field=field)
