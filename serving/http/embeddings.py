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
from jaxinfer.serving.http import response_schema as schema
from jaxinfer.serving.http.embedding_schema import EmbeddingBody
from jaxinfer.serving.http.errors import json_response
from jaxinfer.serving.http.request_body import read_json
from jaxinfer.serving.http.request_parsing import engine_request_id
from jaxinfer.serving.http.request_schema import parse_request
from jaxinfer.serving.http.serialization import MARKER, JsonEncoder, JsonTemplate
from jaxinfer.serving.service import Service

T = TypeVar("T")

_encode_list = JsonEncoder(schema.EmbeddingList)
_encode_embedding = JsonEncoder(schema.Embedding)


async def embed(request: Request, service: Service, limits: LimitsConfig) -> Response:
    """Handle the endpoint; raises `ServiceError` for a body that cannot be served."""
    body = parse_request(EmbeddingBody, await read_json(request, limits))
    service.check_model(body.model or "")
    state = request.scope["state"]
    embedding_request = EmbeddingRequest(
        body.input,
        normalize=body.normalize,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        truncate=bool(body.truncate),
        request_id=engine_request_id(request, body.request_id),
        timeout_s=body.timeout_s,
        protocol="http",
        user=body.user or state["key_name"],
    )
    work = service.embed(embedding_request, on_accepted=lambda: state.update(has_stream=True))
    result = await _cancel_on_disconnect(request, work)
    as_bytes = body.encoding_format == "base64"
    if result.is_large:
        data = await asyncio.to_thread(serialize_embeddings, service.model.name, result, as_bytes)
    else:
        data = serialize_embeddings(service.model.name, result, as_bytes)
    return json_response(data)


def serialize_embeddings(model: str, result: Embeddings, as_bytes: bool) -> bytes:
    """The body: numbers as JSON, or in base64 the bytes of little-endian float32.

    The vectors are encoded one by one: a single call for all of them would hold Python's lock, and
    with it the event loop, for 0.4 s a million numbers.
    """
    encode = _encode_base64 if as_bytes else _encode_numbers
    vectors = b",".join(encode(index, vector) for index, vector in enumerate(result.vectors))
    num_tokens = sum(result.num_tokens)
    body: schema.EmbeddingList = {
        "object": "list",
        "data": [],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    # The first such text is the field itself: what precedes it has no quotation marks to escape.
    return _encode_list(body).replace(b'"data":[]', b'"data":[' + vectors + b"]", 1)


def _encode_base64(index: int, vector: np.ndarray) -> bytes:
    text = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return _encode_embedding({"object": "embedding", "index": index, "embedding": text})


def _encode_numbers(index: int, vector: np.ndarray) -> bytes:
    """Nine digits tell all float32 values apart; Python would write 17."""
    if not np.isfinite(vector).all():
        raise ValueError(f"vector {index} holds NaN or infinity, which JSON cannot express")
    encoded = _encode_embedding({"object": "embedding", "index": index, "embedding": MARKER})
    numbers = f"[{','.join(['%.9g'] * len(vector))}]" % tuple(vector.tolist())
    return JsonTemplate(encoded).fill(numbers)


async def _cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects before it is done."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        text = "the client disconnected before its response was ready"
        raise ServiceError(ErrorKind.CANCELLED, text)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))
