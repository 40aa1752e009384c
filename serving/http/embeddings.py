"""`POST /v1/embeddings`: a vector for each text, by an encoder."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serving.config import LimitsConfig
from jaxinfer.serving.errors import ErrorKind, ServiceError
from jaxinfer.serving.generation import EmbeddingRequest, Embeddings
from jaxinfer.serving.http.embedding_schema import EmbeddingBody
from jaxinfer.serving.http.errors import json_response
from jaxinfer.serving.http.request_body import read_json
from jaxinfer.serving.http.request_parsing import engine_request_id
from jaxinfer.serving.http.request_schema import parse_request
from jaxinfer.serving.http.serialization import to_json
from jaxinfer.serving.service import Service

T = TypeVar("T")


async def embed(request: Request, service: Service, limits: LimitsConfig) -> Response:
    """The endpoint."""
    ask = parse_request(EmbeddingBody, await read_json(request, limits))
    service.check_model(ask.model or "")
    state = request.scope["state"]
    asked = EmbeddingRequest(
        ask.input,
        normalize=ask.normalize,
        dimensions=ask.dimensions,
        prompt_name=ask.prompt_name,
        truncate=bool(ask.truncate),
        request_id=engine_request_id(request, ask.request_id),
        timeout_s=ask.timeout_s,
        protocol="http",
        user=ask.user or state["key_name"],
    )
    work = service.embed(asked, on_accepted=lambda: state.update(has_stream=True))
    made = await _unless_left(request, work)
    as_bytes = ask.encoding_format == "base64"
    if made.is_large:
        body = await asyncio.to_thread(serialize_embeddings, service.model.name, made, as_bytes)
    else:
        body = serialize_embeddings(service.model.name, made, as_bytes)
    return json_response(body)


def serialize_embeddings(model: str, made: Embeddings, as_bytes: bool) -> bytes:
    """Numbers as JSON, or in base64 the bytes of little-endian float32.

    Vector by vector: one call for all of them would hold Python's lock, and with it the event
    loop, for 0.4 s a million numbers.
    """
    form = _base64 if as_bytes else _numbers
    data = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{form(vector)}}}'
        for index, vector in enumerate(made.vectors)
    )
    num_tokens = sum(made.num_tokens)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    rest = to_json({"model": model, "usage": usage})[1:]
    return f'{{"object":"list","data":[{data}],{rest}'.encode()


def _base64(vector: np.ndarray) -> str:
    return f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'


def _numbers(vector: np.ndarray) -> str:
    """Nine digits tell every float32 apart; what Python writes of it has 17."""
    if not np.isfinite(vector).all():
        raise ValueError("a vector holds NaN or infinity, which JSON has not")
    return f"[{','.join(['%.9g'] * len(vector))}]" % tuple(vector.tolist())


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` brings; it is cancelled when the client leaves before."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ServiceError(ErrorKind.CANCELLED, "the client left before its answer was ready")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))
