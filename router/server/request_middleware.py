"""ASGI middleware of all HTTP requests: request id, origins, API key, limits, capacity checks and counters.

It also answers unexpected errors.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import InternalError, RequestError
from router.access import ClientRequest, CorsPolicy, check_web_page
from router.generation import RouterState
from router.request.errors import CLIENT_CLOSED, error_response, speaks_anthropic
from router.server.precheck import generates, precheck

log = logging.getLogger(__name__)

SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestMiddleware:
    """Pure ASGI middleware, so that streams and disconnects pass through unchanged."""

    def __init__(self, app: ASGIApp, router_state: RouterState) -> None:
        self._app, self._router_state = app, router_state
        self._cors = CorsPolicy(router_state.config.allow_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        router_state, access = self._router_state, self._router_state.access
        headers = Headers(scope=scope)
        if (preflight := self._cors.preflight(scope["method"], headers)) is not None:
            await preflight(scope, receive, send)
            return
        request_id = headers.get("x-request-id", "")
        if not SANE_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        client_request = access.arrive(scope, request_id)
        scope.setdefault("state", {}).update(request_id=request_id, client_request=client_request)
        is_head = scope["method"] == "HEAD"
        if is_head:  # handled as GET, without sending the body
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            if is_head and client_request.status:
                return
            if message["type"] == "http.response.start":
                client_request.status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = request_id
                if speaks_anthropic(scope):
                    added["request-id"] = request_id  # the name that Anthropic's SDKs read
                if client_request.ignored_tools:
                    added["x-diptych-tools-left-out"] = ", ".join(client_request.ignored_tools)
                if client_request.weight_version:
                    added["x-weight-version"] = client_request.weight_version
                for name, value in access.headers(client_request).items():
                    added[name] = value
                if self._cors.origins:
                    self._cors.add_headers(added, headers.get("origin", ""))
            await send(message)
            if is_head:  # stop the endpoint before it creates the body
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        router_state.num_active += 1
        try:
            refusal = self._refusal(scope, headers, client_request)
            if refusal is None:
                await self._app(scope, receive, send_with_headers)
            else:
                await error_response(refusal)(scope, receive, send_with_headers)
        except Exception:
            log.exception("request failed", extra={"path": scope["path"], "request_id": request_id})
            client_request.error = InternalError.__name__
            if not client_request.status:
                error = InternalError("The server failed to process this request.")
                router_state.metrics.count_error(error.status, error.type)
                await error_response(error)(scope, receive, send_with_headers)
        finally:
            router_state.num_active -= 1
            client_request.status = client_request.status or CLIENT_CLOSED
            access.leave(client_request)

    def _refusal(self, scope: Scope, headers: Headers, client_request: ClientRequest) -> RequestError | None:
        """Return the error that refuses the request before its body is read, after counting it; None otherwise."""
        try:
            if self._router_state.is_loopback and self._router_state.access.ring is None:
                check_web_page(client_request.method, headers.raw, self._cors.allows)
            self._router_state.access.admit(client_request, shown_key(headers))
            if generates(scope):
                precheck(self._router_state, client_request, headers)
        except RequestError as refusal:
            if not client_request.error:  # `precheck` counts its own refusals
                client_request.error = type(refusal).__name__
                self._router_state.metrics.count_error(refusal.status, refusal.type)
            return refusal
        return None


def shown_key(headers: Headers) -> bytes:
    """Return the key in `Authorization: Bearer` or `x-api-key`; empty without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return given.encode("latin-1")
