"""Query parameters and API key of a request; errors have OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest
from router.access import ClientRequest

MAX_VALUE_SHOWN = 40
"""Maximum length, in characters, of an invalid value quoted in an error."""
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
"""OpenAI's limits on the number of entries in one page of a list."""


def parameters(**names: dict[str, Any]) -> dict[str, Any]:
    """Describe query parameters for the schema. Endpoints parse them, so that errors have OpenAI's format."""
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in names.items()]}


def owner_of(request: Request) -> str:
    """Return the name of the request's key."""
    client_request: ClientRequest = request.state.client_request
    return client_request.key.name


def flag(query: Mapping[str, str], name: str) -> bool:
    """Return a boolean parameter. Raises InvalidRequest."""
    value = query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false, got {value[:MAX_VALUE_SHOWN]!r}", param=name)
    return value in ("true", "1")


def number(query: Mapping[str, str], name: str, *, default: int, least: int, most: int) -> int:
    """Return an integer parameter. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        shown = text[:MAX_VALUE_SHOWN]
        raise InvalidRequest(f"{name}: must be a whole number from {least:,} to {most:,}, got {shown!r}", param=name)
    return int(text)


def order_of(query: Mapping[str, str]) -> str:
    """Return the parameter `order`: asc or desc. Raises InvalidRequest."""
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be asc or desc, got {order[:MAX_VALUE_SHOWN]!r}", param="order")
    return order


def json_answer(body: object) -> Response:
    """Serialise an answer with `orjson`."""
    return Response(orjson.dumps(body), media_type="application/json")
