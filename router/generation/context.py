"""The sender of a request, and how to serve it."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import RequestClass
from router.access import ANONYMOUS, ApiKey


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Key and class of a request. Only requests with the same `salt` share cached prefixes and grammars.

    `traceparent` is for the workers; "" without a trace. `model_name` is the model name in the answer. `adapter` is the
    name of an adapter, or "".
    """

    key: ApiKey = ANONYMOUS
    request_class: RequestClass = RequestClass()
    salt: str = ""
    traceparent: str = ""
    model_name: str = ""
    adapter: str = ""
