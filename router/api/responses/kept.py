"""What the Responses API remembers: responses in the store, and answers that are being made in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from common.errors import InvalidRequest, RequestError, quoted
from router.api.responses.fields import Item, ResponsesRequest
from router.api.responses.items import conversation_items, input_items, listed, record_of, shown
from router.generation import AnswerPlan, FrontDoor, Object, RequestContext, ServedModel, plan_translated
from router.request import BodyLease
from router.request.fields import MAX_MESSAGES
from router.stored import (
    IN_MEMORY,
    RUNNING,
    ConversationGone,
    ConversationTooLong,
    StoredResponse,
    StoredTurn,
    StoreFailed,
    StoreSize,
    asked,
)

if TYPE_CHECKING:  # loaded with a store
    from router.api.responses.background import BackgroundAnswers
    from router.stored import ResponseStore

T = TypeVar("T")

MANY_BYTES = 64 * 1024
"""A conversation of more bytes is read in a thread."""
WRITTEN_S = 1.0
"""A client's next turn may reach another router, which must know this one: milliseconds, unless a disk is stuck."""
PREVIOUS = "previous_response_id"
OFF = "this router keeps no responses (--response-store off)"
LAPSED = "the router that made this response ended before the response was complete"


class NothingKept(RequestError):
    """This router has no store."""

    status = 404
    type = "invalid_request_error"
    code = "response_not_found"


