"""Answers one line of a batch: a request of the router to its own endpoint, again until its answer will not change.

    line ──> 2xx, 4xx ──> result
      ^└─ 408, 409, 425, 429, 5xx: after Retry-After or a growing wait ─┐
      └─────────────── until the batch stops ──────────────────────────┘

It goes by the endpoint's own way: the same checks, limits, metrics and log lines, in the class `batch`.
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
from router.api.batches.halt import Halt
from router.api.batches.lines import InputLine
from router.generation import SEND_GRACE_S, FrontDoor
from router.request.errors import error_object
from router.stored import BatchUsage, LineResult, StoredBatch

log = logging.getLogger(__name__)

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]
"""The endpoints of generation."""

METHOD = "BATCH"
"""What the audit log shows as the method of a line."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Of one line's answer, which is held in memory until it is stored."""
GRACE_S = 2 * SEND_GRACE_S
"""How much longer than a request may take the router waits for its own answer."""
NOT_READY_S = 1.0
"""Between two tries of a line while no worker of its model is ready."""
FAILURES = frozenset((500, 502, 504))
"""Statuses that may be the line's own fault: after `MAX_FAILURES` of them, the last one is its answer."""


class KeyGone(Exception):
    """The API key of a batch no longer exists."""


class ModelAway(Exception):
    """No worker of the line's model is there, and another line waits for one."""

    def __init__(self, model: str) -> None:
        super().__init__(f"model {model!r} has no worker")
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
    prompt_tokens_details: _InputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Answered(msgspec.Struct):
    usage: _Usage | None = None


@dataclass
class _Reply:
    """An answer as it comes. `status` is 0 when none came."""

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
        """The answer to a line whose endpoint broke."""
        return cls(500, parts=[orjson.dumps(error_object(InternalError("the server failed to handle this request")))])


class LineAsker:
    """Shared by all batches of a router: at most `batch_concurrency` lines are answered at once, in turn.

    One line more waits for each of several models that has no worker, and so has one started where that is done.
    """

    def __init__(self, door: FrontDoor, answer: Answer) -> None:
        self._door, self._answer = door, answer
        self._slots = asyncio.Semaphore(door.config.batch_concurrency)
        self._waited_for: set[str] = set()  # models without a worker
        self.num_asking = 0

    @property
    def num_places(self) -> int:
        """The most lines that are asked at once."""
        num_models = len(self._door.models.served)
        return self._door.config.batch_concurrency + (num_models if num_models > 1 else 0)

    async def result(self, line: InputLine, batch: StoredBatch, halt: Halt) -> LineResult | None:
        """The line's result; None if the batch stopped before. Raises KeyGone, and ModelAway for a later try."""
        request_id, wait_s, num_failures = new_request_id(), FIRST_WAIT_S, 0
        metrics = self._door.metrics.batches
        while True:
            lacking = self._lacking(line)
            if self.is_away(lacking):
                raise ModelAway(lacking)
            async with self._place(lacking):
                if not lacking and self._lacking(line):  # its last worker went while it waited for a place
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

    def is_away(self, model: str) -> bool:
        """Whether a model has no worker, and a line waits for one already."""
        return model in self._waited_for and self._door.models.lacking(model) == model

    def _lacking(self, line: InputLine) -> str:
        """See `Models.lacking`; what is wrong with the line's model is the endpoint's to say."""
        try:
            return self._door.models.lacking(line.model if isinstance(line.model, str) else None)
        except RequestError:
            return ""

    @asynccontextmanager
    async def _place(self, lacking: str) -> AsyncIterator[None]:
        """One of the places of all lines, or the one of those that wait for the model that they lack."""
        if not lacking:
            async with self._slots:
                yield
            return
        self._waited_for.add(lacking)
        try:
            yield
        finally:
            self._waited_for.discard(lacking)

    async def _ready(self, halt: Halt) -> bool:
        """Wait for workers; False when the batch stopped before."""
        while not halt.stops:
            if self._door.has_workers[0]:
                return True
            await halt.pause(NOT_READY_S)
        return False

    async def _once(self, line: InputLine, batch: StoredBatch, halt: Halt, request_id: str) -> _Reply | None:
        """One try; None when it was given up."""
        door, path = self._door, batch.endpoint
        visit = door.gate.on_behalf(batch.owner, request_id, method=METHOD, path=path, client=batch.id)
        if visit is None:
            raise KeyGone
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(line.body)).encode())]
        if not line.names_class:
            name = batch_class_of(door.config.classes, visit.key).name
            headers.append((HEADER.encode(), name.encode()))
        scope: Scope = {
            **{"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b""},
            **{"headers": headers, "client": None, "state": {"request_id": request_id, "visit": visit}},
        }
        unread, reply = [line.body], _Reply()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await halt.aborted()
            return {"type": "http.disconnect"}

        self.num_asking += 1
        door.num_active += 1
        try:
            async with asyncio.timeout(door.config.request_timeout_s + GRACE_S):
                await self._answer(scope, receive, reply.send)
        except Exception:
            log.exception("a line of a batch failed", extra={"batch": batch.id, "line": line.number})
            reply = _Reply.failed()
        finally:
            self.num_asking -= 1
            door.num_active -= 1
            visit.status = reply.status or visit.status
            door.gate.leave(visit)
        return reply if reply.status and not (halt.aborts and reply.status in AGAIN) else None


def _result_of(line: InputLine, reply: _Reply, request_id: str) -> LineResult:
    name, is_good = line.custom_id, 200 <= reply.status < 300
    if reply.num_bytes > MAX_ANSWER_BYTES:
        problem = f"the answer has {reply.num_bytes:,} bytes, a batch takes {MAX_ANSWER_BYTES:,}"
        result = BatchResult(name, 0, problem=problem, code="answer_too_large")
        return LineResult(line.number, result.line(request_id), is_good=False)
    body = reply.body
    result = BatchResult(name, reply.status, request_id, orjson.Fragment(body))
    return LineResult(line.number, result.line(request_id), is_good, _usage_in(body) if is_good else BatchUsage())


def _usage_in(body: bytes) -> BatchUsage:
    """The tokens of an answer of any endpoint, each of which names them differently."""
    try:
        used = msgspec.json.decode(body, type=_Answered).usage or _Usage()
    except (msgspec.ValidationError, msgspec.DecodeError):
        return BatchUsage()
    read = used.prompt_tokens_details or used.input_tokens_details or _InputDetails()
    written = used.completion_tokens_details or used.output_tokens_details or _OutputDetails()
    return BatchUsage(
        used.prompt_tokens or used.input_tokens,
        read.cached_tokens,
        used.completion_tokens or used.output_tokens,
        written.reasoning_tokens,
    )
