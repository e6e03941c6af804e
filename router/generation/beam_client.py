"""Answers by beam search: each step asks the pools for a token of every beam; prefix caches share the beams' blocks.

A step is an answer of one token, and workers do not know about beams. So the rules on an answer's tokens are applied
here: a step requests one more alternative for each token that may be banned, or the allowed tokens' log-probabilities.
Admission judges a search only at its first step: a running search is not refused.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from common.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError
from common.grammar import token_limits
from common.wire import SamplingParams, TokenLogprobs
from router.dispatch import GenerationClient, GenerationRequest, RequestTimeline, TokenEvent
from router.generation.beam_search import Beam, BeamSearch


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
        first, lines = TokenEvent(()), list[RequestTimeline]()
        for step in range(params.max_tokens):
            banned = [self._banned(params, beam) for beam in search.running]
            events = await self._step(request, search, banned, step, deadline - time.monotonic())
            search.advance([event.logprobs[0] for event in events], banned)
            first = first if step else events[0]
            lines = _joined(lines, events)
            if not search.running:
                break
        found = search.best()
        if len(found) < settings.n:
            raise InvalidRequest(f"n: there are only {len(found)} different answers to {settings.n} choices", param="n")
        return [_event(beam, params.logprobs, first, lines) for beam in found[: settings.n]]

    def _banned(self, params: SamplingParams, beam: Beam) -> frozenset[int]:
        """What must not come next in a beam, by the rule that workers have for the token at the same place."""
        limits = token_limits(params, self._settings.end_token_ids, len(beam.token_ids), beam.token_ids)
        return frozenset(limits.banned)

    async def _step(
        self,
        request: GenerationRequest,
        search: BeamSearch,
        banned: Sequence[Collection[int]],
        step: int,
        remaining_s: float,
    ) -> list[TokenEvent]:
        """The next token of every running beam, with alternatives."""
        if remaining_s <= 0:
            raise DeadlineExceeded(_too_long(request))
        try:
            tasks: list[asyncio.Task[TokenEvent]] = []
            async with asyncio.TaskGroup() as group:
                for i, (beam, bans) in enumerate(zip(search.running, banned, strict=True)):
                    one = msgspec.structs.replace(
                        request,
                        request_id=f"{request.request_id}-{step}-{i}",
                        prompt_token_ids=array("I", request.prompt_token_ids) + array("I", beam.token_ids),
                        params=_params(request.params, search.num_candidates + len(bans), step),
                        prompt=None,
                        deadline_s=remaining_s,
                        sink=None,
                        continues=step > 0,
                        num_at_once=self._settings.width,
                    )
                    tasks.append(group.create_task(self._token(one)))
                    await asyncio.sleep(0)  # submitting a long prompt takes a millisecond
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


def _params(params: SamplingParams, num_candidates: int, step: int) -> SamplingParams:
    """How a step samples: its token does not count, its alternatives do, and the prompt's log-probabilities come once.

    It asks for as many alternatives as the search has candidates, or as the answer shows if these are more.
    """
    return msgspec.structs.replace(
        params,
        max_tokens=1,
        min_tokens=0,
        temperature=0.0,
        logprobs=max(num_candidates, params.logprobs),
        ignore_eos=True,
        stop_token_ids=(),
        prompt_logprobs=-1 if step else params.prompt_logprobs,
        allowed_token_ids=(),
        bad_words=(),
        logprob_token_ids=params.allowed_token_ids,
    )


def _joined(before: Sequence[RequestTimeline], events: Sequence[TokenEvent]) -> list[RequestTimeline]:
    """The latest step's life, which counts the moves and preemptions of all steps: at most one, as a list."""
    lines = [*before, *(event.timeline for event in events if event.timeline is not None)]
    if not lines:
        return []
    num_moves = sum(line.num_attempts - 1 for line in lines)
    num_preemptions = sum(line.num_preemptions for line in lines)
    return [msgspec.structs.replace(lines[-1], num_attempts=1 + num_moves, num_preemptions=num_preemptions)]


def _event(beam: Beam, num_alternatives: int, first: TokenEvent, lines: Sequence[RequestTimeline]) -> TokenEvent:
    """All of a choice; with -1 alternatives it has no log-probabilities. `first` is that of the search."""
    logprobs = tuple(TokenLogprobs(token.logprob, token.top[:num_alternatives]) for token in beam.logprobs)
    return TokenEvent(
        beam.token_ids,
        logprobs if num_alternatives >= 0 else (),
        beam.finish_reason,
        first.num_cached_tokens,
        lines[-1] if lines else None,
        first.prompt_logprobs,
    )
