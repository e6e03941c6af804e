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
from diptych.router.api.anthropic import MessagesFrames, plan_messages
from diptych.router.api.anthropic_fields import MessagesRequest
from diptych.router.api.chat import ChatShape, plan_chat
from diptych.router.api.completions import CompletionShape, plan_completion
from diptych.router.api.entrance import CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH
from diptych.router.api.errors import CLIENT_CLOSED, MESSAGES_PATH, error_response
from diptych.router.api.exchange import Exchange
from diptych.router.api.fields import ChatRequest, CompletionRequest
from diptych.router.api.frames import Frames, OpenAIFrames
from diptych.router.api.openapi import documented
from diptych.router.api.plan import Plan
from diptych.router.api.responses_api import ResponsesFrames, plan_response
from diptych.router.api.responses_fields import ResponsesRequest
from diptych.router.api.service import Service
from diptych.router.api.shape import Shape
from diptych.router.request_log import RequestLog

F = TypeVar("F", ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)


def generate_routes(service: Service) -> APIRouter:
    """`/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages`."""
    router = APIRouter(tags=["generate"])

    @router.post(CHAT_PATH, **documented(ChatRequest, responses.ChatCompletion, streams=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _serve(service, request, ChatRequest, plan_chat, _openai(ChatShape))

    @router.post(COMPLETION_PATH, **documented(CompletionRequest, responses.Completion, streams=True))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await _serve(service, request, CompletionRequest, plan_completion, _openai(CompletionShape))

    @router.post(RESPONSES_PATH, **documented(ResponsesRequest, responses.ResponseBody, streams=True))
    async def respond(request: Request) -> Response:
        """Answer a conversation, in the shape of OpenAI's Responses API."""
        return await _serve(service, request, ResponsesRequest, plan_response, ResponsesFrames)

    wrong = responses.AnthropicErrorBody

    @router.post(MESSAGES_PATH, **documented(MessagesRequest, responses.AnthropicMessage, streams=True, error=wrong))
    async def messages(request: Request) -> Response:
        """Answer a conversation, in the shape of Anthropic's API."""
        return await _serve(service, request, MessagesRequest, plan_messages, MessagesFrames)

    return router


def _openai(shape: Callable[[Service, F], Shape]) -> Callable[[Service, F, Plan, RequestLog], Frames]:
    """Frames that write choices in this shape."""
    return lambda service, fields, plan, log: OpenAIFrames(service, plan, shape(service, fields), log)


async def _serve(
    service: Service,
    request: Request,
    model: type[F],
    plan: Callable[[Service, F, ApiKey, str], Awaitable[Plan]],
    frames: Callable[[Service, F, Plan, RequestLog], Frames],
) -> Response:
    visit: Visit = request.state.visit
    log, traceparent = service.begin(visit, request.headers)
    try:
        with service.bodies.lease() as lease:
            fields = await service.read(request, model, lease)
            service.client.check_room(partial(service.text.exceeds, fields.longest_text()))
            planned = await plan(service, fields, visit.key, traceparent)
        service.gate.take_prompt(visit, planned.num_prompt_tokens)
        return Exchange(service, planned, frames(service, fields, planned, log), log)
    except RequestError as error:
        service.hint(error)
        log.fail(error)
        log.end()
        return error_response(error)
    except ClientDisconnect:
        log.client_gone()
        log.end()
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it
