"""Background responses (`background: true`): no connection waits for them; clients poll for them later.

    queued ─> in_progress ─> completed, incomplete, failed ─> the store
       └────────────┴─ cancelled: by its client, or by shutdown

An `GenerationResponse` generates them like other answers, with a `BackgroundAnswer` as its client until the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from starlette.types import Message, Scope

from common.errors import DeadlineExceeded, InternalError, Overloaded
from router.access import ClientRequest
from router.api.responses.answers import ResponsesSerializer
from router.api.responses.fields import ResponsesRequest
from router.api.responses.items import record_of
from router.generation import (
    KEEP_ALIVE,
    AnswerPlan,
    GenerationCall,
    GenerationResponse,
    Object,
    RequestLog,
    RouterState,
    ServedModel,
)
from router.request import RESPONSES_PATH
from router.stored import QUEUED, RUNNING, ResponseStore, StoredResponse, StoreFailed

log = logging.getLogger(__name__)

SHUTDOWN = "The router shut down before the response was complete."
METHOD = "BACKGROUND"
"""Method of a background response in the audit log."""
RETRY_AFTER_S = 5.0
"""Retry hint for too many background responses. Responses take seconds."""
STORE_CANCELLED_S = 5.0
"""Maximum time, in seconds, for storing responses as cancelled during shutdown."""
KEPT_S = 300.0
"""Time, in seconds, for which events, and responses that could not be stored, remain readable after the end."""
MAX_ENDED = 64
"""Maximum number of ended responses that are kept in memory. The oldest are dropped."""
MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Maximum size of the events of all streamed background responses. Above it, the largest ones are dropped."""
GROWTH_BYTES = 256 * 1024
"""The total size is checked whenever a response has grown by this amount."""
EVENT_BYTES = 64
"""Memory per event without its text."""
END_S = 30.0
"""Maximum time, in seconds, that a request waits for the end of a response that it has cancelled."""
SCOPE: Scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": RESPONSES_PATH, "headers": []}


