"""The FastAPI app: its routes and its middleware."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serving.auth import ApiKeys
from jaxinfer.serving.config import LimitsConfig, ServingConfig
from jaxinfer.serving.errors import ServiceError
from jaxinfer.serving.health import Health
from jaxinfer.serving.http import chat, completions, embeddings, info
from jaxinfer.serving.http.embedding_schema import EmbeddingBody
from jaxinfer.serving.http.errors import error_response, on_http_exception
from jaxinfer.serving.http.middleware import EMBEDDING_PATH, INFERENCE_PATHS, RequestMiddleware
from jaxinfer.serving.http.openapi import openapi_document, request_body_schema
from jaxinfer.serving.http.page import load_page
from jaxinfer.serving.http.request_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxinfer.serving.http.response_schema import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    EmbeddingList,
    HealthBody,
    Model,
    ModelList,
    Stats,
    Text,
    Tokens,
    responses,
)
from jaxinfer.serving.metrics import Metrics
from jaxinfer.serving.service import Service
from jaxinfer.text.tokenizer import Tokenizer

_EXPOSED_HEADERS = ["X-Request-Id", "Retry-After"]


def build_app(
    service: Service,
    config: ServingConfig,
    keys: ApiKeys | None,
    health: Health,
    metrics: Metrics,
) -> FastAPI:
    """The ASGI application of the HTTP server. Without `keys` everybody may call."""
    app = FastAPI(
        title="jaxinfer",
        version=importlib.metadata.version("jaxinfer"),
        description="An OpenAI-compatible server for one model.",
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(_inference_routes(service, config.limits))
    app.include_router(_model_routes(service, config.limits))
    app.include_router(_operation_routes(service, health, metrics))
    can_chat = not service.model.embedding_dim
    if config.page and can_chat and (page := load_page()) is not None:

        @app.get("/", include_in_schema=False)
        async def get_page() -> Response:
            return page

    app.add_exception_handler(ServiceError, _service_error_handler(metrics))
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(RequestMiddleware, service=service, keys=keys, metrics=metrics)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=_EXPOSED_HEADERS,
        )

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi_document(
                app,
                service.model,
                max_timeout_s=config.limits.timeout_s,
                has_keys=keys is not None,
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    return app


def _service_error_handler(metrics: Metrics) -> Any:
    async def on_service_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        state = request.scope["state"]
        if request.scope["path"] in INFERENCE_PATHS and not state.get("has_stream"):
            metrics.count_refusal("http", error.kind)
        return error_response(error)

    return on_service_error


def _inference_routes(service: Service, limits: LimitsConfig) -> APIRouter:
    """Generation and embeddings. The endpoints that the model does not support answer with an error
    that says so, and are left out of the document."""
    router = APIRouter(tags=["generate"])
    embeds = bool(service.model.embedding_dim)
    tokenizer = _tokenizer_of(service)
    errors = (400, 404, 408, 409, 413, 415, 429, 503)

    @router.post(
        "/v1/completions",
        include_in_schema=not embeds,
        responses=responses(Completion, *errors, chunk=CompletionChunk),
        openapi_extra=request_body_schema(CompletionRequest),
    )
    async def create_completion(request: Request) -> Response:
        return await completions.complete(request, service, tokenizer, limits)

    @router.post(
        "/v1/chat/completions",
        include_in_schema=not embeds,
        responses=responses(ChatCompletion, *errors, chunk=ChatCompletionChunk),
        openapi_extra=request_body_schema(ChatRequest),
    )
    async def create_chat_completion(request: Request) -> Response:
        return await chat.chat(request, service, tokenizer, limits)

    @router.post(
        EMBEDDING_PATH,
        include_in_schema=embeds,
        responses=responses(EmbeddingList, *errors),
        openapi_extra=request_body_schema(EmbeddingBody),
    )
    async def create_embedding(request: Request) -> Response:
        return await embeddings.embed(request, service, limits)

    return router


def _model_routes(service: Service, limits: LimitsConfig) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses=responses(ModelList))
    async def list_models() -> Response:
        return info.list_models(service)

    @router.get("/v1/models/{model_id:path}", responses=responses(Model, 404))
    async def get_model(model_id: str) -> Response:
        return info.get_model(service, model_id)

    @router.post(
        "/tokenize",
        responses=responses(Tokens, 400, 404, 408, 413, 415),
        openapi_extra=request_body_schema(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        return await info.tokenize(request, service, limits)

    @router.post(
        "/detokenize",
        responses=responses(Text, 400, 404, 408, 413, 415),
        openapi_extra=request_body_schema(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        return await info.detokenize(request, service, limits)

    return router


def _operation_routes(service: Service, health: Health, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])
    meter = info.RateMeter()
    unhealthy = {503: {"model": HealthBody}}

    @router.get("/v1/stats", responses=responses(Stats))
    async def get_stats() -> Response:
        return info.stats_response(service, meter)

    @router.get("/health/live", responses=responses(HealthBody) | unhealthy)
    async def is_live() -> Response:
        return info.health_response(health.is_live, health.state.name.lower())

    @router.get("/health/ready", responses=responses(HealthBody) | unhealthy)
    async def is_ready() -> Response:
        return info.health_response(health.is_ready, health.state.name.lower())

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    errors = {500: responses(None)[500]}

    @router.get("/metrics", responses={200: text, **errors}, response_class=Response)
    async def get_metrics() -> Response:
        body, content_type = metrics.render()
        return Response(body, media_type=content_type)

    return router


def _tokenizer_of(service: Service) -> Tokenizer | None:
    try:
        return service.tokenizer
    except ServiceError:  # the model has no tokenizer: prompts are token ids
        return None
