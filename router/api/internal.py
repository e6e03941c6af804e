"""Internal endpoints of a router process for its sibling processes (`router.siblings`), on a Unix socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from common.errors import RequestError, Unavailable
from router.api.explain import explained
from router.api.load import history_of, own_load
from router.api.responses.service import ResponseService
from router.generation import RouterState
from router.request.errors import error_response
from router.siblings import NOT_OWNED, OWNER

if TYPE_CHECKING:  # loaded with a store; only routers of several processes need the HTTP client of Siblings
    from router.api.responses.background import BackgroundAnswer
    from router.siblings import Siblings

AVAILABLE = "/available"
"""Path that returns the models with workers for a request now."""
EVENTS, CANCEL, DELETE, SETTLE = "/responses/events", "/responses/cancel", "/responses/delete", "/responses/settle"


def internal_app(router_state: RouterState, responses: ResponseService, siblings: Siblings) -> Starlette:
    """Create the application at the process's Unix socket. The sibling that received a request has checked its key."""
    endpoints = _InternalEndpoints(router_state, responses, siblings)
    routes = [
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/load", endpoints.load),
        Route("/load/history", endpoints.load_history),
        Route("/explain", endpoints.explain),
        Route(AVAILABLE, endpoints.available),
        Route(SETTLE, endpoints.settle),
        Route(EVENTS, endpoints.events),
        Route(CANCEL, endpoints.cancel, methods=["POST"]),
        Route(DELETE, endpoints.delete, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={RequestError: _refused})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


class _InternalEndpoints:
    """The endpoints. Those about a response return NOT_OWNED unless this process generates it or recently did."""

    def __init__(self, router_state: RouterState, responses: ResponseService, siblings: Siblings) -> None:
        self._router_state, self._responses, self._siblings = router_state, responses, siblings

    async def health(self, request: Request) -> Response:
        failure = self._router_state.failure()
        return error_response(Unavailable(failure)) if failure else _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._siblings.own_metrics(), media_type="text/plain")

    async def load(self, request: Request) -> Response:
        asked = request.query_params.get("model")
        return _json(own_load(self._router_state, None if asked is None else self._router_state.models.one(asked)))

    async def load_history(self, request: Request) -> Response:
        asked = request.query_params.get("model")
        return _json(history_of(self._router_state, None if asked is None else self._router_state.models.one(asked)))

    async def explain(self, request: Request) -> Response:
        asked = request.query_params
        entry = next(self._router_state.history.find(asked["id"], asked.get("key")), None)
        return Response(status_code=NOT_OWNED) if entry is None else _json(explained(entry))

    async def available(self, request: Request) -> Response:
        return _json(self._router_state.models.available)

    async def settle(self, request: Request) -> Response:
        """Wait until everything responses here so far is stored."""
        await self._responses.settle(*_asked(request))
        return Response()

    async def events(self, request: Request) -> Response:
        answer = self._answer(request)
        if answer is None or answer.events is None:
            return Response(status_code=NOT_OWNED)
        events = answer.follow(int(request.query_params["start"]), self._router_state.config.keepalive_s)
        return StreamingResponse(events, media_type="text/event-stream")

    async def cancel(self, request: Request) -> Response:
        response_id, owner = _asked(request)
        if self._answer(request) is None:
            return Response(status_code=NOT_OWNED)
        return _json(await self._responses.cancel(response_id, owner))

    async def delete(self, request: Request) -> Response:
        response_id, owner = _asked(request)
        if self._answer(request) is None:
            return Response(status_code=NOT_OWNED)
        await self._responses.delete(response_id, owner)
        return _json({"id": response_id, "object": "response", "deleted": True})

    def _answer(self, request: Request) -> BackgroundAnswer | None:
        return self._responses.background.find(*_asked(request))


def _asked(request: Request) -> tuple[str, str]:
    """Return the id of a response and the name of the requesting key."""
    return request.query_params["id"], request.headers.get(OWNER, "").encode("latin-1").decode("utf-8")


def _json(body: Mapping[str, object] | Sequence[str]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
