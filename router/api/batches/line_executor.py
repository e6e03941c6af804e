"""Execution of one batch line as an internal request to the router's endpoint, retried until its answer is final.

    line ──> 2xx, 4xx ──> result
      ^└─ 408, 409, 425, 429, 5xx: after Retry-After or an exponential backoff ─┐
      └─────────────────────── until the batch stops ───────────────────────────┘

Lines pass the same checks, limits, metrics and log as other requests. Their default class is `batch`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import orjson
from starlette.types import Message, Receive, Scope, Send

from common.errors import InternalError, RequestError
from router.access import HEADER, batch_class_of
from router.api.batches.batch_format import (
    AGAIN,
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    MAX_FAILURES,
    BatchResult,
    new_request_id,
)
from router.api.batches.halt import HaltSignal
from router.api.batches.lines import InputLine
from router.generation import SEND_GRACE_S, RouterState
from router.request.errors import error_object
from router.stored import BatchUsage, LineResult, StoredBatch

log = logging.getLogger(__name__)

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]
"""ASGI application of the generation endpoints."""

METHOD = "BATCH"
"""Method of a line's request in the audit log."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Maximum size of one line's answer, which is kept in memory until it is stored."""
GRACE_S = 2 * SEND_GRACE_S
"""Time, in seconds beyond the request timeout, after which the router stops waiting for its own answer."""
NOT_READY_S = 1.0
"""Interval between attempts while no worker of any model is ready."""
FAILURES = frozenset((500, 502, 504))
"""Statuses that the line itself may cause. After `MAX_FAILURES` of them, the last one is its result."""


class KeyDeleted(Exception):
    """The API key of a batch no longer exists."""


class NoWorkers(Exception):
    """No worker serves the line's model, and another line already waits for one."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} has no workers.")
        self.model = model


class _InputDetails(msgspec.Struct):
    cached_tokens: int = 0


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    prompt_tokens_details: _InputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Answered(msgspec.Struct):
    usage: _Usage | None = None


@dataclass
class _Reply:
    """The response of a batch line, collected part by part. `status` is 0 without a response."""

    status: int = 0
    retry_after_s: float = 0.0
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            hints = [value for name, value in message.get("headers", ()) if name.lower() == b"retry-after"]
            self.retry_after_s = min(LONGEST_WAIT_S, float(hints[0])) if hints and hints[0].isdigit() else 0.0
        else:
            body = message.get("body", b"")
            self.num_bytes += len(body)
            if self.num_bytes <= MAX_ANSWER_BYTES:
                self.parts.append(body)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @classmethod
    def failed(cls) -> _Reply:
        """Create the reply to a line whose endpoint raised an unexpected exception."""
        error = InternalError("The server failed to process this request.")
        return cls(500, parts=[orjson.dumps(error_object(error))])


