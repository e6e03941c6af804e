"""Whether a new request would miss a goal of its class, by what is predicted where the policy would place it. Pure.

Each class of requests has a limit of its own for the wait: one without a goal for first tokens may wait while others
are refused. Prompts of lower priority delay none, and those that the router holds before this one count.

A worker that has computed nothing yet counts as idle. Two things correct a prediction that is too short: how long
requests have waited already, and how much later than predicted first tokens came.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.config import DEFAULT, RequestClass, RouterConfig
from common.errors import MAX_RETRY_AFTER_S, RETRY_AFTER_S, Overloaded
from common.observe import Ewma
from common.wire import Role
from router.dispatch.client import ANYONE, Caller, GenerationRequest
from router.dispatch.load import DispatchCounters
from router.dispatch.request_state import Assignment, RequestState, Stage
from router.dispatch.waiting import Holding, WaitingRequests
from router.dispatch.waits import Decoding, lasting_s, observed_waits_s, wait_for, waits_at_most, waits_of
from router.fleet import Worker, WorkerRegistry
from router.policy import (
    FEW,
    NO_HITS,
    UNKNOWN_LENGTH,
    Choice,
    Patience,
    Policy,
    RequestShape,
    Shortlist,
    places_of,
    queued_s,
    token_s_at,
)

log = logging.getLogger(__name__)

LEAST_SHARE = 0.25
"""The share of a goal that others may always take: without it a request that needs most of the goal itself would be
refused whenever it comes."""
SPARE_SHARE = 0.5
"""Of the time by which an answer's tokens are predicted to be early in all, that it may wait for a place in a batch
behind its first token: lengths of answers and ends of others are known badly."""
MIN_EXPECTED_S = 0.05
"""A shorter prediction teaches nothing when it proves wrong: messages and wake-ups take that long themselves."""
SMOOTHING = 0.1
"""The share of one more request in the average time of prompts."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error for a request, and the pool that has too few workers for it."""

    error: Overloaded
    behind: Role


