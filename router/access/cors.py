"""Cross-origin resource sharing (CORS): which pages of other origins may read answers.

    preflight (OPTIONS, without a key) ─> 204 for an allowed origin; other origins are handled like any request
    request with an allowed `Origin`  ─> the answer, or the error, with `Access-Control-Allow-Origin`

Cookies are not used, so the router never sends `Access-Control-Allow-Credentials`, and the wildcards below are valid.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

ANY = "*"
PREFLIGHT = {
    "access-control-allow-methods": "GET, HEAD, POST, DELETE",
    "access-control-allow-headers": "authorization, *",  # the wildcard does not include `authorization`
    "access-control-max-age": "7200",  # Chrome's maximum
}


class CorsPolicy:
    """The origins of `--allow-origin`. Without any, answers have no CORS headers and preflights are not special."""

    def __init__(self, origins: Iterable[str]) -> None:
        self.origins = frozenset(origin.lower() for origin in origins)

    def allows(self, origin: str) -> bool:
        """Whether pages of `origin`, the value of an `Origin` header, may use the router."""
        return origin.lower() in self.origins or (ANY in self.origins and origin != "")

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """Return the answer to a preflight request of an allowed origin; None for all other requests."""
        if method != "OPTIONS" or "access-control-request-method" not in headers:
            return None
        origin = headers.get("origin", "")
        if not self.allows(origin):
            return None
        response = Response(status_code=204, headers=PREFLIGHT)
        self.add_headers(response.headers, origin)
        return response

    def add_headers(self, headers: MutableHeaders, origin: str) -> None:
        """Add the headers of an answer to a request of `origin`; "" without one. Call only if there are `origins`."""
        if ANY not in self.origins:
            headers.add_vary_header("Origin")  # caches must not reuse the answer for another origin
        if self.allows(origin):
            headers["access-control-allow-origin"] = ANY if ANY in self.origins else origin
            headers["access-control-expose-headers"] = ANY
