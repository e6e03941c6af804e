"""A request to a generation endpoint, from parsing its body to planning its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from common.errors import RequestError
from common.model_files import Task
from router.access import HEADER, ClientRequest, class_of
from router.generation.answer_serializer import AnswerSerializer
from router.generation.context import RequestContext
from router.generation.generation_response import EVENT_STREAM, GenerationResponse, StreamFormat
from router.generation.models import Plan, SelectionFields, choose_model, requester_of
from router.generation.plan import AnswerPlan
from router.generation.router_state import router_state_of
from router.generation.served_model import ServedModel

F = TypeVar("F", bound=SelectionFields)
M = TypeVar("M", bound=BaseModel)


@asynccontextmanager
async def generation_call(request: Request, model: type[M]) -> AsyncIterator[tuple[GenerationCall, M]]:
    """Read and validate the body of a generation request as `model`.

    Logs the error that ends the request and releases the memory of its body. Raises RequestError, and ClientDisconnect
    if the client disconnects while the body is read.
    """
    call = GenerationCall(request)
    try:
        yield call, await call.router_state.reader.read(request, model, call.lease)
    except BaseException as error:
        call.lease.release()
        match error:
            case ClientDisconnect():
                call.log.client_gone()
                call.log.end()
            case RequestError():
                call.refund()
                call.router_state.add_retry_after(error)
                call.log.fail(error)
                call.log.end()
        raise


class GenerationCall:
    """One request to a generation endpoint: `plan` its answer, then `answer` it."""

    def __init__(self, request: Request) -> None:
        self.router_state = router_state_of(request)
        self.client_request: ClientRequest = request.state.client_request
        self.log, self._traceparent = self.router_state.begin(self.client_request, request.headers)
        self._request, self.lease = request, self.router_state.bodies.lease()
        self._num_planned_tokens = 0

    async def plan(
        self, fields: F, plan: Plan[F], *tasks: Task, keep_s: float | None = None
    ) -> tuple[ServedModel, AnswerPlan]:
        """Choose a model that is served for one of `tasks` (default: generate) and plan the answer.

        A model that is loaded on demand is loaded until the end of the request, and for `keep_s` seconds after it.
        Raises RequestError.
        """
        models = self.router_state.models
        if models.loader is not None:
            requester = requester_of(self.client_request, fields.end_user)
            self.log.release_model = await models.use(fields.model, self.client_request.key, requester, keep_s)
        asked = (self._request.headers.get(HEADER, ""), fields.request_class, fields.tier)
        request_class = class_of(self.router_state.config.classes, self.client_request.key, *asked)
        self.log.request_class = request_class.name
        salt = self.client_request.key.salt(fields.cache_salt or "")
        context = RequestContext(self.client_request.key, request_class, salt, self._traceparent)
        model, planned = await choose_model(
            models, self.router_state.access, self.log, fields, context, plan, tasks or ("generate",)
        )
        self._num_planned_tokens = planned.num_prompt_tokens
        return model, planned

    def refund(self) -> None:
        """Refund the prompt of a request that ends before its answer is generated."""
        if self._num_planned_tokens:
            self.router_state.access.spend(self.client_request, -self._num_planned_tokens)

    def answer(
        self,
        model: ServedModel,
        plan: AnswerPlan,
        serializer: AnswerSerializer,
        before_end: Callable[[], Awaitable[None]] | None = None,
        stream_format: StreamFormat = EVENT_STREAM,
    ) -> GenerationResponse:
        """Return the response that generates the answer. `before_end`, `stream_format`: see `GenerationResponse`.

        The response takes ownership of the body's memory and keeps only the fields without the prompt.
        """
        self.lease.keep_rest()
        return GenerationResponse(
            self.router_state, model, plan, serializer, self.log, self.lease, before_end, stream_format
        )