class Admission:
    """Admits new requests, or refuses and counts them."""

    def __init__(
        self,
        registry: WorkerRegistry,
        policy: Policy,
        config: RouterConfig,
        counters: DispatchCounters,
        holding: Holding | None = None,
        shortlist: Shortlist | None = None,
    ) -> None:
        self._registry, self._policy, self._config, self._counters = registry, policy, config, counters
        self._holding = holding or Holding(registry, WaitingRequests())
        self._shortlist = shortlist
        self._least_turn_s: float | None = None  # of decode workers, at the last tick
        self._prompt_s = Ewma(SMOOTHING, start=0.0)  # what a prompt takes, lately
        self._classes = config.classes
        self._patience = {name: _patience_of(one, config) for name, one in self._classes.items()}
        self._priorities = sorted({one.priority for one in self._classes.values()})
        self._placed_at: dict[int, float] = {}  # by priority: when a request was last placed

    def observe(self, decoding: Decoding, now: float) -> None:
        """Note how long requests have waited for their first token, or have been decoded; at each tick."""
        self._least_turn_s = None
        waiting = []
        for state in decoding.open:
            if (worker := state.waits_for) is not None and state.stage is Stage.PREFILL:
                waiting.append((state.request.priority, worker.address, now - state.times.progress_at))
        waits_from = {
            priority: observed_waits_s((address, waited_s) for level, address, waited_s in waiting if level >= priority)
            for priority in self._priorities[1:]
        }
        waits_s = observed_waits_s((address, waited_s) for _, address, waited_s in waiting)
        self._registry.on_observed(waits_s, lasting_s(decoding.begun, now), waits_from)

    def class_of(self, request: GenerationRequest) -> RequestClass:
        """The class of a request; one of an unknown name is of the class `default`."""
        return self._classes.get(request.request_class) or self._classes[DEFAULT]

    def check(
        self,
        choice: Choice | None,
        now: float,
        request_class: RequestClass | None = None,
        key: str = "",
        num_tokens: int = 0,
        num_expected: int = 0,
    ) -> None:
        """Raises Overloaded for a prompt that would miss a goal of its class where it would be placed.

        It has `num_tokens` tokens, its answer `num_expected`, and it was sent with the key of this name.
        """
        one = request_class or self._classes[DEFAULT]
        if (refusal := self._judged(choice, now, one, key, num_expected)) is not None:
            raise self._counted(refusal, one)
        if (refusal := self._slow(choice, one, num_tokens, num_expected)) is not None:
            self._count_failure(refusal, one)
            raise refusal.error
        self._patience[one.name].count(refused=False)

    def check_unread(self, is_longer: Callable[[int], bool], now: float, caller: Caller = ANYONE) -> None:
        """Raises Overloaded for a request that `check` would refuse whatever it turns out to be.

        `is_longer` says whether the prompt surely has more than so many tokens. Decode workers compute a short prompt
        themselves, so it may find room where a long one finds none.
        """
        classes = caller.classes or (self._classes[DEFAULT],)
        refusals = []
        for one in classes:
            if (refusal := self._judged_unread(is_longer, now, one, caller.key)) is None:
                return
            refusals.append(refusal)
        raise self._counted(refusals[0], classes[0])

    def place_for(self, num_tokens: int, now: float, one: RequestClass | None = None) -> Choice | None:
        """Where a new prompt of so many tokens and a class would be placed if nothing of it is cached anywhere."""
        one = one or self._classes[DEFAULT]
        shape = RequestShape(
            num_tokens,
            UNKNOWN_LENGTH,
            NO_HITS,
            num_expected=UNKNOWN_LENGTH,
            priority=one.priority,
            ttft_s=one.ttft_s,
            tpot_s=one.tpot_s,
        )
        ready = self._registry.ready if self._shortlist is None else self._shortlist.ready
        return self._policy.choose(ready("prefill"), ready("decode"), shape, now)

    def expect(self, state: RequestState, choice: Choice, now: float) -> None:
        """A request was placed: note when its first token should come, by the worker's own account."""
        priority = state.request.priority
        state.times.expected_s, self._placed_at[priority] = 0.0, now
        if (assignment := state.waits_for) is None or not choice.forecast.is_known:
            return
        state.times.expected_s = queued_s(self._registry.workers[assignment.address], now, priority)
        self._prompt_s.observe(choice.forecast.prompt_s)

    def learn(self, state: RequestState, assignment: Assignment, now: float) -> None:
        """The first tokens of `assignment` have come: compare with the prediction, unless others passed since."""
        expected_s, state.times.expected_s = state.times.expected_s, 0.0
        if expected_s <= 0.0 or assignment is not state.waits_for or state.stage is not Stage.PREFILL:
            return
        if any(
            at >= state.times.progress_at and level > state.request.priority for level, at in self._placed_at.items()
        ):
            return
        took_s, forecast = now - state.times.progress_at, state.forecast
        if expected_s >= MIN_EXPECTED_S:
            self._registry.on_first_token(assignment.address, (took_s - forecast.lag_s) / expected_s)
        if forecast.waits_for_none and not state.attempts.num_failures and not state.attempts.num_taken_back:
            self._registry.on_lone_prompt(assignment.role, took_s, forecast.prompt_s)

    def shed(self, states: Iterable[RequestState], now: float) -> list[tuple[RequestState, Overloaded]]:
        """Requests to refuse although they were admitted, with their errors; at each tick.

        There are some only when an overload of a class has just been found: those of the class that would wait for
        their first token for longer than a new request may. Older requests keep their places.
        """
        changed = [name for name, patience in self._patience.items() if patience.tick(now)]
        if not changed:
            return []
        waits = [*waits_of(states, self._registry.workers), *self._holding.waits(now)]
        return [one for name in changed for one in self._shed_of(name, waits, now)]

    @property
    def limit_s(self) -> float:
        """How long a new request of the class `default` may wait now, in seconds."""
        return self._limit_s(DEFAULT)

    @property
    def limits_s(self) -> dict[str, float]:
        """How long a new request of each class may wait now, in seconds."""
        return {name: self._limit_s(name) for name in self._patience}

    def _limit_s(self, name: str) -> float:
        patience = self._patience[name]
        # While it is not brief it does not depend on turns, of which there are many to look at.
        return patience.limit_s(self._turn_s()) if patience.is_brief else patience.longest_s

    def _shed_of(
        self, name: str, waits: Iterable[tuple[RequestState, float]], now: float
    ) -> list[tuple[RequestState, Overloaded]]:
        patience, limit_s = self._patience[name], self._limit_s(name)
        if not patience.is_brief:
            told = {"request_class": name, "new_requests_may_wait_s": patience.longest_s}
            log.info("the overload is over", extra=told)
            return []
        shed = [
            (state, _shed(now - state.times.progress_at, later_s, limit_s))
            for state, later_s in waits
            if later_s > limit_s and not state.request.continues and self.class_of(state.request).name == name
        ]
        self._counters.num_refused[name] += len(shed)
        log.warning(
            "more requests come than can be served: requests that would wait too long are refused from now on",
            extra={
                "request_class": name,
                "new_requests_may_wait_s": limit_s,
                "instead_of_s": patience.longest_s,
                "refused": len(shed),
            },
        )
        return shed

    def _turn_s(self) -> float:
        """Seconds between two requests that a worker begins, while more wait. Of many workers, as of the last tick."""
        if self._least_turn_s is None or len(self._registry.workers) <= FEW:
            turns_s = (
                worker.estimates.service_s.value / places_of(worker) for worker in self._registry.ready("decode")
            )
            self._least_turn_s = min(turns_s, default=0.0)
        return max(self._prompt_s.value, self._least_turn_s)

    def _counted(self, refusal: Refusal, one: RequestClass) -> Overloaded:
        self._patience[one.name].count(refused=True)
        self._count_failure(refusal, one)
        return refusal.error

    def _count_failure(self, refusal: Refusal, one: RequestClass) -> None:
        self._counters.num_failures[type(refusal.error).__name__] += 1
        self._counters.num_refused[one.name] += 1
        self._counters.num_refused_for[refusal.behind] += 1

    def _judged_unread(
        self, is_longer: Callable[[int], bool], now: float, one: RequestClass, key: str
    ) -> Refusal | None:
        ready = self._registry.ready if self._shortlist is None else self._shortlist.ready
        if self._is_surely_in_time((*ready("prefill"), *ready("decode")), now, one):
            return None
        threshold = self._config.local_prefill_threshold
        refusal = self._judged(self.place_for(threshold + 1, now, one), now, one, key)
        if refusal is None:
            return None
        short = self._judged(self.place_for(1, now, one), now, one, key)
        return refusal if short is not None or is_longer(threshold) else None

    def _is_surely_in_time(self, workers: Iterable[Worker], now: float, one: RequestClass) -> bool:
        """Whether `_judged` would take any prompt of a class, at whichever of these workers it were placed.

        As a rule all are far from an overload, and this costs a small part of a placement.
        """
        if self._holding.holds_any:
            return False
        limit_s = self._limit_s(one.name) * (LEAST_SHARE if one.ttft_s > 0 else 1.0)
        return all(waits_at_most(worker, limit_s, now, one.priority) for worker in workers)

    def _judged(
        self, choice: Choice | None, now: float, one: RequestClass, key: str, num_expected: int = UNKNOWN_LENGTH
    ) -> Refusal | None:
        """The refusal of a prompt whose first token would come too late, its own time included, or None."""
        first = None if choice is None else choice.prefill or choice.decode
        if choice is None or first is None:
            return None
        held_s, num_held = self._holding.ahead(one, key) if self._holding.concerns(choice) else (0.0, 0)
        meanwhile_s = 0.0
        if choice.prefill is not None:  # it samples the first token, so the decode worker's batch delays later ones
            meanwhile_s = choice.forecast.prompt_s + _spare_s(choice, one, num_expected)
        wait = wait_for(first, choice.decode, now, one.priority, held_s, num_held, meanwhile_s)
        limit_s, own_s = self._limit_s(one.name), 0.0
        if one.ttft_s > 0 and choice.forecast.is_known:
            own_s = min(choice.forecast.prompt_s, (1.0 - LEAST_SHARE) * limit_s)
        if wait.seconds <= limit_s - own_s:
            return None
        return Refusal(too_late(wait.seconds, limit_s - own_s, self._others_s(one, first.role)), wait.behind)

    def _others_s(self, one: RequestClass, role: Role) -> float:
        """Seconds that those take who were refused before, and will come back before a client that is refused now."""
        num_refused = self._patience[one.name].num_refused
        return num_refused * self._turn_s() / max(1, len(self._registry.ready(role))) if num_refused else 0.0

    def _slow(self, choice: Choice | None, one: RequestClass, num_tokens: int, num_expected: int) -> Refusal | None:
        """The refusal of an answer whose tokens would come too slowly beside those that run then, or None.

        A wait for a place in the batch behind the first token, which a prefill worker samples, makes them slower.
        """
        if choice is None or choice.decode is None or one.tpot_s <= 0:
            return None
        worker, after_s = choice.decode, choice.forecast.ttft_s
        token_s, alone_s = token_s_at(worker, after_s, num_tokens)
        token_s += choice.forecast.stall_s
        if choice.prefill is not None and num_expected:
            token_s += max(0.0, choice.forecast.place_s - after_s) / (SPARE_SHARE * num_expected)
        limit_s = max(one.tpot_s, alone_s / (1.0 - LEAST_SHARE))
        if token_s <= limit_s:
            return None
        why = f"its tokens would take about {token_s * 1e3:.3g} ms each, the most they may is {limit_s * 1e3:.3g} ms"
        later_s = worker.estimates.service_s.value / max(1, worker.load.num_requests)
        return Refusal(Overloaded(why, retry_after_s=_retry_after_s(later_s)), "decode")


