"""The two endpoints that generate: read, check, plan, and hand over to an `Exchange`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from diptych.common.errors import RequestError
from diptych.router.access.keys import ApiKey
from diptych.router.access.visit import Visit
from diptych.router.api import responses
from diptych.router.api.chat import ChatShape, plan_chat
from diptych.router.api.completions import CompletionShape, plan_completion
from diptych.router.api.entrance import CHAT_PATH, COMPLETION_PATH
from diptych.router.api.errors import CLIENT_CLOSED, error_response
from diptych.router.api.exchange import Exchange
from diptych.router.api.fields import ChatRequest, CompletionRequest, SamplingFields
from diptych.router.api.openapi import documented
from diptych.router.api.plan import Plan
from diptych.router.api.service import Service
from diptych.router.api.shape import Shape

F = TypeVar("F", bound=SamplingFields)


def generate_routes(service: Service) -> APIRouter:
    """`/v1/chat/completions` and `/v1/completions`."""
    router = APIRouter(tags=["generate"])

    @router.post(CHAT_PATH, **documented(ChatRequest, responses.ChatCompletion, streams=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _serve(service, request, ChatRequest, plan_chat, ChatShape)

    @router.post(COMPLETION_PATH, **documented(CompletionRequest, responses.Completion, streams=True))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await _serve(service, request, CompletionRequest, plan_completion, CompletionShape)

    return router


async def _serve(
    service: Service,
    request: Request,
    model: type[F],
    plan: Callable[[Service, F, ApiKey, str], Awaitable[Plan]],
    shape: Callable[[Service, F], Shape],
) -> Response:
    visit: Visit = request.state.visit
    log, traceparent = service.begin(visit, request.headers)
    try:
        with service.bodies.lease() as lease:
            fields = await service.read(request, model, lease)
            service.client.check_room(partial(service.text.exceeds, fields.longest_text()))
            planned = await plan(service, fields, visit.key, traceparent)
        service.gate.take_prompt(visit, planned.num_prompt_tokens)
        return Exchange(service, planned, shape(service, fields), log)
    except RequestError as error:
        service.hint(error)
        log.fail(error)
        log.end()
        return error_response(error)
    except ClientDisconnect:
        log.client_gone()
        log.end()
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it
