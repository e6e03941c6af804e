"""Answers with `background: true`: no connection waits for them, and clients ask for them later.

    queued ─> in_progress ─> completed, incomplete, failed ─> the store
       └────────────┴─ cancelled: by its client, or because the router ends

An `Exchange` makes them like any other answer; its client is the `BackgroundAnswer`, which stays until the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from starlette.types import Message, Scope

from common.errors import DeadlineExceeded, InternalError, Overloaded
from router.access import Visit
from router.api.responses.answers import ResponsesFrames
from router.api.responses.fields import ResponsesRequest
from router.api.responses.items import record_of
from router.generation import (
    KEEP_ALIVE,
    AnswerPlan,
    Exchange,
    FrontDoor,
    GenerationCall,
    Object,
    RequestLog,
    ServedModel,
)
from router.request import RESPONSES_PATH
from router.stored import QUEUED, RUNNING, ResponseStore, StoredResponse, StoreFailed

log = logging.getLogger(__name__)

SHUTDOWN = "the router shut down before the response was complete"
METHOD = "BACKGROUND"
"""What the audit log shows as the method of an answer that outlives its request."""
RETRY_AFTER_S = 5.0
"""Answers end in seconds, and only then there is room for another."""
STORE_CANCELLED_S = 5.0
"""How long answers may take to be stored as cancelled when the router ends."""
KEPT_S = 300.0
"""How long events can be read again after their answer ended, and an answer that the store could not take."""
MAX_ENDED = 64
"""Copies of ended answers that are kept at most; beyond it the oldest go."""
MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Events of all streamed answers in the background; above it, the largest can no longer be read again."""
GROWTH_BYTES = 256 * 1024
"""The bound is looked at each time that an answer has so many more."""
EVENT_BYTES = 64
"""What an event takes beside its text."""
END_S = 30.0
"""How long a client waits for the end of an answer that it cancelled; all that happens then has shorter deadlines."""
SCOPE: Scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": RESPONSES_PATH, "headers": []}


