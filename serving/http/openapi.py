"""The OpenAPI document: FastAPI's, completed by what it cannot know.

Bodies are read by our own strict reader, so their models are added here; token ids get the model's
vocabulary as their maximum, so that what the document allows is what the server takes.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxinfer.serving.http.embedding_schema import EmbeddingBody
from jaxinfer.serving.http.middleware import requires_key
from jaxinfer.serving.http.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxinfer.serving.service import ModelInfo

_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    EmbeddingBody,
    TokenizeRequest,
    DetokenizeRequest,
)
_SCHEMAS = "#/components/schemas/"
_REQUEST_ID = {"type": "string", "minLength": 1, "maxLength": 128}


def request_body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint whose body is `model`."""
    schema = {"$ref": _SCHEMAS + model.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def openapi_document(app: FastAPI, model: ModelInfo, *, has_keys: bool) -> dict[str, Any]:
    """The document of an app that serves `model`."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    schemas = document["components"]["schemas"]
    _, bodies = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_SCHEMAS + "{model}"
    )
    schemas.update(bodies["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _bound_token_ids(schemas, model.vocab_size - 1)
    schemas["DetokenizeRequest"]["properties"]["tokens"]["maxItems"] = model.max_len
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # here a validation error is a 400
            for response in operation["responses"].values():
                response["headers"] = {"X-Request-Id": {"schema": _REQUEST_ID, "required": True}}
            if has_keys and requires_key(path):
                operation["security"] = [{"key": []}]
                refusal = {"$ref": _SCHEMAS + "ErrorBody"}
                operation["responses"]["401"] = {
                    "description": "The API key is missing or not known",
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
