"""The OpenAPI document: FastAPI's, completed by what FastAPI cannot know.

`request_body` reads the bodies of requests, so their schemas are added here, as are those of the
chunks of streams. Token ids get the model's vocabulary as their maximum, and timeouts the
server's, so that the document allows exactly what the server accepts.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from jaxinfer.serving.http.embedding_schema import EmbeddingBody
from jaxinfer.serving.http.middleware import requires_key
from jaxinfer.serving.http.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxinfer.serving.http.response_schema import ChatCompletionChunk, CompletionChunk
from jaxinfer.serving.service import ModelInfo

_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    EmbeddingBody,
    TokenizeRequest,
    DetokenizeRequest,
)
_CHUNKS: tuple[type[Any], ...] = (CompletionChunk, ChatCompletionChunk)
_SCHEMAS = "#/components/schemas/"
_REQUEST_ID = {"type": "string", "minLength": 1, "maxLength": 128}


def request_body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint whose request body is a `model`."""
    schema = {"$ref": _SCHEMAS + model.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def openapi_document(
    app: FastAPI, model: ModelInfo, *, max_timeout_s: float, has_keys: bool
) -> dict[str, Any]:
    """The OpenAPI document of an app that serves `model`."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = document["components"]["schemas"]
    _, bodies = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_SCHEMAS + "{model}"
    )
    schemas.update(bodies["$defs"])
    _, chunks = TypeAdapter.json_schemas(
        [(chunk.__name__, "serialization", TypeAdapter(chunk)) for chunk in _CHUNKS],
        ref_template=_SCHEMAS + "{model}",
    )
    schemas.update(chunks["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _bound_token_ids(schemas, model.vocab_size - 1)
    for schema in schemas.values():
        for option in schema.get("properties", {}).get("timeout_s", {}).get("anyOf", ()):
            if option["type"] == "number":
                option["maximum"] = max_timeout_s
    schemas["DetokenizeRequest"]["properties"]["tokens"]["maxItems"] = model.max_len
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # this server answers 400 instead
            for response in operation["responses"].values():
                response["headers"] = {"X-Request-Id": {"schema": _REQUEST_ID, "required": True}}
            if has_keys and requires_key(path):
                operation["security"] = [{"key": []}]
                refusal = {"$ref": _SCHEMAS + "ErrorBody"}
                operation["responses"]["401"] = {
                    "description": "The API key is missing or unknown",
                    "content": {"application/json": {"schema": refusal}},
                }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _bound_token_ids(value: Any, maximum: int) -> None:
    if isinstance(value, dict):
        if value.get("title") == "TokenId":
            value["maximum"] = maximum
        for item in value.values():
            _bound_token_ids(item, maximum)
    elif isinstance(value, list):
        for item in value:
            _bound_token_ids(item, maximum)
