"""Beam search over a prompt's continuations: the search algorithm, which is pure, and a client that runs it.

The algorithm is that of `transformers` and vLLM: each step extends every beam by its likeliest tokens and keeps the
best `width` of the results. The score of a finished continuation is its log-probability divided by its length to the
power of `length_penalty`. The search stops early when no running beam can still beat the finished ones, so the result
equals that of a search up to the last token.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

from common.errors import RETRY_AFTER_S, DeadlineExceeded, InternalError, InvalidRequest, RequestError, Unavailable
from common.grammar import token_limits
from common.wire import SamplingParams, TokenLogprobs
from router.dispatch import GenerationClient, GenerationRequest, RequestTimeline, TokenEvent


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation. `logprobs` has one item per token of `token_ids`; `finish_reason` is "" while it can grow."""

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
    """A beam and a possible next token. Tokens are copied only for chosen candidates, because most are dropped."""

    sum_logprobs: float
    beam: Beam
    token_id: int
    logprob: float
    alternatives: TokenLogprobs

    def grown(self, finish_reason: str = "") -> Beam:
        own = TokenLogprobs(self.logprob, self.alternatives.top)
        return self.beam.followed_by(self.token_id, own, finish_reason)


class BeamSearch:
    """State of one search. `running` are the beams that need a next token, each with `num_candidates` alternatives."""

    def __init__(
        self, width: int, max_tokens: int, end_token_ids: Collection[int], *, length_penalty: float = 1.0
    ) -> None:
        self._width, self._max_tokens, self._length_penalty = width, max_tokens, length_penalty
        self._end_token_ids = frozenset(end_token_ids)
        self.running = [Beam()]
        self._finished: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """Alternatives to request per beam: enough for `width` beams to continue even if each could also end."""
        return self._width + max(self._width, len(self._end_token_ids))

    def advance(self, found: Sequence[TokenLogprobs], banned: Sequence[Collection[int]]) -> None:
        """Extend all running beams. `found` has the alternatives of each beam, in the order of `running`.

        Ignores a beam's `banned` tokens and uses at most `num_candidates` of the others.
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
        """Return the finished continuations, best first: `width` of them once no beam is running."""
        return list(self._finished)

    def _score(self, beam: Beam) -> float:
        """The end token counts towards the sum but not towards the length."""
        length = len(beam.token_ids) - (beam.finish_reason == "stop")
        return float(beam.sum_logprobs / max(1, length) ** self._length_penalty)

    def _bound(self) -> float:
        """Upper bound on the score of running beams: sums of log-probabilities never grow."""
        if not self.running:
            return -float("inf")
        length = self._max_tokens if self._length_penalty > 0 else len(self.running[0].token_ids)
        return float(self.running[0].sum_logprobs / max(1, length) ** self._length_penalty)


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """Search parameters. The first `n` of `width` beams become the choices of a prompt."""

    width: int
    n: int
    length_penalty: float
    end_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Search:
    """The search for one prompt. The prompt's first choice runs it; its other choices wait for `done`."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    found: list[TokenEvent] = field(default_factory=list)
    error: BaseException | None = None


class BeamClient:
    """Client that answers by beam search. Expects `settings.n` consecutive requests for each prompt.

    `spend` is called with the number of tokens that workers generate, whether they become part of a choice or not.
    """

    def __init__(self, client: GenerationClient, settings: BeamSettings, spend: Callable[[int], None]) -> None:
        self._client, self._settings, self._spend = client, settings, spend
        self._num_requests = 0
        self._searches: dict[int, _Search] = {}

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield the next choice as one event. Raises the same errors as the underlying client."""
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
            raise search.error if isinstance(search.error, RequestError) else InternalError("Beam search failed.")
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
            if any(event.weight_version != first.weight_version for event in events):
                raise Unavailable("The weights were updated during the beam search.", retry_after_s=RETRY_AFTER_S)
            lines = _joined(lines, events)
            if not search.running:
                break
        found = search.best()
        if len(found) < settings.n:
            raise InvalidRequest(
                f"n: {settings.n} choices requested, but only {len(found)} distinct answers exist", param="n"
            )
        return [_event(beam, params.logprobs, first, lines) for beam in found[: settings.n]]

    def _banned(self, params: SamplingParams, beam: Beam) -> frozenset[int]:
        """Return the tokens that must not come next, by the same rules that workers apply at that position."""
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
        """Generate the next token of every running beam, with alternatives."""
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
                    await asyncio.sleep(0)  # submitting a long prompt takes about 1 ms
        except ExceptionGroup as errors:  # one failed, which aborted the others
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _token(self, request: GenerationRequest) -> TokenEvent:
        """Return the event with one beam's next token. Only its alternatives are used."""
        found: TokenEvent | None = None
        async with aclosing(self._client.generate(request)) as events:
            async for event in events:
                if event.token_ids:
                    self._spend(len(event.token_ids))
                found = event if event.token_ids else msgspec.structs.replace(found or event, timeline=event.timeline)
        if found is not None and found.finish_reason == "abort":
            raise Unavailable("The beam search was aborted by an operator.", retry_after_s=RETRY_AFTER_S)
        if found is None or not found.logprobs:
            raise InternalError("A beam search step returned no token.")
        return found


def _too_long(request: GenerationRequest) -> str:
    return f"Beam search exceeded the request timeout of {request.deadline_s:g} s."


def _params(params: SamplingParams, num_candidates: int, step: int) -> SamplingParams:
    """Return the sampling parameters of a step, whose alternatives are used and whose sampled token is ignored.

    Requests enough alternatives for the search and for the answer. Only step 0 requests prompt log-probabilities.
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
    """Return the timeline of the latest step, with the moves and preemptions of all steps added; at most one item."""
    lines = [*before, *(event.timeline for event in events if event.timeline is not None)]
    if not lines:
        return []
    num_moves = sum(line.num_attempts - 1 for line in lines)
    num_preemptions = sum(line.num_preemptions for line in lines)
    return [msgspec.structs.replace(lines[-1], num_attempts=1 + num_moves, num_preemptions=num_preemptions)]


def _event(beam: Beam, num_alternatives: int, first: TokenEvent, lines: Sequence[RequestTimeline]) -> TokenEvent:
    """Return a complete choice as one event; `num_alternatives` -1 omits log-probabilities. `first` is step 0's."""
    logprobs = tuple(TokenLogprobs(token.logprob, token.top[:num_alternatives]) for token in beam.logprobs)
    return TokenEvent(
        beam.token_ids,
        logprobs if num_alternatives >= 0 else (),
        beam.finish_reason,
        first.num_cached_tokens,
        lines[-1] if lines else None,
        first.prompt_logprobs,
        weight_version=first.weight_version,
    )