class LineExecutor:
    """Executes lines of all batches of a router, at most `batch_concurrency` at a time, in FIFO order.

    With several models, one more line may wait for each model without workers, which lets an autoscaler start one.
    """

    def __init__(self, router_state: RouterState, answer: Answer) -> None:
        self._router_state, self._answer = router_state, answer
        self._slots = asyncio.Semaphore(router_state.config.batch_concurrency)
        self._models_waited_for: set[str] = set()  # models without workers for which a line waits
        self.num_running_lines = 0

    @property
    def max_lines(self) -> int:
        """Maximum number of concurrent lines."""
        num_models = len(self._router_state.models.served)
        return self._router_state.config.batch_concurrency + (num_models if num_models > 1 else 0)

    async def result(self, line: InputLine, batch: StoredBatch, halt: HaltSignal) -> LineResult | None:
        """Return the line's result; None if the batch stopped first. Raises KeyDeleted, NoWorkers (retry later)."""
        request_id, wait_s, num_failures = new_request_id(), FIRST_WAIT_S, 0
        metrics = self._router_state.metrics.batches
        while True:
            model = self._model_without_workers(line)
            if self.is_deferred(model):
                raise NoWorkers(model)
            async with self._slot(model):
                if not model and self._model_without_workers(line):  # its last worker left while the line was queued
                    continue
                reply = await self._once(line, batch, halt, request_id) if await self._ready(halt) else None
            if reply is None:
                return None
            num_failures += reply.status in FAILURES
            if reply.status not in AGAIN or num_failures >= MAX_FAILURES:
                result = _result_of(line, reply, request_id)
                metrics.count_line("completed" if result.is_good else "failed")
                return result
            metrics.count_line("again")
            await halt.pause(max(reply.retry_after_s, wait_s * random.uniform(0.5, 1.0)))
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def is_deferred(self, model: str) -> bool:
        """Whether a model has no workers and a line already waits for them."""
        return model in self._models_waited_for and self._router_state.models.model_without_workers(model) == model

    def _model_without_workers(self, line: InputLine) -> str:
        """See `Models.model_without_workers`. Errors of the model name are left to the endpoint."""
        try:
            return self._router_state.models.model_without_workers(line.model if isinstance(line.model, str) else None)
        except RequestError:
            return ""

    @asynccontextmanager
    async def _slot(self, model: str) -> AsyncIterator[None]:
        """Hold a general slot, or the slot for lines that wait for workers of `model`, unless it is ""."""
        if not model:
            async with self._slots:
                yield
            return
        self._models_waited_for.add(model)
        try:
            yield
        finally:
            self._models_waited_for.discard(model)

    async def _ready(self, halt: HaltSignal) -> bool:
        """Wait until any model has workers; False if the batch stopped first."""
        while not halt.stops:
            if self._router_state.has_workers[0]:
                return True
            await halt.pause(NOT_READY_S)
        return False

    async def _once(self, line: InputLine, batch: StoredBatch, halt: HaltSignal, request_id: str) -> _Reply | None:
        """Execute the line once; None if it was aborted."""
        router_state, path = self._router_state, batch.endpoint
        client_request = router_state.access.internal_request(
            batch.owner, request_id, method=METHOD, path=path, client=batch.id
        )
        if client_request is None:
            raise KeyDeleted
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(line.body)).encode())]
        if not line.names_class:
            name = batch_class_of(router_state.config.classes, client_request.key).name
            headers.append((HEADER.encode(), name.encode()))
        scope: Scope = {
            **{"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b""},
            **{
                "headers": headers,
                "client": None,
                "state": {"request_id": request_id, "client_request": client_request},
            },
        }
        unread, reply = [line.body], _Reply()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await halt.aborted()
            return {"type": "http.disconnect"}

        self.num_running_lines += 1
        router_state.num_active += 1
        try:
            async with asyncio.timeout(router_state.config.request_timeout_s + GRACE_S):
                await self._answer(scope, receive, reply.send)
        except Exception:
            log.exception("batch line failed", extra={"batch": batch.id, "line": line.number})
            reply = _Reply.failed()
        finally:
            self.num_running_lines -= 1
            router_state.num_active -= 1
            client_request.status = reply.status or client_request.status
            router_state.access.leave(client_request)
        return reply if reply.status and not (halt.aborts and reply.status in AGAIN) else None


def _result_of(line: InputLine, reply: _Reply, request_id: str) -> LineResult:
    name, is_good = line.custom_id, 200 <= reply.status < 300
    if reply.num_bytes > MAX_ANSWER_BYTES:
        problem = f"The answer has {reply.num_bytes:,} bytes; the limit for batches is {MAX_ANSWER_BYTES:,} bytes."
        result = BatchResult(name, 0, problem=problem, code="answer_too_large")
        return LineResult(line.number, result.line(request_id), is_good=False)
    body = reply.body
    result = BatchResult(name, reply.status, request_id, orjson.Fragment(body))
    return LineResult(line.number, result.line(request_id), is_good, _usage_in(body) if is_good else BatchUsage())


def _usage_in(body: bytes) -> BatchUsage:
    """Return the token usage in an answer of any endpoint; their field names differ.

    Only Anthropic's `input_tokens` exclude the tokens that were cached.
    """
    try:
        used = msgspec.json.decode(body, type=_Answered).usage or _Usage()
    except (msgspec.ValidationError, msgspec.DecodeError):
        return BatchUsage()
    read = used.prompt_tokens_details or used.input_tokens_details or _InputDetails()
    written = used.completion_tokens_details or used.output_tokens_details or _OutputDetails()
    return BatchUsage(
        used.prompt_tokens or used.input_tokens + used.cache_read_input_tokens,
        read.cached_tokens or used.cache_read_input_tokens,
        used.completion_tokens or used.output_tokens,
        written.reasoning_tokens,
    )
