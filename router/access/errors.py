"""Errors of missing or incorrect keys and of exceeded rate limits, in the hierarchy of `common.errors`."""

from __future__ import annotations

from common.errors import Overloaded, RequestError


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    code = "insufficient_permissions"


class RateLimited(Overloaded):
    """A rate limit of a key, or of a model for all keys, is exceeded. `limit` is requests, tokens or concurrency."""

    def __init__(self, message: str, *, limit: str, retry_after_s: float, of_key: bool = True) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit, self.of_key = limit, of_key