class BackgroundAnswer:
    """One background response. `response` is its current state. `events` is None unless its client wants a stream."""

    def __init__(
        self, fields: ResponsesRequest, given: bytes, client_request: ClientRequest, request_log: RequestLog
    ) -> None:
        """`given` are the input items as stored."""
        self._fields, self._given = fields, given
        self.client_request, self.log = client_request, request_log
        self.on_growth: Callable[[], None] = lambda: None
        self.response: Object = {}
        self.events: list[bytes] | None = [] if fields.stream else None
        self.num_bytes = 0
        self.ended = asyncio.Event()
        self._cancelled, self._reason = asyncio.Event(), ""
        self._more = asyncio.Event()  # replaced after each event

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def owner(self) -> str:
        return self.client_request.key.name

    @property
    def is_running(self) -> bool:
        return self.response["status"] in RUNNING

    def record(self, response: Object) -> StoredResponse:
        """Return the store's record of this response in the state `response`."""
        return record_of(response, self._fields, self._given, self.owner)

    def cancel(self, reason: str = "") -> None:
        """Cancel the response; `ended` is set soon after. Without a `reason`, its client has cancelled it."""
        if not self._cancelled.is_set():
            self._reason = reason
            self._cancelled.set()

    async def end(self) -> Object:
        """Wait until the response has ended and is stored, and return it. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(END_S):
                await self.ended.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"The response did not end within {END_S:g} s.") from None
        return self.response

    async def make(self, generation: GenerationResponse, serializer: ResponsesSerializer) -> None:
        """Generate the response. It always ends in a final status."""
        begun = False

        async def receive() -> Message:
            await self._cancelled.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message["status"] == 200
            elif begun:
                self.add(message["body"])

        try:
            await generation(SCOPE, receive, send)
        except Exception:
            log.exception("background response failed", extra={"id": self.id})
        finally:
            if self.is_running:
                if self._cancelled.is_set():
                    self.add(serializer.cancelled(self._reason))
                else:
                    failed = InternalError("The server failed to generate this response.")
                    self.add(serializer.error(self.log.error or failed))

    def add(self, data: bytes) -> None:
        """Store events for clients that read the stream."""
        if self.events is None:
            return
        before = self.num_bytes
        for block in data.split(b"\n\n"):
            if block and not block.startswith(b":"):
                self.events.append(block + b"\n\n")
                self.num_bytes += len(block) + EVENT_BYTES
        if before // GROWTH_BYTES != self.num_bytes // GROWTH_BYTES:
            self.on_growth()
        self._more.set()
        self._more = asyncio.Event()

    def forget_events(self) -> None:
        """Drop the events. Streams that are reading them end."""
        self.events, self.num_bytes = None, 0
        self._more.set()

    async def follow(self, start: int, keepalive_s: float) -> AsyncIterator[bytes]:
        """Yield the events from number `start` until the response ends."""
        while (events := self.events) is not None:
            more, ended = self._more, self.ended.is_set()
            if start < len(events):
                yield b"".join(events[start:])
                start = len(events)
            elif ended:
                return
            else:
                try:
                    await asyncio.wait_for(more.wait(), keepalive_s)
                except TimeoutError:
                    yield KEEP_ALIVE


class BackgroundAnswers:
    """Background responses of this process: the running ones and, for a while, those that have ended."""

    def __init__(self, router_state: RouterState, store: ResponseStore) -> None:
        self._router_state, self._store = router_state, store
        self._answers: dict[str, BackgroundAnswer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        store.on_cancel = self._on_cancel

    @property
    def num_running(self) -> int:
        return sum(not answer.ended.is_set() for answer in self._answers.values())

    def find(self, response_id: str, owner: str) -> BackgroundAnswer | None:
        """Return a response of this key that runs here or has ended recently."""
        answer = self._answers.get(response_id)
        return answer if answer is not None and answer.owner == owner else None

    async def settled(self, response_id: str, owner: str) -> None:
        """Wait until a response that is complete is also stored."""
        answer = self.find(response_id, owner)
        if answer is not None and not answer.is_running:
            await answer.end()

    def forget(self, response_id: str) -> None:
        """Remove a response from memory."""
        self._answers.pop(response_id, None)

    def check_capacity(self, owner: str) -> None:
        """Raise Overloaded if all keys together, or this key, already have the maximum of running responses."""
        most = self._router_state.config.max_background
        own = most if not owner else max(1, most // 2)
        running = [answer.owner for answer in self._answers.values() if not answer.ended.is_set()]
        num_own = running.count(owner)
        if len(running) >= most or num_own >= own:
            raise Overloaded(
                f"background: too many background responses: {len(running):,} in total, {num_own:,} of this key. The "
                f"limits are {most:,} in total and {own:,} per key.",
                retry_after_s=RETRY_AFTER_S,
            )

    async def start(
        self, call: GenerationCall, model: ServedModel, fields: ResponsesRequest, given: bytes, plan: AnswerPlan
    ) -> BackgroundAnswer:
        """Start a response, which takes over the request's place in the key's concurrency limit.

        `given` are its input items as stored.

        Raises StoreFailed, Overloaded.
        """
        answer = BackgroundAnswer(fields, given, call.client_request, call.log)
        serializer = ResponsesSerializer(model, fields, plan, call.log, partial(self._keep, answer), stored=True)
        generation = call.answer(model, plan, serializer)
        self._loop = asyncio.get_running_loop()
        self.check_capacity(answer.owner)  # others may have started while the prompt was tokenised
        answer.response = serializer.response(QUEUED)
        answer.add(serializer.queued())
        self._answers[answer.id] = answer
        try:
            await self._store.begin(answer.record(answer.response))
        except BaseException:
            self.forget(answer.id)
            raise
        came, answer.client_request = answer.client_request, _continued(answer.client_request)
        came.admitted, came.model_quotas = False, ()
        answer.log.client_request = answer.client_request
        answer.on_growth = self._bound_events
        task = asyncio.create_task(self._run(answer, generation, serializer), name=f"{answer.id}-background")
        self._tasks.add(task)
        self._router_state.num_active += 1
        task.add_done_callback(self._on_done)
        return answer

    def _keep(self, answer: BackgroundAnswer, response: Object) -> None:
        """Update the state of a response. Final states are stored by `_run`."""
        answer.response = response
        if response["status"] in RUNNING:
            self._store.note(answer.record(response))

    async def close(self) -> None:
        """Cancel all running responses and wait until they are stored."""
        for answer in list(self._answers.values()):
            answer.cancel(SHUTDOWN)
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=STORE_CANCELLED_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # ------------------------------------------------------------ inside

    async def _run(
        self, answer: BackgroundAnswer, generation: GenerationResponse, serializer: ResponsesSerializer
    ) -> None:
        stored = is_deleted = False
        try:
            await answer.make(generation, serializer)
            stored = await self._store.finish(answer.record(answer.response))
            is_deleted = not stored
        except StoreFailed:  # already counted and logged; only the copy in memory remains
            pass
        finally:
            answer.ended.set()
            answer.add(b"")  # wakes the readers
            self._router_state.access.leave(answer.client_request)
            if is_deleted or (stored and answer.events is None):
                self.forget(answer.id)
            else:
                asyncio.get_running_loop().call_later(KEPT_S, self.forget, answer.id)
                self._drop_oldest()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._router_state.num_active -= 1
        if not task.cancelled() and task.exception() is not None:
            log.error("background response was lost", exc_info=task.exception())

    def _drop_oldest(self) -> None:
        """Limit the number of ended responses in memory."""
        ended = [name for name, answer in self._answers.items() if answer.ended.is_set()]
        for name in ended[: max(0, len(ended) - MAX_ENDED)]:
            self.forget(name)

    def _bound_events(self) -> None:
        kept = [answer for answer in self._answers.values() if answer.num_bytes]
        while sum(answer.num_bytes for answer in kept) > MAX_EVENT_BYTES:
            max(kept, key=lambda answer: answer.num_bytes).forget_events()

    def _on_cancel(self, ids: Sequence[str]) -> None:
        """Cancel responses that were cancelled or deleted at another router. Called on the store's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, ids)

    def _cancel(self, ids: Sequence[str]) -> None:
        for name in ids:
            if name in self._answers:
                self._answers[name].cancel()


def _continued(client_request: ClientRequest) -> ClientRequest:
    """Create the state of a response whose request has ended: same key and limits, but a separate audit entry."""
    continued = ClientRequest(
        client_request.request_id,
        METHOD,
        client_request.path,
        client_request.client,
        client_request.key,
        client_request.quota,
    )
    continued.admitted, continued.model_quotas = client_request.admitted, client_request.model_quotas
    return continued
