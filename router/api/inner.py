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
from router.api.load import own_load
from router.api.responses.kept import KeptResponses
from router.generation import FrontDoor
from router.request.errors import error_response
from router.siblings import NOT_MINE, OWNER

if TYPE_CHECKING:  # loaded with a store; only routers of several processes need the HTTP client of Siblings
    from router.api.responses.background import BackgroundAnswer
    from router.siblings import Siblings

ABLE = "/able"
"""Path that returns the models with workers for a request now."""
EVENTS, CANCEL, DELETE, SETTLE = "/responses/events", "/responses/cancel", "/responses/delete", "/responses/settle"


def inner_app(door: FrontDoor, kept: KeptResponses, siblings: Siblings) -> Starlette:
    """Create the application at the process's Unix socket. The sibling that received a request has checked its key."""
    inner = _Inner(door, kept, siblings)
    routes = [
        Route("/health", inner.health),
        Route("/metrics", inner.metrics),
        Route("/load", inner.load),
        Route(ABLE, inner.able),
        Route(SETTLE, inner.settle),
        Route(EVENTS, inner.events),
        Route(CANCEL, inner.cancel, methods=["POST"]),
        Route(DELETE, inner.delete, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={RequestError: _refused})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


class _Inner:
    """The endpoints. Those about a response return NOT_MINE unless this process generates it or recently did."""

    def __init__(self, door: FrontDoor, kept: KeptResponses, siblings: Siblings) -> None:
        self._door, self._kept, self._siblings = door, kept, siblings

    async def health(self, request: Request) -> Response:
        failure = self._door.failure()
        return error_response(Unavailable(failure)) if failure else _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._siblings.ledger.tell(), media_type="text/plain")

    async def load(self, request: Request) -> Response:
        asked = request.query_params.get("model")
        return _json(own_load(self._door, None if asked is None else self._door.models.one(asked)))

    async def able(self, request: Request) -> Response:
        return _json(self._door.models.available)

    async def settle(self, request: Request) -> Response:
        """Wait until everything kept here so far is stored."""
        await self._kept.settle(*_asked(request))
        return Response()

    async def events(self, request: Request) -> Response:
        answer = self._answer(request)
        if answer is None or answer.events is None:
            return Response(status_code=NOT_MINE)
        events = answer.follow(int(request.query_params["start"]), self._door.config.keepalive_s)
        return StreamingResponse(events, media_type="text/event-stream")

    async def cancel(self, request: Request) -> Response:
        response_id, owner = _asked(request)
        if self._answer(request) is None:
            return Response(status_code=NOT_MINE)
        return _json(await self._kept.cancel(response_id, owner))

    async def delete(self, request: Request) -> Response:
        response_id, owner = _asked(request)
        if self._answer(request) is None:
            return Response(status_code=NOT_MINE)
        await self._kept.delete(response_id, owner)
        return _json({"id": response_id, "object": "response", "deleted": True})

    def _answer(self, request: Request) -> BackgroundAnswer | None:
        return self._kept.background.find(*_asked(request))


def _asked(request: Request) -> tuple[str, str]:
    """Return the id of a response and the name of the requesting key."""
    return request.query_params["id"], request.headers.get(OWNER, "").encode("latin-1").decode("utf-8")


def _json(body: Mapping[str, object] | Sequence[str]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
