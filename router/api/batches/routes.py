"""OpenAI's Batches API, under `/v1/batches`."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.api.batches.answers import BatchBody, BatchListBody
from router.api.batches.fields import NewBatch
from router.api.batches.files import batches_of
from router.api.batches.objects import batch_object, page_object
from router.api.openapi import documented
from router.api.query import DEFAULT_LIMIT, MAX_LIMIT, json_answer, number, owner_of, parameters
from router.generation import router_state_of

batch_routes = APIRouter()
"""`/v1/batches` and the batches under it."""

TAGS: list[str | Enum] = ["batches"]
ONE: Final = "/v1/batches/{batch_id}"

LISTED: dict[str, Any] = documented(None, BatchListBody) | {
    "openapi_extra": parameters(
        limit={"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        after={"type": "string"},
    )
}


@batch_routes.post("/v1/batches", tags=TAGS, **documented(NewBatch, BatchBody))
async def create_batch(request: Request) -> Response:
    """Create a batch from an uploaded file of requests and start processing it."""
    router_state = router_state_of(request)
    with router_state.bodies.lease() as lease:
        fields = await router_state.reader.read(request, NewBatch, lease)
    return json_answer(batch_object(await batches_of(request).create(fields, owner_of(request))))


@batch_routes.get("/v1/batches", tags=TAGS, **LISTED)
async def list_batches(request: Request) -> Response:
    """List the batches of the API key, newest first."""
    query = request.query_params
    limit = number(query, "limit", default=DEFAULT_LIMIT, least=1, most=MAX_LIMIT)
    found = await batches_of(request).batches(owner_of(request), limit=limit + 1, after=query.get("after"))
    return json_answer(page_object([batch_object(batch) for batch in found], limit))


@batch_routes.get(ONE, tags=TAGS, **documented(None, BatchBody))
async def show_batch(batch_id: str, request: Request) -> Response:
    """Retrieve a batch."""
    return json_answer(batch_object(await batches_of(request).batch(batch_id, owner_of(request))))


@batch_routes.post("/v1/batches/{batch_id}/cancel", tags=TAGS, **documented(None, BatchBody))
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Cancel a batch. Results of completed requests remain available."""
    return json_answer(batch_object(await batches_of(request).cancel(batch_id, owner_of(request))))
