"""ASGI middleware of all HTTP requests: request id, origin check, API key, limits, capacity checks and counters.

It also answers unexpected errors.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import InternalError, RequestError
from router.access import Visit, check_web_page
from router.generation import FrontDoor
from router.request.errors import CLIENT_CLOSED, error_response
from router.server.entrance import check_entrance, generates

log = logging.getLogger(__name__)

SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Front:
    """Pure ASGI middleware, so that streams and disconnects pass through unchanged."""

    def __init__(self, app: ASGIApp, door: FrontDoor) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        door, gate = self._door, self._door.gate
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not SANE_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        visit = gate.arrive(scope, request_id)
        scope.setdefault("state", {}).update(request_id=request_id, visit=visit)
        is_head = scope["method"] == "HEAD"
        if is_head:  # handled as GET, without sending the body
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            if is_head and visit.status:
                return
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = request_id
                if visit.left_out:
                    added["x-diptych-tools-left-out"] = ", ".join(visit.left_out)
                for name, value in gate.headers(visit).items():
                    added[name] = value
            await send(message)
            if is_head:  # stop the endpoint before it creates the body
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        door.num_active += 1
        try:
            refusal = self._refusal(scope, headers, visit)
            if refusal is None:
                await self._app(scope, receive, send_with_headers)
            else:
                await error_response(refusal)(scope, receive, send_with_headers)
        except Exception:
            log.exception("request failed", extra={"path": scope["path"], "request_id": request_id})
            visit.error = InternalError.__name__
            if not visit.status:
                error = InternalError("The server failed to process this request.")
                door.metrics.count_error(error.status, error.type)
                await error_response(error)(scope, receive, send_with_headers)
        finally:
            door.num_active -= 1
            visit.status = visit.status or CLIENT_CLOSED
            gate.leave(visit)

    def _refusal(self, scope: Scope, headers: Headers, visit: Visit) -> RequestError | None:
        """Return the error that refuses the request before its body is read, after counting it; None otherwise."""
        try:
            if self._door.is_loopback and self._door.gate.ring is None:
                check_web_page(visit.method, headers.raw)
            self._door.gate.admit(visit, shown_key(headers))
            if generates(scope):
                check_entrance(self._door, visit, headers)
        except RequestError as refusal:
            if not visit.error:  # `check_entrance` counts its own refusals
                visit.error = type(refusal).__name__
                self._door.metrics.count_error(refusal.status, refusal.type)
            return refusal
        return None


def shown_key(headers: Headers) -> bytes:
    """Return the key in `Authorization: Bearer` or `x-api-key`; empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return given.encode("latin-1")
