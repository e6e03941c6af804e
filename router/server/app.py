"""The router's HTTP application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from common import __version__
from common.config import OFF, RouterConfig
from common.errors import RequestError
from router.access import AccessControl
from router.api import (
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
    adapter_routes,
    install_openapi,
    model_routes,
    probe_routes,
    serving_routes,
    token_routes,
)
from router.api.anthropic import AnthropicErrorBody, CountTokensRequest, MessagesRequest, message_routes
from router.api.batches import NewBatch, batch_routes, file_routes
from router.api.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest, embedding_routes
from router.api.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaPullRequest,
    ollama_generate_routes,
    ollama_model_routes,
)
from router.api.openai import ErrorBody, chat_routes, completion_routes
from router.api.responses import ResponseService, ResponsesRequest, response_routes
from router.generation import Models, RouterState, Tracing
from router.observe import RouterMetrics
from router.request.errors import CLIENT_CLOSED, MethodNotAllowed, UnknownPath, error_response
from router.request.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.server.fast_path import GeneratingEndpoints, RouterApp
from router.server.path_hints import suggested_path
from router.server.request_middleware import RequestMiddleware
from router.siblings import RouterPart, SharedUsage
from router.stored import IN_MEMORY

if TYPE_CHECKING:  # only routers of several processes need its HTTP client
    from router.siblings import Siblings
    from router.stored import FileStore, ResponseStore

MAX_SHOWN_PATH = 200
"""Maximum length, in characters, of a path quoted in an error."""
ROUTERS = (
    *(chat_routes, completion_routes, message_routes, response_routes, embedding_routes, file_routes, batch_routes),
    *(ollama_generate_routes, ollama_model_routes, model_routes, token_routes, probe_routes),
    *(adapter_routes, serving_routes),
)
ROUTES = [route for router in ROUTERS for route in router.routes]
"""Shared by all applications of a process, because FastAPI takes long to create routes."""
STATIC_PATHS = sorted({route.path for route in ROUTES if isinstance(route, APIRoute) and "{" not in route.path})
"""Paths without parameters."""


def build_app(
    config: RouterConfig,
    models: Models,
    metrics: RouterMetrics,
    failure: Callable[[], str] = str,
    tracing: Tracing | None = None,
    part: RouterPart | None = None,
) -> FastAPI:
    """Create the application that serves `models`. Raises ConfigError if a configured file cannot be used.

    `config` and `metrics` are the router's. `failure` returns why `/health` must report an error; "" while the process
    is healthy. `part` identifies this process among the several of a router.

    `app.state` has the `RouterState` as `router_state`, the `ResponseService` as `responses` and the `BatchService` as
    `batches`, None without a store. `serve` drains and closes them.
    """
    access = AccessControl(config, metrics, usage=None if part is None else SharedUsage(part), part=part)
    siblings = None if part is None else siblings_of(part, metrics)
    router_state = RouterState(models, config, metrics, access, failure, tracing, siblings)
    if part is not None:
        router_state.created = part.began_at
    app = RouterApp(title="Diptych", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.router_state = router_state
    responses, uploaded = _stores(config, metrics, IN_MEMORY if part is None else part.memory_store)
    kept = app.state.responses = ResponseService(router_state, responses)
    metrics.watch_store(lambda: (kept.size, kept.num_in_background))
    generating = GeneratingEndpoints(app, ROUTES)
    app.state.batches = None
    if uploaded is not None:
        from router.api.batches import BatchService

        batches = app.state.batches = BatchService(router_state, uploaded, generating)
        metrics.batches.watch(lambda: batches.store.size, lambda: batches.running)
    app.router.routes.extend(ROUTES)  # `include_router` would create each of them again
    refusals = _Refusals(metrics)
    app.add_exception_handler(RequestError, refusals.of_ours)
    app.add_exception_handler(HTTPException, refusals.of_framework)
    app.add_exception_handler(ClientDisconnect, refusals.of_leaving)
    app.add_middleware(RequestMiddleware, router_state=router_state)
    app.fast_path = RequestMiddleware(generating, router_state)
    bodies = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, NewBatch)
    pooling = (EmbeddingRequest, ScoreRequest, RerankRequest)
    adapters = (LoadAdapterRequest, UnloadAdapterRequest, UpdateWeightsRequest)
    ollama = (OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest)
    managed = (OllamaModelRequest, OllamaPullRequest)
    asked = (*bodies, *pooling, *adapters, *ollama, *managed, CountTokensRequest, TokenizeRequest, DetokenizeRequest)
    install_openapi(app, (*asked, ErrorBody, AnthropicErrorBody, OllamaError))
    return app


def _stores(config: RouterConfig, metrics: RouterMetrics, memory: str) -> tuple[ResponseStore | None, FileStore | None]:
    """Create the stores of responses and files, which load SQLite; None with `--response-store off`."""
    if config.response_store == OFF:
        return None, None
    from router.stored import file_store_of, store_of

    responses = store_of(config, metrics.count_store_failure, memory)
    return responses, file_store_of(config, responses, metrics.batches.count_failure, memory)


def siblings_of(part: RouterPart, metrics: RouterMetrics) -> Siblings:
    """Create the client of the router's other processes."""
    from router.siblings import Siblings

    return Siblings(part, metrics.snapshot)


def _routes(request: Request, path: str = "") -> list[BaseRoute]:
    """Return the routes of a path, by default the request's, whatever their methods."""
    scope = {**request.scope, "path": path} if path else request.scope
    return [route for route in ROUTES if route.matches(scope)[0] is not Match.NONE]


class _Refusals:
    """Exception handlers that convert exceptions to responses and count them."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    async def of_ours(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        if request.state.client_request.record is not None:  # already counted by the log of a generation request
            return error_response(error.with_traceback(None))
        return self._answer(error)

    async def of_framework(self, request: Request, error: Exception) -> Response:
        """Convert Starlette's errors: unknown path, or method not allowed."""
        assert isinstance(error, HTTPException)
        path = request.url.path[:MAX_SHOWN_PATH]
        if error.status_code == 404:
            meant = suggested_path(path, STATIC_PATHS, lambda other: bool(_routes(request, other)))
            hint = f"Did you mean {meant}?" if meant else "GET /docs lists all paths."
            return self._answer(UnknownPath(f"Unknown path: {path}. {hint}"), error.headers)
        if error.status_code == 405:
            allowed = self._methods(request) or (error.headers or {}).get("Allow", "")
            method = request.state.client_request.method[:20]
            refusal = MethodNotAllowed(f"Method {method} is not allowed for {path}. Allowed methods: {allowed}.")
            return self._answer(refusal, {"Allow": allowed})
        ours = RequestError(str(error.detail))
        ours.status = error.status_code
        return self._answer(ours, error.headers)

    def _answer(self, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
        self._metrics.count_error(error.status, error.type)
        return error_response(error, headers)

    def _methods(self, request: Request) -> str:
        """Return the methods of all routes of the path; the framework lists those of only one route."""
        methods = {method for route in _routes(request) for method in getattr(route, "methods", ())}
        return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))

    async def of_leaving(self, request: Request, error: Exception) -> Response:
        if request.state.client_request.record is None:
            self._metrics.count_error(CLIENT_CLOSED, "client_closed")
        return Response(status_code=CLIENT_CLOSED)  # never sent
