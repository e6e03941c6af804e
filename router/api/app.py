"""The router's HTTP application."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from diptych.common import __version__
from diptych.common.errors import RequestError
from diptych.common.model.files import ModelFiles
from diptych.common.settings import RouterConfig
from diptych.router.api.errors import CLIENT_CLOSED, MethodNotAllowed, UnknownPath, error_response
from diptych.router.api.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from diptych.router.api.front import Front
from diptych.router.api.generate import generate_routes
from diptych.router.api.info import model_routes, probe_routes, token_routes
from diptych.router.api.openapi import install_openapi
from diptych.router.api.service import Service, ServingClient
from diptych.router.metrics import RouterMetrics
from diptych.router.text.pipeline import TextPipeline

MAX_SHOWN_PATH = 200


def build_app(
    client: ServingClient,
    text: TextPipeline,
    files: ModelFiles,
    config: RouterConfig,
    metrics: RouterMetrics,
    failure: Callable[[], str] = str,
) -> FastAPI:
    """The application over a client of the pools. `app.state.service` is its `Service`, for whoever drains it.

    `failure` says why `/health` must not be 200; "" while all is well.
    """
    service = Service(client, text, files, config, metrics, failure)
    app = FastAPI(title="Diptych", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for routes in (generate_routes, model_routes, token_routes, probe_routes):
        app.include_router(routes(service))
    app.add_exception_handler(RequestError, _Refusals(service).of_ours)
    app.add_exception_handler(HTTPException, _Refusals(service).of_framework)
    app.add_exception_handler(ClientDisconnect, _Refusals(service).of_leaving)
    app.add_middleware(Front, service=service)
    install_openapi(app, (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest))
    return app


class _Refusals:
    """Exceptions made into answers, and counted."""

    def __init__(self, service: Service) -> None:
        self._metrics = service.metrics

    async def of_ours(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        self._metrics.count_error(error.status, error.type)
        return error_response(error)

    async def of_framework(self, request: Request, error: Exception) -> Response:
        """Starlette's own: no such path, or not this method."""
        assert isinstance(error, HTTPException)
        path = request.url.path[:MAX_SHOWN_PATH]
        ours: RequestError = UnknownPath(f"there is no {path} here")
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            ours = MethodNotAllowed(f"{path} takes {allowed}, not {request.method[:20]}")
        elif error.status_code != 404:
            ours = RequestError(str(error.detail))
            ours.status = error.status_code
        self._metrics.count_error(ours.status, ours.type)
        return error_response(ours, error.headers)

    async def of_leaving(self, request: Request, error: Exception) -> Response:
        self._metrics.count_error(CLIENT_CLOSED, "client_closed")
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it
