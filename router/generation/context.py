"""Who asks for an answer, and how the request is to be served."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import RequestClass
from router.access import ANONYMOUS, ApiKey


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The key and class of a request. Only requests with the same `salt` share cached prefixes and grammars.

    `traceparent` is for the workers; "" without a trace. `model_name` is the name of the model in the answer, and
    `adapter` the name of an adapter, or "".
    """

    key: ApiKey = ANONYMOUS
    request_class: RequestClass = RequestClass()
    salt: str = ""
    traceparent: str = ""
    model_name: str = ""
    adapter: str = ""
