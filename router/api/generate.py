"""The endpoints that generate: they read and check a request, plan its answer, and pass it to an `Exchange`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.errors import RequestError
from router.api import anthropic_answers, openai_answers
from router.api.anthropic_fields import MessagesRequest
from router.api.anthropic_messages import MessagesFrames
from router.api.chat import ChatShape, plan_chat
from router.api.completions import CompletionShape, plan_completion
from router.api.openapi import documented
from router.api.responses import ResponsesFrames
from router.api.responses_fields import ResponsesRequest
from router.api.translated import plan_translated
from router.auth.class_choice import HEADER, class_of
from router.auth.visit import Visit
from router.dispatch.client import Caller
from router.generation.answer_frames import Frames, OpenAIFrames
from router.generation.exchange import Exchange
from router.generation.origin import Origin
from router.generation.plan import AnswerPlan
from router.generation.request_log import RequestLog
from router.generation.service import Service, service_of
from router.generation.shape import Shape
from router.request.errors import CLIENT_CLOSED, error_response
from router.request.fields import ChatRequest, CompletionRequest
from router.request.paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH

F = TypeVar("F", ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)

generate_routes = APIRouter(tags=["generate"])
"""`/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages`."""


@generate_routes.post(CHAT_PATH, **documented(ChatRequest, openai_answers.ChatCompletion, streams=True))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await _serve(request, ChatRequest, plan_chat, _openai(ChatShape))


@generate_routes.post(COMPLETION_PATH, **documented(CompletionRequest, openai_answers.Completion, streams=True))
async def completions(request: Request) -> Response:
    """Continue a text."""
    return await _serve(request, CompletionRequest, plan_completion, _openai(CompletionShape))


@generate_routes.post(RESPONSES_PATH, **documented(ResponsesRequest, openai_answers.ResponseBody, streams=True))
async def respond(request: Request) -> Response:
    """Answer a conversation, in the shape of OpenAI's Responses API."""
    return await _serve(request, ResponsesRequest, plan_translated, ResponsesFrames)


@generate_routes.post(
    MESSAGES_PATH,
    **documented(
        MessagesRequest,
        anthropic_answers.AnthropicMessage,
        streams=True,
        errors=(anthropic_answers.AnthropicErrorBody,),
    ),
)
async def messages(request: Request) -> Response:
    """Answer a conversation, in the shape of Anthropic's API."""
    return await _serve(request, MessagesRequest, plan_translated, MessagesFrames)


def _openai(shape: Callable[[Service, F], Shape]) -> Callable[[Service, F, AnswerPlan, RequestLog], Frames]:
    """Frames that write choices in this shape."""
    return lambda service, fields, plan, log: OpenAIFrames(service, plan, shape(service, fields), log)


async def _serve(
    request: Request,
    model: type[F],
    plan: Callable[[Service, F, Origin], Awaitable[AnswerPlan]],
    frames: Callable[[Service, F, AnswerPlan, RequestLog], Frames],
) -> Response:
    service = service_of(request)
    visit: Visit = request.state.visit
    log, traceparent = service.begin(visit, request.headers)
    try:
        with service.bodies.lease() as lease:
            fields = await service.read(request, model, lease)
            asked = (request.headers.get(HEADER, ""), fields.request_class, fields.tier)
            request_class = class_of(service.config.classes, visit.key, *asked)
            log.request_class = request_class.name
            caller = Caller(visit.key.name, (request_class,))
            service.client.check_room(partial(service.text.exceeds, fields.longest_text()), caller)
            planned = await plan(service, fields, Origin(visit.key, request_class, traceparent))
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
        return Response(status_code=CLIENT_CLOSED)  # never sent
