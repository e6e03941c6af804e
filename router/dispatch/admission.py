"""Whether a new request would wait too long, by what is predicted where the policy would place it. Pure.

A worker that has computed nothing yet counts as idle. Two things correct a prediction that is too short: how long
requests have waited already, and how much later than predicted first tokens came.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from statistics import median_low

from common.config import RouterConfig
from common.errors import Overloaded
from common.latency.step_model import StepShape
from common.observe.ewma import Ewma
from router.dispatch.forecast import NO_HITS, RequestShape, place_s, places_of, queued_s, step_tokens, wait_s
from router.dispatch.load import DispatchCounters
from router.dispatch.patience import Patience
from router.dispatch.policy import OUTPUT_RESERVE, Choice, RoutingPolicy
from router.dispatch.request_state import Assignment, RequestState, Stage
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker

log = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60.0
LEAST_SHARE = 0.25
"""Of the goal for a first token, that others may take: a prompt that needs most of it would be refused whenever it
comes, and never be served."""
NUM_LATE = 4
"""Requests that must have waited for some time before it counts: one alone may be a long prompt."""
MIN_EXPECTED_S = 0.05
"""A shorter prediction teaches nothing when it proves wrong: messages and wake-ups take that long themselves."""
SMOOTHING = 0.1
"""The share of one more request in the average time of prompts."""


class Admission:
    """Admits new requests, or refuses and counts them."""

    def __init__(
        self, registry: WorkerRegistry, policy: RoutingPolicy, config: RouterConfig, counters: DispatchCounters
    ) -> None:
        self._registry, self._policy, self._config, self._counters = registry, policy, config, counters
        self._prompt_s = Ewma(SMOOTHING, start=0.0)  # what a prompt takes, lately
        longest_s = min(config.max_wait_s, config.queue_timeout_s)
        if config.slo_ttft_ms > 0:
            longest_s = min(longest_s, config.slo_ttft_ms / 1000)
        self._patience = Patience(longest_s, min(longest_s, config.overload_wait_s))

    def observe(self, states: Iterable[RequestState], now: float) -> None:
        """Note how long requests have waited for their first token, or have been decoded; at each tick."""
        waiting, decoding = [], []
        for state in states:
            stage, worker = state.stage, state.waits_for
            if worker is not None and stage is Stage.PREFILL:
                waiting.append((worker.address, now - state.progress_at))
            elif worker is not None and stage is Stage.DECODE:
                decoding.append((worker.address, now - worker.delivered_at))
        self._registry.on_observed(observed_waits_s(waiting), lasting_s(decoding))

    def check(self, choice: Choice | None, now: float) -> None:
        """Raises Overloaded for a prompt that would wait too long where it would be placed."""
        if (error := self._judged(choice, now)) is not None:
            raise self._counted(error)
        self._patience.count(refused=False)

    def check_unread(self, is_longer: Callable[[int], bool], now: float) -> None:
        """Raises Overloaded for a request that `check` would refuse whatever its prompt turns out to be.

        `is_longer` says whether the prompt surely has more than so many tokens. Decode workers compute a short prompt
        themselves, so it may find room where a long one finds none.
        """
        threshold = self._config.local_prefill_threshold
        error = self._judged(self.place_for(threshold + 1, now), now)
        if error is None:
            return
        if self._judged(self.place_for(1, now), now) is not None or is_longer(threshold):
            raise self._counted(error)

    def place_for(self, num_tokens: int, now: float) -> Choice | None:
        """Where a new prompt of so many tokens would be placed if nothing of it is cached anywhere."""
        shape = RequestShape(num_tokens, OUTPUT_RESERVE, NO_HITS, num_expected=OUTPUT_RESERVE)
        return self._policy.choose(self._registry.ready("prefill"), self._registry.ready("decode"), shape, now)

    def expect(self, state: RequestState, choice: Choice, now: float) -> None:
        """A request was placed: note when its first token should come, by the worker's own account."""
        state.expected_s = 0.0
        if (assignment := state.waits_for) is None or not choice.forecast.is_known:
            return
        state.expected_s = queued_s(self._registry.workers[assignment.address], now)
        self._prompt_s.observe(choice.forecast.prompt_s)

    def learn(self, state: RequestState, assignment: Assignment, now: float) -> None:
        """The first tokens of `assignment` have come: compare with the prediction."""
        expected_s, state.expected_s = state.expected_s, 0.0
        if expected_s < MIN_EXPECTED_S or assignment is not state.waits_for or state.stage is not Stage.PREFILL:
            return
        self._registry.on_first_token(assignment.address, (now - state.progress_at) / expected_s)

    def shed(self, states: Iterable[RequestState], now: float) -> list[tuple[RequestState, Overloaded]]:
        """Requests to refuse although they were admitted, with their errors; at each tick.

        There are some only when an overload has just been found: those that would wait for their first token for
        longer than a new request may. Older requests keep their places.
        """
        if not self._patience.tick(now):
            return []
        limit_s, was_s = self.limit_s, self._patience.longest_s
        if not self._patience.is_brief:
            log.info("the overload is over", extra={"new_requests_may_wait_s": was_s})
            return []
        shed = [
            (state, _shed(now - state.progress_at, later_s, limit_s))
            for state, later_s in waits_of(states, self._registry.workers)
            if later_s > limit_s
        ]
        log.warning(
            "more requests come than can be served: requests that would wait too long are refused from now on",
            extra={"new_requests_may_wait_s": limit_s, "instead_of_s": was_s, "refused": len(shed)},
        )
        return shed

    @property
    def limit_s(self) -> float:
        """How long a new request may wait now, in seconds."""
        if not self._patience.is_brief:  # then it does not depend on turns, of which there are many to look at
            return self._patience.longest_s
        return self._patience.limit_s(self._turn_s())

    def _turn_s(self) -> float:
        """Seconds between two requests that a worker begins, while more wait."""
        turns_s = (worker.service_s.value / places_of(worker) for worker in self._registry.ready("decode"))
        return max(self._prompt_s.value, min(turns_s, default=0.0))

    def _counted(self, error: Overloaded) -> Overloaded:
        self._patience.count(refused=True)
        self._counters.num_failures[type(error).__name__] += 1
        return error

    def _judged(self, choice: Choice | None, now: float) -> Overloaded | None:
        """The error for a prompt that would be placed there, or None. Its own time counts against a goal."""
        first = None if choice is None else choice.prefill or choice.decode
        if choice is None or first is None:
            return None
        predicted_s = waiting_s(first, choice.decode, now)
        limit_s, own_s = self.limit_s, 0.0
        if self._config.slo_ttft_ms > 0 and choice.forecast.is_known:
            own_s = min(choice.forecast.prompt_s, (1.0 - LEAST_SHARE) * limit_s)
        if predicted_s <= limit_s - own_s:
            return None
        return refusal(predicted_s, limit_s - own_s, self._others_s(len(self._registry.ready(first.role))))

    def _others_s(self, num_workers: int) -> float:
        """What those take that were refused before, and come back before a client that is refused now."""
        return self._patience.num_refused * self._turn_s() / max(1, num_workers)


