"""The endpoints that generate: they read and check a request, plan its answer, and pass it to an `Exchange`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.errors import RequestError
from common.model_files import Task
from router.access import HEADER, Visit, class_of
from router.api.anthropic import answers as anthropic_answers
from router.api.anthropic.fields import MessagesRequest
from router.api.anthropic.messages import MessagesFrames
from router.api.embeddings.fields import EmbeddingRequest, RerankRequest, ScoreRequest
from router.api.openai import answers as openai_answers
from router.api.openai.chat import ChatShape, plan_chat
from router.api.openai.completions import CompletionShape, plan_completion
from router.api.openai.translated import plan_translated
from router.api.openapi import documented
from router.api.responses.fields import ResponsesRequest
from router.generation import (
    AnswerPlan,
    Exchange,
    Frames,
    OpenAIFrames,
    Origin,
    RequestLog,
    Service,
    Shape,
    choose_model,
    service_of,
)
from router.request import CHAT_PATH, COMPLETION_PATH, INVOCATIONS_PATH, MESSAGES_PATH, Invocation
from router.request.errors import CLIENT_CLOSED, error_response
from router.request.fields import ChatRequest, CompletionRequest

F = TypeVar(
    "F",
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    Invocation,
    EmbeddingRequest,
    ScoreRequest,
    RerankRequest,
)
Answer = Callable[[Service, F, AnswerPlan, RequestLog], Awaitable[Response]]
"""Makes the answer to a request that is planned."""

generate_routes = APIRouter(tags=["generate"])
"""`/v1/chat/completions`, `/v1/completions`, `/v1/messages` and `/invocations`."""


@generate_routes.post(CHAT_PATH, **documented(ChatRequest, openai_answers.ChatCompletion, streams=True))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await serve(request, ChatRequest, plan_chat, exchange(_openai(ChatShape)))


@generate_routes.post(COMPLETION_PATH, **documented(CompletionRequest, openai_answers.Completion, streams=True))
async def completions(request: Request) -> Response:
    """Continue a text."""
    return await serve(request, CompletionRequest, plan_completion, exchange(_openai(CompletionShape)))


@generate_routes.post(
    INVOCATIONS_PATH,
    **documented(
        ChatRequest | CompletionRequest, openai_answers.ChatCompletion | openai_answers.Completion, streams=True
    ),
)
async def invocations(request: Request) -> Response:
    """Answer a conversation, or continue a text: as the body has `messages` or a `prompt`."""
    return await serve(request, Invocation, _plan_invocation, exchange(_invocation_frames))


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
    return await serve(request, MessagesRequest, _plan_messages, exchange(MessagesFrames))


async def _plan_messages(service: Service, fields: MessagesRequest, origin: Origin) -> AnswerPlan:
    return await plan_translated(service, fields, origin, fields.as_chat, is_long=fields.is_long)


async def _plan_invocation(service: Service, fields: Invocation, origin: Origin) -> AnswerPlan:
    if isinstance(fields, ChatRequest):
        return await plan_chat(service, fields, origin)
    return await plan_completion(service, cast(CompletionRequest, fields), origin)


def _invocation_frames(service: Service, fields: Invocation, plan: AnswerPlan, log: RequestLog) -> Frames:
    shape = ChatShape if isinstance(fields, ChatRequest) else CompletionShape
    return OpenAIFrames(service, plan, shape(service, cast(Any, fields)), log)


def _openai(shape: Callable[[Service, F], Shape]) -> Callable[[Service, F, AnswerPlan, RequestLog], Frames]:
    """Frames that write choices in this shape."""
    return lambda service, fields, plan, log: OpenAIFrames(service, plan, shape(service, fields), log)


def exchange(frames: Callable[[Service, F, AnswerPlan, RequestLog], Frames]) -> Answer[F]:
    """Answers that are sent as they are made."""

    async def answer(service: Service, fields: F, plan: AnswerPlan, log: RequestLog) -> Response:
        return Exchange(service, plan, frames(service, fields, plan, log), log)

    return answer


async def serve(
    request: Request,
    model: type[F],
    plan: Callable[[Service, F, Origin], Awaitable[AnswerPlan]],
    answer: Answer[F],
    *tasks: Task,
) -> Response:
    """Read, check and plan a request, and answer it, if only with an error.

    The model must be served for one of `tasks`; without any, to generate text.
    """
    service = service_of(request)
    visit: Visit = request.state.visit
    log, traceparent = service.begin(visit, request.headers)
    try:
        with service.bodies.lease() as lease:
            fields = await service.read(request, model, lease)
            asked = (request.headers.get(HEADER, ""), fields.request_class, fields.tier)
            request_class = class_of(service.config.classes, visit.key, *asked)
            log.request_class = request_class.name
            origin = Origin(visit.key, request_class, traceparent)

            async def plan_at(at: Service) -> AnswerPlan:
                at.check_task(*(tasks or ("generate",)))
                return await plan(at, fields, origin)

            chosen, planned = await choose_model(service, log, fields, plan_at, origin)
        service.gate.take_prompt(visit, planned.num_prompt_tokens)
        return await answer(chosen, fields, replace(planned, body_bytes=lease.rest_bytes), log)
    except RequestError as error:
        service.hint(error)
        log.fail(error)
        log.end()
        return error_response(error)
    except ClientDisconnect:
        log.client_gone()
        log.end()
        return Response(status_code=CLIENT_CLOSED)  # never sent