def _spare_s(choice: Choice, one: RequestClass, num_expected: int) -> float:
    """How long an answer may wait for a place in a batch behind its first token, within the goal for later ones."""
    return SPARE_SHARE * num_expected * max(0.0, one.tpot_s - choice.forecast.token_s) if one.tpot_s > 0 else 0.0


def _patience_of(one: RequestClass, config: RouterConfig) -> Patience:
    """A class that names no goal for first tokens waits for its turn whatever happens to others."""
    longest_s = min(config.max_wait_s, config.queue_timeout_s)
    if one.ttft_s > 0:
        longest_s = min(longest_s, one.ttft_s)
    is_patient = one.ttft_s <= 0 and one.name != DEFAULT
    return Patience(longest_s, longest_s if is_patient else min(longest_s, config.overload_wait_s))


def too_late(predicted_s: float, limit_s: float, others_s: float = 0.0) -> Overloaded:
    """The error for a request that would wait longer than it may.

    Its client should come back after those that were refused before it, whose turns take `others_s`.
    """
    why = f"a new request would wait about {predicted_s:.1f} s, the most it may is {limit_s:.3g} s"
    return Overloaded(why, retry_after_s=_retry_after_s(predicted_s - limit_s + others_s))


def _shed(waited_s: float, later_s: float, limit_s: float) -> Overloaded:
    why = f"more requests come than can be served: after {waited_s:.1f} s this one would wait {later_s:.1f} s more"
    return Overloaded(f"{why}, the most is {limit_s:.3g} s now", retry_after_s=_retry_after_s(later_s - limit_s))


def _retry_after_s(later_s: float) -> float:
    return min(MAX_RETRY_AFTER_S, max(RETRY_AFTER_S, later_s))