def observed_waits_s(waits: Iterable[tuple[str, float]]) -> dict[str, float]:
    """By address, how long `NUM_LATE` requests have waited at least; without addresses where fewer wait."""
    return {address: waits_s[-NUM_LATE] for address, waits_s in _sorted_by_address(waits).items()}


def lasting_s(decoding: Iterable[tuple[str, float]]) -> dict[str, float]:
    """By address, how long half of its requests have been decoded; without addresses that decode only a few.

    When load rises, the requests that have ended were quick: those that run show sooner that a full batch is slow.
    """
    return {address: median_low(ages_s) for address, ages_s in _sorted_by_address(decoding).items()}


def _sorted_by_address(times: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """For each address with at least `NUM_LATE` times, all of them in order."""
    by_address: dict[str, list[float]] = {}
    for address, seconds in times:
        by_address.setdefault(address, []).append(seconds)
    return {address: sorted(found) for address, found in by_address.items() if len(found) >= NUM_LATE}


def waits_of(states: Iterable[RequestState], workers: Mapping[str, Worker]) -> list[tuple[RequestState, float]]:
    """Requests that wait for a first token, in the order of their placing, with the seconds until their turn."""
    by_address: dict[str, list[tuple[RequestState, Assignment]]] = {}
    for state in states:
        assignment = state.waits_for
        if assignment is not None and state.stage is Stage.PREFILL and not state.stream.token_ids:
            by_address.setdefault(assignment.address, []).append((state, assignment))
    waits = []
    for address, placed in by_address.items():
        before, worker = StepShape(), workers[address]
        placed.sort(key=lambda one: one[0].progress_at)
        for index, (state, assignment) in enumerate(placed):
            decode_s = place_s(worker, num_after=len(placed) - index) if worker.role == "decode" else 0.0
            prompts_s = worker.step_model.steps_s(before, step_tokens(worker)) * worker.slowness.value
            waits.append((state, max(prompts_s, decode_s)))
            before += assignment.booking.prompt
    return waits


def waiting_s(first: Worker, decode: Worker | None, now: float) -> float:
    """Seconds that a prompt waits at `first`, which computes it, and its answer for a place at `decode`.

    A worker that has computed nothing yet counts as idle, unless others wait there.
    """
    prompts_s = wait_s(first, now) if first.step_model.is_known else first.observed_s
    return max(prompts_s, place_s(decode) if decode is not None else 0.0)


def refusal(predicted_s: float, limit_s: float, others_s: float = 0.0) -> Overloaded | None:
    """The error for a request that would wait longer than it may; None for one to admit.

    Its client should come back after those that were refused before it, whose turns take `others_s`.
    """
    if predicted_s <= limit_s:
        return None
    why = f"a new request would wait about {predicted_s:.1f} s, the most it may is {limit_s:.3g} s"
    return Overloaded(why, retry_after_s=_retry_after_s(predicted_s - limit_s + others_s))


def _shed(waited_s: float, later_s: float, limit_s: float) -> Overloaded:
    why = f"more requests come than can be served: after {waited_s:.1f} s this one would wait {later_s:.1f} s more"
    return Overloaded(f"{why}, the most is {limit_s:.3g} s now", retry_after_s=_retry_after_s(later_s - limit_s))


def _retry_after_s(later_s: float) -> float:
    return min(MAX_RETRY_AFTER_S, max(1.0, later_s))
