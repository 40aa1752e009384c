"""From a checked body to the service's requests: what both endpoints do alike."""

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
    service: Service, ask: GenerationFields, changes: Mapping[str, Any]
) -> SamplingParams:
    """The sampling parameters that a body asks for, `changes` over them; checks the rest of the
    fields that both endpoints have."""
    service.check_model(ask.model or "")
    if ask.stream_options is not None and not ask.stream:
        raise invalid_field("stream_options", "stream_options needs stream to be true")
    return service.params({**ask.sampling_fields(), **changes})


def generation_requests(
    request: Request, ask: GenerationFields, prompts: Sequence[Prompt], params: SamplingParams
) -> list[GenerationRequest]:
    """One a prompt."""
    state = request.scope["state"]
    base = engine_request_id(request, ask.request_id)
    ids = [base] if len(prompts) == 1 else [f"{base}.{i}" for i in range(len(prompts))]
    return [
        GenerationRequest(
            prompt,
            params,
            request_id=request_id,
            priority=ask.priority or 0,
            cache_salt=ask.cache_salt or "",
            timeout_s=ask.timeout_s,
            protocol="http",
            user=ask.user or state["key_name"],
        )
        for prompt, request_id in zip(prompts, ids, strict=True)
    ]


def engine_request_id(request: Request, given: str | None) -> str:
    """The loop's id of a request. The client's `request_id` is taken as it is, and refused while it
    is in use; an `X-Request-Id` may be that of several, so it becomes the beginning of the id."""
    state = request.scope["state"]
    if given is None and state["client_request_id"] is not None:
        return f"{state['request_id']}.{uuid.uuid4().hex[:12]}"
    return given or state["request_id"]


def includes_usage(ask: GenerationFields) -> bool:
    return ask.stream_options is not None and bool(ask.stream_options.include_usage)


def invalid_field(field: str, text: str) -> ServiceError:
    return ServiceError(ErrorKind.INVALID, text, field=field)
