"""The errors of missing or wrong keys and of used-up limits, in the tree of `common.errors`."""

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
    """A key, or a model for all keys, has used up a limit; `limit` is requests, tokens or concurrency."""

    def __init__(self, message: str, *, limit: str, retry_after_s: float, of_key: bool = True) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit, self.of_key = limit, of_key
