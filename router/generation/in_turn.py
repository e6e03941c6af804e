"""The prompts of an answer that has very many: only so many of them are with the pools at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from common.errors import DeadlineExceeded, Overloaded
from router.dispatch import GenerationRequest, TokenEvent, TokenSource


class InTurnClient:
    """A client for one answer. The time that a request waits here for its turn counts towards its deadline.

    A request that the pools refuse for want of room, while others of the answer are there, has another turn after one
    of these: from then on one fewer is there at a time.
    """

    def __init__(self, client: TokenSource, most_at_once: int) -> None:
        self._client, self._places = client, asyncio.Semaphore(most_at_once)
        self._began, self._num_there = time.monotonic(), 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `TokenSource.generate`; one that is refused behind its first event is not tried again."""
        while True:
            placed = msgspec.structs.replace(request, deadline_s=await self._turn(request))
            self._num_there += 1
            began = gives_up_place = False
            try:
                async with aclosing(self._client.generate(placed)) as events:
                    async for event in events:
                        began = True
                        yield event
                return
            except Overloaded:
                if began or self._num_there == 1:
                    raise
                gives_up_place = True
            finally:
                self._num_there -= 1
                if not gives_up_place:
                    self._places.release()

    async def _turn(self, request: GenerationRequest) -> float:
        """Wait for a place; the seconds that the request has left then. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._left_s(request)):
                await self._places.acquire()
        except TimeoutError:
            raise self._late(request) from None
        left_s = self._left_s(request)
        if left_s <= 0:
            self._places.release()
            raise self._late(request)
        return left_s

    def _left_s(self, request: GenerationRequest) -> float:
        return request.deadline_s - (time.monotonic() - self._began)

    def _late(self, request: GenerationRequest) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request's {request.deadline_s:g} s were over before the turn of all its prompts")
