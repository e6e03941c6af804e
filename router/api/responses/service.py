"""State of the Responses API: stored responses, and background responses that are being generated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from common.errors import InvalidRequest, RequestError, quoted
from router.api.responses.fields import Item, ResponsesRequest
from router.api.responses.items import conversation_items, input_items, listed, record_of, shown
from router.generation import AnswerPlan, Object, RequestContext, RouterState, ServedModel, plan_translated
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
"""Size above which a conversation is parsed in a thread."""
WRITTEN_S = 1.0
"""Maximum time, in seconds, to wait for a write. It takes milliseconds, and the next turn may use another router."""
PREVIOUS = "previous_response_id"
OFF = "this router does not store responses (--response-store off)"
LAPSED = "The router that was generating this response stopped before the response was complete."


class NothingKept(RequestError):
    """This router has no response store."""

    status = 404
    type = "invalid_request_error"
    code = "response_not_found"


class UnknownResponse(NothingKept):
    """The response does not exist or belongs to another key."""

    def __init__(self, response_id: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(
            f"The response {quoted(response_id)} does not exist. It may not have been stored, may have expired, been "
            f"deleted, or belong to another API key or to a router with a separate store.{hint}",
            param=param,
            code="previous_response_not_found" if param == PREVIOUS else None,
        )


class ResponseService:
    """Stored and background responses of one application. Without a `store`, nothing is kept."""

    def __init__(self, router_state: RouterState, store: ResponseStore | None) -> None:
        self._router_state, self._store = router_state, store
        self._background: BackgroundAnswers | None = None
        if store is not None:
            from router.api.responses.background import BackgroundAnswers

            self._background = BackgroundAnswers(router_state, store)

    @property
    def store(self) -> ResponseStore:
        """The response store. Raises NothingKept if there is none."""
        if self._store is None:
            raise NothingKept(OFF)
        return self._store

    @property
    def background(self) -> BackgroundAnswers:
        """The background responses. Raises NothingKept if there is no store."""
        if self._background is None:
            raise NothingKept(OFF)
        return self._background

    @property
    def num_in_background(self) -> int:
        """Number of background responses that are being generated."""
        return 0 if self._background is None else self._background.num_running

    @property
    def place(self) -> str:
        """The path of the store, ":memory:" or "off"."""
        return "off" if self._store is None else self._store.path

    @property
    def size(self) -> StoreSize:
        """The size of the store."""
        return StoreSize() if self._store is None else self._store.size

    def stores(self, fields: ResponsesRequest) -> bool:
        """Whether the response to this request will be stored."""
        return self._store is not None and fields.store is not False

    async def plan(self, model: ServedModel, fields: ResponsesRequest, context: RequestContext) -> AnswerPlan:
        """Plan the chat request for the conversation so far and its new items. Raises RequestError."""
        self.check(fields, context.key.name)
        with self._router_state.bodies.lease() as lease:
            past = await self.past(fields, context.key.name, lease)
            if fields.background:  # always generated as a stream
                fields = fields.model_copy(update={"stream": True})
            translate = partial(fields.as_chat, past)
            return await plan_translated(model, fields, context, translate, is_long=fields.is_long(past))

    def check(self, fields: ResponsesRequest, owner: str) -> None:
        """Raise InvalidRequest for unsupported storage options, Overloaded for too many background responses."""
        for name in (PREVIOUS, "background"):
            if self._store is None and getattr(fields, name):
                raise InvalidRequest(f"{name}: {OFF}", param=name)
        if fields.background and fields.store is False:
            raise InvalidRequest("store: must not be false with background: true", param="store")
        if fields.background:
            self.background.check_capacity(owner)

    async def given(self, fields: ResponsesRequest, response_id: str) -> bytes:
        """Serialise a request's input items for the store; b"" if they are not stored. Raises Unavailable."""
        if not self.stores(fields):
            return b""
        write = partial(listed, fields, response_id)
        return await self._router_state.models.threads.apart(write) if fields.is_long(()) else write()

    def keep(self, fields: ResponsesRequest, given: bytes, owner: str, response: Object) -> None:
        """Store a response that has ended. Does not block; thread-safe."""
        if self._store is not None and response["status"] != "in_progress":
            self._store.keep(record_of(response, fields, given, owner))

    async def written(self) -> None:
        """Wait until other routers that share the store can read what was kept here, for at most `WRITTEN_S`.

        Failed writes are counted and logged by the store, and the answer is sent nevertheless.
        """
        if self._store is None or self._store.path == IN_MEMORY:
            return
        with suppress(StoreFailed, TimeoutError):
            async with asyncio.timeout(WRITTEN_S):
                await self._store.settle()

    async def past(self, fields: ResponsesRequest, owner: str, lease: BodyLease) -> list[Item]:
        """Return the items of the conversation that a request continues, counted by `lease`. Raises RequestError."""
        name, most = fields.previous_response_id, self._router_state.config.max_body_bytes
        if not name:
            return []
        await self.background.settled(name, owner)
        try:
            turns = await asked(self.store.conversation(name, owner, most))
            if (not turns or turns[-1].status in RUNNING) and await self._settle_others(name, owner):
                turns = await asked(self.store.conversation(name, owner, most))
        except ConversationGone as gone:
            hint = f" The conversation of {quoted(name)} depends on it."
            raise UnknownResponse(gone.missing, param=PREVIOUS, hint=hint) from gone
        except ConversationTooLong as long:
            raise InvalidRequest(f"{PREVIOUS}: {long}", param=PREVIOUS) from long
        if not turns:
            raise UnknownResponse(name, param=PREVIOUS)
        if (status := turns[-1].status) not in ("completed", "incomplete"):
            raise InvalidRequest(f"{PREVIOUS}: the response is not complete, its status is {status!r}", param=PREVIOUS)
        lease.take_more_objects(part for turn in turns for part in (turn.input, turn.output))
        items = await self._read(turns, lambda: conversation_items(turns))
        if (num_items := len(items) + fields.num_items) > MAX_MESSAGES:
            raise InvalidRequest(
                f"{PREVIOUS}: the conversation has {num_items:,} items; the limit is {MAX_MESSAGES:,}",
                param=PREVIOUS,
            )
        return items

    async def settle(self, response_id: str, owner: str) -> None:
        """Wait until other processes can read everything that has ended here so far. Raises RequestError."""
        if self._store is not None:
            await self.background.settled(response_id, owner)
            await asked(self._store.settle())

    async def find(self, response_id: str, owner: str) -> Object:
        """Return the current state of a response, for `orjson`. Raises RequestError."""
        answer = self.background.find(response_id, owner)
        if answer is not None:
            return answer.response
        record, lapsed = await self._stored(response_id, owner)
        return _shown(record, lapsed=lapsed)

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response, cancelling it if it runs. Raises RequestError."""
        answer = self.background.find(response_id, owner)
        if answer is not None:
            answer.cancel()
            await answer.end()
            self.background.forget(response_id)
        else:
            await self._stored(response_id, owner)  # its router finds the row deleted, and cancels it
        if not await asked(self.store.delete(response_id, owner)) and answer is None:
            raise UnknownResponse(response_id)

    async def cancel(self, response_id: str, owner: str) -> Object:
        """Cancel a background response. Does nothing if it has ended. Raises RequestError."""
        answer = self.background.find(response_id, owner)
        if answer is not None:
            answer.cancel()
            return await answer.end()
        record, lapsed = await self._stored(response_id, owner)
        if not record.background:
            raise InvalidRequest("Only responses that were created with background: true can be cancelled.")
        if record.status in RUNNING and not lapsed:
            await asked(self.store.ask_to_cancel(response_id, owner))
        return _shown(record, lapsed=lapsed)

    async def input_items(self, response_id: str, owner: str) -> list[Object]:
        """Return all input items of a response, without its instructions. Raises RequestError."""
        try:
            turns = await asked(self.store.turns_left(response_id, owner, 2 * self._router_state.config.max_body_bytes))
        except ConversationTooLong as long:
            raise InvalidRequest(str(long)) from long
        if not turns:
            raise UnknownResponse(response_id)
        return await self._read(turns, lambda: input_items(turns))

    async def stop(self) -> None:
        """Cancel all background responses and wait until they are stored."""
        if self._background is not None:
            await self._background.close()

    async def close(self) -> None:
        """Stop, and close the store after its last write."""
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
        """Make sibling processes store what they have queued. Returns False if there are no siblings."""
        siblings = self._router_state.siblings
        return siblings is not None and bool(await siblings.ask_all("/responses/settle", owner, id=response_id))

    async def _read(self, turns: Sequence[StoredTurn], read: Callable[[], T]) -> T:
        many = sum(len(turn.input) + len(turn.output) for turn in turns) > MANY_BYTES
        return await self._router_state.models.threads.apart(read) if many else read()


def _shown(record: StoredResponse, *, lapsed: bool) -> Object:
    if not lapsed:
        return shown(record)
    return shown(record, status="failed", error={"code": "server_error", "message": LAPSED})