class UnknownResponse(NothingKept):
    """There is no such response for this key."""

    def __init__(self, response_id: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(
            f"there is no response {quoted(response_id)} here: it was not stored, has expired, was deleted, belongs "
            f"to another API key, or lives on another router, whose store this one does not share{hint}",
            param=param,
            code="previous_response_not_found" if param == PREVIOUS else None,
        )


class KeptResponses:
    """Owned by the application. Without a `store` nothing is kept."""

    def __init__(self, door: FrontDoor, store: ResponseStore | None) -> None:
        self._door, self._store = door, store
        self._background: BackgroundAnswers | None = None
        if store is not None:
            from router.api.responses.background import BackgroundAnswers

            self._background = BackgroundAnswers(door, store)

    @property
    def store(self) -> ResponseStore:
        """Raises NothingKept where there is none."""
        if self._store is None:
            raise NothingKept(OFF)
        return self._store

    @property
    def background(self) -> BackgroundAnswers:
        """Raises NothingKept where there is no store."""
        if self._background is None:
            raise NothingKept(OFF)
        return self._background

    @property
    def num_in_background(self) -> int:
        """Answers that are being made in the background."""
        return 0 if self._background is None else self._background.num_running

    @property
    def place(self) -> str:
        """The file in which responses are kept, ":memory:" or "off"."""
        return "off" if self._store is None else self._store.path

    @property
    def size(self) -> StoreSize:
        """How much is kept."""
        return StoreSize() if self._store is None else self._store.size

    def stores(self, fields: ResponsesRequest) -> bool:
        """Whether the response to this request is kept."""
        return self._store is not None and fields.store is not False

    async def plan(self, model: ServedModel, fields: ResponsesRequest, context: RequestContext) -> AnswerPlan:
        """Plan the chat request that the conversation so far and its new items mean. Raises RequestError."""
        self.check(fields, context.key.name)
        with self._door.bodies.lease() as lease:
            past = await self.past(fields, context.key.name, lease)
            if fields.background:  # its events are what is made of it, read or not
                fields = fields.model_copy(update={"stream": True})
            translate = partial(fields.as_chat, past)
            return await plan_translated(model, fields, context, translate, is_long=fields.is_long(past))

    def check(self, fields: ResponsesRequest, owner: str) -> None:
        """Raises InvalidRequest for what the store does not allow, Overloaded for too much in the background."""
        for name in (PREVIOUS, "background"):
            if self._store is None and getattr(fields, name):
                raise InvalidRequest(f"{name}: {OFF}", param=name)
        if fields.background and fields.store is False:
            raise InvalidRequest("store: a response in the background must be stored", param="store")
        if fields.background:
            self.background.check_room(owner)

    async def given(self, fields: ResponsesRequest, response_id: str) -> bytes:
        """The input items of a request in the form that is stored; b"" if it is not. Raises Unavailable."""
        if not self.stores(fields):
            return b""
        write = partial(listed, fields, response_id)
        return await self._door.models.default.text.apart(write) if fields.is_long(()) else write()

    def keep(self, fields: ResponsesRequest, given: bytes, owner: str, response: Object) -> None:
        """Store a response that ended. Never waits; any thread may call."""
        if self._store is not None and response["status"] != "in_progress":
            self._store.keep(record_of(response, fields, given, owner))

    async def written(self) -> None:
        """Wait until other routers that share the store's file can read what was kept here, for a second at most.

        What cannot be written is counted and logged where it fails, and its answer is sent all the same.
        """
        if self._store is None or self._store.path == IN_MEMORY:
            return
        with suppress(StoreFailed, TimeoutError):
            async with asyncio.timeout(WRITTEN_S):
                await self._store.settle()

    async def past(self, fields: ResponsesRequest, owner: str, lease: BodyLease) -> list[Item]:
        """The items of the conversation that a request goes on from, counted by the lease. Raises RequestError."""
        name, most = fields.previous_response_id, self._door.config.max_body_bytes
        if not name:
            return []
        await self.background.settled(name, owner)
        try:
            turns = await asked(self.store.conversation(name, owner, most))
            if (not turns or turns[-1].status in RUNNING) and await self._settle_others(name, owner):
                turns = await asked(self.store.conversation(name, owner, most))
        except ConversationGone as gone:
            hint = f"; the conversation that leads to {quoted(name)} begins before it"
            raise UnknownResponse(gone.missing, param=PREVIOUS, hint=hint) from gone
        except ConversationTooLong as long:
            raise InvalidRequest(f"{PREVIOUS}: {long}", param=PREVIOUS) from long
        if not turns:
            raise UnknownResponse(name, param=PREVIOUS)
        if (status := turns[-1].status) not in ("completed", "incomplete"):
            raise InvalidRequest(f"{PREVIOUS}: its answer is not complete: its status is {status!r}", param=PREVIOUS)
        lease.take_more_objects(part for turn in turns for part in (turn.input, turn.output))
        items = await self._read(turns, lambda: conversation_items(turns))
        if (num_items := len(items) + fields.num_items) > MAX_MESSAGES:
            raise InvalidRequest(
                f"{PREVIOUS}: the conversation has {num_items:,} items, this server takes {MAX_MESSAGES:,}",
                param=PREVIOUS,
            )
        return items

    async def settle(self, response_id: str, owner: str) -> None:
        """Wait until all that ended here so far can be read by other processes. Raises RequestError."""
        if self._store is not None:
            await self.background.settled(response_id, owner)
            await asked(self._store.settle())

    async def find(self, response_id: str, owner: str) -> Object:
        """A response as it is now, for `orjson`. Raises RequestError."""
        answer = self.background.find(response_id, owner)
        if answer is not None:
            return answer.response
        record, lapsed = await self._stored(response_id, owner)
        return _shown(record, lapsed=lapsed)

    async def delete(self, response_id: str, owner: str) -> None:
        """Forget a response, and cancel it first if it runs. Raises RequestError."""
        answer = self.background.find(response_id, owner)
        if answer is not None:
            answer.cancel()
            await answer.end()
            self.background.forget(response_id)
        else:
            record, lapsed = await self._stored(response_id, owner)
            if record.status in RUNNING and not lapsed:
                await asked(self.store.ask_to_cancel(response_id, owner))
        if not await asked(self.store.delete(response_id, owner)) and answer is None:
            raise UnknownResponse(response_id)

    async def cancel(self, response_id: str, owner: str) -> Object:
        """Cancel a response in the background; one that ended stays as it is. Raises RequestError."""
        answer = self.background.find(response_id, owner)
        if answer is not None:
            answer.cancel()
            return await answer.end()
        record, lapsed = await self._stored(response_id, owner)
        if not record.background:
            raise InvalidRequest("only a response that was made with background: true can be cancelled")
        if record.status in RUNNING and not lapsed:
            await asked(self.store.ask_to_cancel(response_id, owner))
        return _shown(record, lapsed=lapsed)

    async def input_items(self, response_id: str, owner: str) -> list[Object]:
        """All that a response was made from, but its instructions. Raises RequestError."""
        try:
            turns = await asked(self.store.turns_left(response_id, owner, 2 * self._door.config.max_body_bytes))
        except ConversationTooLong as long:
            raise InvalidRequest(str(long)) from long
        if not turns:
            raise UnknownResponse(response_id)
        return await self._read(turns, lambda: input_items(turns))

    async def stop(self) -> None:
        """Cancel what runs in the background, and wait until that is stored."""
        if self._background is not None:
            await self._background.close()

    async def close(self) -> None:
        """Stop, and close the store behind the last write."""
        await self.stop()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    async def _stored(self, response_id: str, owner: str) -> tuple[StoredResponse, bool]:
        found = await asked(self.store.find(response_id, owner))
        if found is None and await self._settle_others(response_id, owner):
            found = await asked(self.store.find(response_id, owner))
        if found is None:
            raise UnknownResponse(response_id)
        return found

    async def _settle_others(self, response_id: str, owner: str) -> bool:
        """Have the other processes of this router write what waits; False where there are none."""
        siblings = self._door.siblings
        return siblings is not None and bool(await siblings.ask_all("/responses/settle", owner, id=response_id))

    async def _read(self, turns: Sequence[StoredTurn], read: Callable[[], T]) -> T:
        many = sum(len(turn.input) + len(turn.output) for turn in turns) > MANY_BYTES
        return await self._door.models.default.text.apart(read) if many else read()


def _shown(record: StoredResponse, *, lapsed: bool) -> Object:
    if not lapsed:
        return shown(record)
    return shown(record, status="failed", error={"code": "server_error", "message": LAPSED})