class BackgroundAnswer:
    """One answer; a client that polls gets `response` now. It has `events` if its client wants a stream."""

    def __init__(self, fields: ResponsesRequest, given: bytes, visit: Visit, request_log: RequestLog) -> None:
        """`given` are the input items as they are stored."""
        self._fields, self._given = fields, given
        self.visit, self.log = visit, request_log
        self.on_growth: Callable[[], None] = lambda: None
        self.response: Object = {}
        self.events: list[bytes] | None = [] if fields.stream else None
        self.num_bytes = 0
        self.ended = asyncio.Event()
        self._cancelled, self._reason = asyncio.Event(), ""
        self._more = asyncio.Event()  # replaced at each event

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def owner(self) -> str:
        return self.visit.key.name

    @property
    def is_running(self) -> bool:
        return self.response["status"] in RUNNING

    def record(self, response: Object) -> StoredResponse:
        """What the store keeps of this answer while its response is `response`."""
        return record_of(response, self._fields, self._given, self.owner)

    def cancel(self, reason: str = "") -> None:
        """End it; without a `reason` its client wanted that. `ended` is set soon after."""
        if not self._cancelled.is_set():
            self._reason = reason
            self._cancelled.set()

    async def end(self) -> Object:
        """The response once it has ended and is stored. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(END_S):
                await self.ended.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the response did not end within {END_S:g} s") from None
        return self.response

    async def make(self, exchange: Exchange, frames: ResponsesFrames) -> None:
        """Make the answer. It always ends in a state that says how."""
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
            await exchange(SCOPE, receive, send)
        except Exception:
            log.exception("an answer in the background failed", extra={"id": self.id})
        finally:
            if self.is_running:
                if self._cancelled.is_set():
                    self.add(frames.cancelled(self._reason))
                else:
                    self.add(frames.error(self.log.error or InternalError("the server failed to make this response")))

    def add(self, data: bytes) -> None:
        """Keep events for clients that read them."""
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
        """They can no longer be read; who reads them now gets no more."""
        self.events, self.num_bytes = None, 0
        self._more.set()

    async def follow(self, start: int, keepalive_s: float) -> AsyncIterator[bytes]:
        """The events from number `start` on, until the answer ends."""
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
    """The answers in the background of this process: those that run, and for a while those that ended."""

    def __init__(self, door: FrontDoor, store: ResponseStore) -> None:
        self._door, self._store = door, store
        self._answers: dict[str, BackgroundAnswer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        store.on_cancel = self._on_cancel

    @property
    def num_running(self) -> int:
        return sum(not answer.ended.is_set() for answer in self._answers.values())

    def find(self, response_id: str, owner: str) -> BackgroundAnswer | None:
        """An answer of this key that runs here, or ended a short time ago."""
        answer = self._answers.get(response_id)
        return answer if answer is not None and answer.owner == owner else None

    async def settled(self, response_id: str, owner: str) -> None:
        """Wait for an answer that is complete and not stored yet."""
        answer = self.find(response_id, owner)
        if answer is not None and not answer.is_running:
            await answer.end()

    def forget(self, response_id: str) -> None:
        """Keep no copy of an answer."""
        self._answers.pop(response_id, None)

    def check_room(self, owner: str) -> None:
        """Raises Overloaded when as many answers as allowed are being made, for all keys or for this one."""
        most = self._door.config.max_background
        own = most if not owner else max(1, most // 2)
        running = [answer.owner for answer in self._answers.values() if not answer.ended.is_set()]
        num_own = running.count(owner)
        if len(running) >= most or num_own >= own:
            raise Overloaded(
                f"background: {len(running):,} responses are being made in the background, {num_own:,} of them for "
                f"this key; this router makes {most:,} at once, {own:,} for a key",
                retry_after_s=RETRY_AFTER_S,
            )

    async def start(
        self, call: GenerationCall, model: ServedModel, fields: ResponsesRequest, given: bytes, plan: AnswerPlan
    ) -> BackgroundAnswer:
        """Begin to make an answer, which takes its visit's place among the key's. `given` are its stored input items.

        Raises StoreFailed, Overloaded.
        """
        answer = BackgroundAnswer(fields, given, call.visit, call.log)
        frames = ResponsesFrames(model, fields, plan, call.log, partial(self._keep, answer), stored=True)
        exchange = call.answer(model, plan, frames)
        self._loop = asyncio.get_running_loop()
        self.check_room(answer.owner)  # others may have come while this one was tokenised
        answer.response = frames.response(QUEUED)
        answer.add(frames.queued())
        self._answers[answer.id] = answer
        try:
            await self._store.begin(answer.record(answer.response))
        except BaseException:
            self.forget(answer.id)
            raise
        came, answer.visit = answer.visit, _continued(answer.visit)
        came.admitted, came.model_quotas = False, ()
        answer.log.visit = answer.visit
        answer.on_growth = self._bound_events
        task = asyncio.create_task(self._run(answer, exchange, frames), name=f"{answer.id}-background")
        self._tasks.add(task)
        self._door.num_active += 1
        task.add_done_callback(self._on_done)
        return answer

    def _keep(self, answer: BackgroundAnswer, response: Object) -> None:
        """An answer's response has changed; how it ended is stored with its end."""
        answer.response = response
        if response["status"] in RUNNING:
            self._store.note(answer.record(response))

    async def close(self) -> None:
        """Cancel what runs, and wait until that is stored."""
        for answer in list(self._answers.values()):
            answer.cancel(SHUTDOWN)
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=STORE_CANCELLED_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # ------------------------------------------------------------ inside

    async def _run(self, answer: BackgroundAnswer, exchange: Exchange, frames: ResponsesFrames) -> None:
        stored = False
        try:
            await answer.make(exchange, frames)
            await self._store.finish(answer.record(answer.response))
            stored = True
        except StoreFailed:  # counted and logged; the copy here is all there is
            pass
        finally:
            answer.ended.set()
            answer.add(b"")  # wakes those who read
            self._door.gate.leave(answer.visit)
            if stored and answer.events is None:
                self.forget(answer.id)
            else:
                asyncio.get_running_loop().call_later(KEPT_S, self.forget, answer.id)
                self._drop_oldest()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._door.num_active -= 1
        if not task.cancelled() and task.exception() is not None:
            log.error("an answer in the background was lost", exc_info=task.exception())

    def _drop_oldest(self) -> None:
        """Bound the copies of answers that ended."""
        ended = [name for name, answer in self._answers.items() if answer.ended.is_set()]
        for name in ended[: max(0, len(ended) - MAX_ENDED)]:
            self.forget(name)

    def _bound_events(self) -> None:
        kept = [answer for answer in self._answers.values() if answer.num_bytes]
        while sum(answer.num_bytes for answer in kept) > MAX_EVENT_BYTES:
            max(kept, key=lambda answer: answer.num_bytes).forget_events()

    def _on_cancel(self, ids: Sequence[str]) -> None:
        """Another router was asked to cancel these; the store's thread calls."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, ids)

    def _cancel(self, ids: Sequence[str]) -> None:
        for name in ids:
            if name in self._answers:
                self._answers[name].cancel()


def _continued(visit: Visit) -> Visit:
    """The visit of an answer whose request is over: the same key and its place, and a line of its own."""
    continued = Visit(visit.request_id, METHOD, visit.path, visit.client, visit.key, visit.quota)
    continued.admitted, continued.model_quotas = visit.admitted, visit.model_quotas
    return continued
