"""Where a request comes from."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import RequestClass
from router.access import ANONYMOUS, ApiKey


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request it is, of which class, and the `traceparent` for its workers; "" without a trace."""

    key: ApiKey = ANONYMOUS
    request_class: RequestClass = RequestClass()
    traceparent: str = ""
