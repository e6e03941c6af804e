"""What every HTTP request passes first: its id, the key, the count of active requests, and the last net for errors."""

from __future__ import annotations

import hmac
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.common.errors import InternalError
from diptych.router.api.errors import Unauthorized, error_response
from diptych.router.api.service import Service

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/metrics", "/ping"))
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Front:
    """Pure ASGI, so that streams and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._key = service.config.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not SANE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._service.num_active += 1
        try:
            if self._key and scope["path"] not in OPEN_PATHS and not self._knows_key(headers):
                refusal = Unauthorized("the API key is missing or wrong: send Authorization: Bearer KEY")
                self._service.metrics.count_error(refusal.status, refusal.type)
                await error_response(refusal)(scope, receive, send_with_id)
                return
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("failed to answer", extra={"path": scope["path"], "request_id": request_id})
            if not started:
                error = InternalError("the server failed to handle this request")
                self._service.metrics.count_error(error.status, error.type)
                await error_response(error)(scope, receive, send_with_id)
        finally:
            self._service.num_active -= 1

    def _knows_key(self, headers: Headers) -> bool:
        """Compared in constant time; an empty or foreign scheme is no key."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode("latin-1"), self._key)
