"""Beam search: the likeliest continuations of a prompt, several tokens at a time kept side by side. Pure.

As `transformers` and vLLM search: in each step every beam grows by its likeliest tokens, and of all that come out of it
the best `width` go on. A continuation that ends competes by its log-probability over its length to the power of
`length_penalty`. The search ends when no beam can beat the finished ones any more, so it finds what a search to the
last token would find.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from array import array
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

from common.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError
from common.grammar import token_limits
from common.wire import SamplingParams, TokenLogprobs
from router.dispatch import GenerationClient, GenerationRequest, RequestTimeline, TokenEvent


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation: `logprobs` has an item for each of `token_ids`. `finish_reason` is "" while it may go on."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    sum_logprobs: float = 0.0
    finish_reason: str = ""

    def followed_by(self, token_id: int, logprobs: TokenLogprobs, finish_reason: str = "") -> Beam:
        return Beam(
            (*self.token_ids, token_id),
            (*self.logprobs, logprobs),
            self.sum_logprobs + logprobs.logprob,
            finish_reason,
        )


class _Candidate(NamedTuple):
    """A beam and a possible next token. Most candidates are dropped, so tokens are copied only for a chosen one."""

    sum_logprobs: float
    beam: Beam
    token_id: int
    logprob: float
    alternatives: TokenLogprobs

    def grown(self, finish_reason: str = "") -> Beam:
        own = TokenLogprobs(self.logprob, self.alternatives.top)
        return self.beam.followed_by(self.token_id, own, finish_reason)


class BeamSearch:
    """`running` are the beams that need a next token, with `num_candidates` alternatives to it."""

    def __init__(
        self, width: int, max_tokens: int, end_token_ids: Collection[int], *, length_penalty: float = 1.0
    ) -> None:
        self._width, self._max_tokens, self._length_penalty = width, max_tokens, length_penalty
        self._end_token_ids = frozenset(end_token_ids)
        self.running = [Beam()]
        self._finished: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """How many alternatives each beam gets: enough for `width` beams to go on though each could also end."""
        return self._width + max(self._width, len(self._end_token_ids))

    def advance(self, found: Sequence[TokenLogprobs], banned: Sequence[Collection[int]]) -> None:
        """Let every running beam grow; `found` has the alternatives of each, in their order.

        Those of a beam's `banned` tokens do not count, and of the others no more than `num_candidates`.
        """
        grown: list[_Candidate] = []
        for beam, alternatives, bans in zip(self.running, found, banned, strict=True):
            free = (each for each in alternatives.top if each[0] not in bans)
            for token_id, logprob in islice(free, self.num_candidates):
                one = _Candidate(beam.sum_logprobs + logprob, beam, token_id, logprob, alternatives)
                if token_id in self._end_token_ids:
                    self._finished.append(one.grown("stop"))
                else:
                    grown.append(one)
        self.running = [one.grown() for one in heapq.nlargest(self._width, grown, key=lambda one: one.sum_logprobs)]
        if self.running and len(self.running[0].token_ids) >= self._max_tokens:
            self._finished += [Beam(b.token_ids, b.logprobs, b.sum_logprobs, "length") for b in self.running]
            self.running = []
        self._finished = heapq.nlargest(self._width, self._finished, key=self._score)
        if len(self._finished) == self._width and self._bound() <= self._score(self._finished[-1]):
            self.running = []

    def best(self) -> list[Beam]:
        """The finished continuations, the best first: `width` of them once none is running."""
        return list(self._finished)

    def _score(self, beam: Beam) -> float:
        """An end token counts in the sum, and not in the length."""
        length = len(beam.token_ids) - (beam.finish_reason == "stop")
        return float(beam.sum_logprobs / max(1, length) ** self._length_penalty)

    def _bound(self) -> float:
        """No running beam can reach a higher score than this: its sum only falls."""
        if not self.running:
            return -float("inf")
        length = self._max_tokens if self._length_penalty > 0 else len(self.running[0].token_ids)
        return float(self.running[0].sum_logprobs / max(1, length) ** self._length_penalty)


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
