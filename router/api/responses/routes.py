"""OpenAI's Responses API, under `/v1/responses`."""

from __future__ import annotations

from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from common.errors import RETRY_AFTER_S, InvalidRequest, Unavailable
from router.api.internal import CANCEL, DELETE, EVENTS
from router.api.openai import DeletedResponse, InputItems, ResponseBody
from router.api.openapi import documented
from router.api.query import DEFAULT_LIMIT, MAX_LIMIT, flag, json_answer, number, order_of, owner_of, parameters
from router.api.responses.answers import ResponsesSerializer
from router.api.responses.fields import ResponsesRequest
from router.api.responses.items import page_of
from router.api.responses.service import ResponseService
from router.generation import (
    STREAM_HEADERS,
    AnswerPlan,
    GenerationCall,
    RouterState,
    ServedModel,
    generation_call,
    router_state_of,
)
from router.request import RESPONSES_PATH
from router.request.errors import BodyTooLarge
from router.stored import RecordTooLarge, StoreFailed

if TYPE_CHECKING:  # loaded with a store
    from router.api.responses.background import BackgroundAnswer

response_routes = APIRouter()
"""`/v1/responses` and the responses under it."""

TAGS: list[str | Enum] = ["responses"]
ONE = f"{RESPONSES_PATH}/{{response_id}}"


SHOWN: dict[str, Any] = documented(None, ResponseBody, streams=True) | {
    "openapi_extra": parameters(stream={"type": "boolean"}, starting_after={"type": "integer", "minimum": 0})
}
LISTED: dict[str, Any] = documented(None, InputItems) | {
    "openapi_extra": parameters(
        limit={"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        order={"enum": ["asc", "desc"], "default": "desc"},
        after={"type": "string"},
    )
}


def service_of(request: Request) -> ResponseService:
    """Return the stored and background responses of the application that received the request."""
    service: ResponseService = request.app.state.responses
    return service


@response_routes.post(RESPONSES_PATH, tags=["generate"], **documented(ResponsesRequest, ResponseBody, streams=True))
async def respond(request: Request) -> Response:
    """Generate a response to a conversation (OpenAI's Responses API)."""
    service = service_of(request)
    async with generation_call(request, ResponsesRequest) as (call, fields):
        model, plan = await call.plan(fields, service.plan)
        call.client_request.ignored_tools = fields.ignored_tools
        given, fields = await service.given(fields, plan.id), fields.without_prompt()
        call.lease.rest_bytes += len(given)
        if fields.background:
            return await _in_background(service, call, model, fields, given, plan)
        if not service.stores(fields):
            return call.answer(model, plan, ResponsesSerializer(model, fields, plan, call.log))
        keep = partial(service.keep, fields, given, call.client_request.key.name)
        return call.answer(
            model, plan, ResponsesSerializer(model, fields, plan, call.log, keep, stored=True), service.written
        )


@response_routes.get(ONE, tags=TAGS, **SHOWN)
async def show(response_id: str, request: Request) -> Response:
    """Retrieve a stored or background response. With `stream`, the events of a background response."""
    service, owner = service_of(request), owner_of(request)
    query = request.query_params
    if not flag(query, "stream"):
        return json_answer(await service.find(response_id, owner))
    start = number(query, "starting_after", default=-1, least=0, most=2**31) + 1
    answer = service.background.find(response_id, owner)
    if answer is None and (theirs := await _by_maker(request, response_id, EVENTS, start=str(start))):
        return theirs
    if answer is None:
        await service.find(response_id, owner)  # raises if the response does not exist
    if answer is None or answer.events is None:
        raise InvalidRequest(
            "stream: events are available only for responses created with background: true and stream: true, on the "
            "router that generates them, until a few minutes after their end. Retry without stream.",
            param="stream",
        )
    return _stream(router_state_of(request), answer, start)


@response_routes.delete(ONE, tags=TAGS, **documented(None, DeletedResponse))
async def delete(response_id: str, request: Request) -> Response:
    """Delete a response."""
    if theirs := await _by_maker(request, response_id, DELETE):
        return theirs
    await service_of(request).delete(response_id, owner_of(request))
    return json_answer({"id": response_id, "object": "response", "deleted": True})


@response_routes.post(f"{ONE}/cancel", tags=TAGS, **documented(None, ResponseBody))
async def cancel(response_id: str, request: Request) -> Response:
    """Cancel a background response."""
    if theirs := await _by_maker(request, response_id, CANCEL):
        return theirs
    return json_answer(await service_of(request).cancel(response_id, owner_of(request)))


@response_routes.get(f"{ONE}/input_items", tags=TAGS, **LISTED)
async def list_input_items(response_id: str, request: Request) -> Response:
    """List the input items of a response, including those of the conversation before it."""
    query = request.query_params
    limit = number(query, "limit", default=DEFAULT_LIMIT, least=1, most=MAX_LIMIT)
    order = order_of(query)
    items = await service_of(request).input_items(response_id, owner_of(request))
    return json_answer(page_of(items, order=order, limit=limit, after=query.get("after")))


async def _in_background(
    service: ResponseService,
    call: GenerationCall,
    model: ServedModel,
    fields: ResponsesRequest,
    given: bytes,
    plan: AnswerPlan,
) -> Response:
    """Start a background response and return its state."""
    try:
        answer = await service.background.start(call, model, fields, given, plan)
    except RecordTooLarge as too_large:
        raise BodyTooLarge(f"background: {too_large}", param="background") from too_large
    except StoreFailed as failed:
        raise Unavailable(f"background: {failed}", param="background", retry_after_s=RETRY_AFTER_S) from failed
    return _stream(call.router_state, answer, 0) if fields.stream else json_answer(answer.response)


async def _by_maker(request: Request, response_id: str, path: str, **params: str) -> Response | None:
    """Forward a request about a background response to the sibling process that generates it; None if there is none."""
    router_state, owner = router_state_of(request), owner_of(request)
    if router_state.siblings is None or service_of(request).background.find(response_id, owner) is not None:
        return None
    method = "GET" if path == EVENTS else "POST"
    theirs = await router_state.siblings.ask(method, path, owner, {"id": response_id, **params})
    if theirs is None:
        return None
    if path == EVENTS and theirs.status_code == HTTPStatus.OK:
        headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
        return StreamingResponse(theirs.aiter_raw(), headers=headers, background=BackgroundTask(theirs.aclose))
    try:
        body = await theirs.aread()
    finally:
        await theirs.aclose()
    return Response(body, theirs.status_code, media_type=theirs.headers.get("content-type"))


def _stream(router_state: RouterState, answer: BackgroundAnswer, start: int) -> Response:
    events = answer.follow(start, router_state.config.keepalive_s)
    return StreamingResponse(events, headers={name.decode(): value.decode() for name, value in STREAM_HEADERS})
