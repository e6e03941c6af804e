"""Answers by beam search: each step asks the pools for a token of every beam; prefix caches share the beams' blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec

from common.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError
from common.wire.sampling_params import TokenLogprobs
from router.generation.beams.search import Beam, BeamSearch
from router.streams.client import GenerationClient, GenerationRequest, RequestTimeline, TokenEvent


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """How to search: `width` beams, of which the first `n` are the choices of a prompt."""

    width: int
    n: int
    length_penalty: float
    end_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Search:
    """One prompt's search, by the choice that comes first; the others wait for `done`."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    found: list[TokenEvent] = field(default_factory=list)
    error: BaseException | None = None


class BeamClient:
    """A client for one answer. Its requests come prompt by prompt, `settings.n` in a row for each."""

    def __init__(self, client: GenerationClient, settings: BeamSettings) -> None:
        self._client, self._settings = client, settings
        self._num_requests = 0
        self._searches: dict[int, _Search] = {}

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """The next choice, whole, in one event. Raises as the pools' client does."""
        prompt, place = divmod(self._num_requests, self._settings.n)
        self._num_requests += 1
        return self._choice(request, self._searches.setdefault(prompt, _Search()), place)

    async def _choice(
        self, request: GenerationRequest, search: _Search, place: int
    ) -> AsyncGenerator[TokenEvent, None]:
        if place == 0:
            try:
                search.found = await self._run(request)
            except BaseException as error:
                search.error = error
                raise
            finally:
                search.done.set()
        else:
            try:
                async with asyncio.timeout(request.deadline_s):
                    await search.done.wait()
            except TimeoutError:
                raise DeadlineExceeded(_too_long(request)) from None
        if search.error is not None:
            raise search.error if isinstance(search.error, RequestError) else InternalError("the beam search ended")
        yield search.found[place]

    async def _run(self, request: GenerationRequest) -> list[TokenEvent]:
        settings, params = self._settings, request.params
        ends = {*(() if params.ignore_eos else settings.end_token_ids), *params.stop_token_ids}
        search = BeamSearch(settings.width, params.max_tokens, ends, length_penalty=settings.length_penalty)
        deadline = time.monotonic() + request.deadline_s
        num_cached, latest = 0, TokenEvent(())
        for step in range(params.max_tokens):
            events = await self._step(request, search, step, deadline - time.monotonic())
            search.advance([event.logprobs[0] for event in events])
            latest = events[0]
            num_cached = num_cached if step else latest.num_cached_tokens
            if not search.running:
                break
        found = search.best()
        if len(found) < settings.n:
            raise InvalidRequest(f"n: there are only {len(found)} different answers to {settings.n} choices", param="n")
        return [_event(beam, params.logprobs, num_cached, latest.timeline) for beam in found[: settings.n]]

    async def _step(
        self, request: GenerationRequest, search: BeamSearch, step: int, remaining_s: float
    ) -> list[TokenEvent]:
        """The next token of every running beam, with alternatives."""
        params = msgspec.structs.replace(
            request.params,
            max_tokens=1,
            temperature=0.0,
            logprobs=search.num_candidates,
            ignore_eos=True,
            stop_token_ids=(),
        )
        if remaining_s <= 0:
            raise DeadlineExceeded(_too_long(request))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._token(
                            replace(
                                request,
                                request_id=f"{request.request_id}-{step}-{i}",
                                prompt_token_ids=[*request.prompt_token_ids, *beam.token_ids],
                                params=params,
                                prompt=None,
                                deadline_s=remaining_s,
                                sink=None,
                            )
                        )
                    )
                    for i, beam in enumerate(search.running)
                ]
        except ExceptionGroup as errors:  # the first failed and the others were aborted
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _token(self, request: GenerationRequest) -> TokenEvent:
        """The event with the next token of one beam, whose alternatives are all that counts."""
        found: TokenEvent | None = None
        async with aclosing(self._client.generate(request)) as events:
            async for event in events:
                found = event if event.token_ids else msgspec.structs.replace(found or event, timeline=event.timeline)
        if found is None or not found.logprobs:
            raise InternalError("a step of a beam search brought no token")
        return found


def _too_long(request: GenerationRequest) -> str:
    return f"the beam search took longer than {request.deadline_s:g} s"


def _event(beam: Beam, num_alternatives: int, num_cached_tokens: int, timeline: RequestTimeline | None) -> TokenEvent:
    """All of a choice; with -1 alternatives it has no log-probabilities."""
    logprobs = tuple(TokenLogprobs(token.logprob, token.top[:num_alternatives]) for token in beam.logprobs)
    return TokenEvent(
        beam.token_ids,
        logprobs if num_alternatives >= 0 else (),
        beam.finish_reason,
        num_cached_tokens,
        timeline,
    )
