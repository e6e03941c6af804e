"""Admission control: rejects requests that would wait longer than they may. Pure.

The prediction is made for the worker that the policy would choose. Each class has its own wait limit, so a class
without a time-to-first-token goal may wait while others are rejected. Prompts of lower priority are not counted,
prompts that the router holds before this one are.

A class that refuses misses (`RequestClass.refuses_misses`) also rejects requests that are predicted to miss one of its
goals. By default goals reject nothing: a request that misses its goal is worth more than a refusal to most clients, and
a client that retries at once makes a refusal the worst outcome (docs/decisions/0075-goals-steer.md).

A worker without any completed step counts as idle. Two observations correct predictions that are too short: how long
requests have waited already, and how much later than predicted first tokens arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.config import DEFAULT, RequestClass, RouterConfig
from common.errors import MAX_RETRY_AFTER_S, RETRY_AFTER_S, Overloaded
from common.observe import Ewma
from common.wire import Role
from router.dispatch.client import ANYONE, Caller, GenerationRequest, Prediction
from router.dispatch.load import DispatchCounters
from router.dispatch.request_state import Assignment, RequestState, Stage
from router.dispatch.waiting import HeldPrompts, WaitingRequests
from router.dispatch.waits import Decoding, Wait, lasting_s, observed_waits_s, wait_for, waits_at_most, waits_of
from router.fleet import Worker, WorkerRegistry
from router.policy import (
    NO_HITS,
    SHORTLIST_ABOVE,
    UNKNOWN_LENGTH,
    Choice,
    Policy,
    RequestShape,
    Shortlist,
    WaitLimit,
    places_of,
    queued_s,
    token_s_at,
)

log = logging.getLogger(__name__)

LEAST_SHARE = 0.25
"""Fraction of a goal that the load of others may always use. Without it, a request that needs most of the goal for
itself would always be rejected."""
SPARE_SHARE = 0.5
"""Fraction of an answer's slack (its time per output token goal minus the predicted time, summed over the answer) that
it may wait for a batch slot after its first token. Output lengths are poorly known, hence not all of it."""
MIN_EXPECTED_S = 0.05
"""Shorter predictions are not evaluated: message and wake-up latency dominates their error."""
SMOOTHING = 0.1
"""Smoothing factor of the average prompt computation time."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Error for a rejected request, and the role of which there are too few workers."""

    error: Overloaded
    bottleneck: Role


@dataclass(frozen=True, slots=True)
class _FirstToken:
    """Predicted first token of a prompt at `worker`: its wait, and `own_s` for the prompt itself, 0 if unknown.

    The router holds `held_s` seconds of the prompts before it. `decode` continues the answer.
    """

    wait: Wait
    own_s: float
    held_s: float
    worker: Worker
    decode: Worker | None


class Admission:
    """Admits new requests, or rejects and counts them."""

    def __init__(
        self,
        registry: WorkerRegistry,
        policy: Policy,
        config: RouterConfig,
        counters: DispatchCounters,
        held_prompts: HeldPrompts | None = None,
        shortlist: Shortlist | None = None,
    ) -> None:
        self._registry, self._policy, self._config, self._counters = registry, policy, config, counters
        self._held = held_prompts or HeldPrompts(registry, WaitingRequests())
        self._shortlist = shortlist
        self._least_turn_s: float | None = None  # minimum over decode workers at the last tick
        self._prompt_s = Ewma(SMOOTHING, start=0.0)
        self._classes = config.classes
        self._wait_limits = {name: _wait_limit_of(one, config) for name, one in self._classes.items()}
        self._priorities = sorted({one.priority for one in self._classes.values()})
        self._placed_at: dict[int, float] = {}  # time of the last placement, by priority

    def observe(self, decoding: Decoding, now: float) -> None:
        """Record how long requests have waited for their first token or been decoded. Called at each tick."""
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
        """Return the class of a request, `default` if its name is unknown."""
        return self._classes.get(request.request_class) or self._classes[DEFAULT]

    def check(
        self,
        choice: Choice | None,
        now: float,
        request_class: RequestClass | None = None,
        key: str = "",
        num_tokens: int = 0,
        num_expected: int = 0,
    ) -> Prediction:
        """Return the predicted times by which the request is admitted. Their goals may be missed.

        Raise Overloaded if the request would wait too long, or miss a goal by which its class refuses.

        The prompt has `num_tokens` tokens, the answer is expected to have `num_expected`. `key` is the name of the API
        key.
        """
        one = request_class or self._classes[DEFAULT]
        first = self._first_token(choice, now, one, key, num_expected)
        if first is not None and (refusal := self._judged(first, one)) is not None:
            raise self._counted(refusal, one)
        token_s, alone_s = _token_s(choice, one, num_tokens, num_expected)
        if (refusal := _slow(choice, one, token_s, alone_s)) is not None:
            self._count_failure(refusal, one)
            raise refusal.error
        self._wait_limits[one.name].count(refused=False)
        if choice is None or not choice.forecast.is_known or one.ttft_s <= 0:
            return Prediction(0.0, token_s)
        return Prediction(choice.forecast.ttft_s, token_s)

    def check_unread(self, is_longer: Callable[[int], bool], now: float, caller: Caller = ANYONE) -> None:
        """Raise Overloaded if `check` would reject the request whatever its content turns out to be.

        `is_longer(n)` returns whether the prompt certainly has more than `n` tokens. Decode workers compute short
        prompts themselves, so a short prompt may be admitted where a long one is not.
        """
        classes = caller.classes or (self._classes[DEFAULT],)
        refusals = []
        for one in classes:
            if (refusal := self._judged_unread(is_longer, now, one, caller.key)) is None:
                return
            refusals.append(refusal)
        raise self._counted(refusals[0], classes[0])

    def place_for(self, num_tokens: int, now: float, one: RequestClass | None = None) -> Choice | None:
        """Return where a new prompt of `num_tokens` tokens would be placed if no worker had cached any of it."""
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
        """Record when the first token of a request that was just placed is predicted to arrive."""
        priority = state.request.priority
        state.times.expected_s, self._placed_at[priority] = 0.0, now
        if (assignment := state.waits_for) is None or not choice.forecast.is_known:
            return
        state.times.expected_s = queued_s(self._registry.workers[assignment.address], now, priority)
        self._prompt_s.observe(choice.forecast.prompt_s)

    def learn(self, state: RequestState, assignment: Assignment, now: float) -> None:
        """Compare the first token's arrival with its prediction, unless higher priorities were placed since."""
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
        """Return the admitted requests to reject, with their errors. Called at each tick.

        Not empty only when an overload of a class was just detected. Contains requests of that class that would wait
        longer than a new request may. Requests placed earlier are kept.
        """
        changed = [name for name, wait_limit in self._wait_limits.items() if wait_limit.tick(now)]
        if not changed:
            return []
        waits = [*waits_of(states, self._registry.workers), *self._held.waits(now)]
        return [one for name in changed for one in self._shed_of(name, waits, now)]

    @property
    def limit_s(self) -> float:
        """Maximum wait of a new request of class `default`, in seconds."""
        return self._limit_s(DEFAULT)

    @property
    def limits_s(self) -> dict[str, float]:
        """Maximum wait of a new request by class, in seconds."""
        return {name: self._limit_s(name) for name in self._wait_limits}

    def _limit_s(self, name: str) -> float:
        wait_limit = self._wait_limits[name]
        # The unreduced limit does not depend on the workers, of which there may be many.
        return wait_limit.limit_s(self._turn_s()) if wait_limit.is_reduced else wait_limit.longest_s

    def _shed_of(
        self, name: str, waits: Iterable[tuple[RequestState, float]], now: float
    ) -> list[tuple[RequestState, Overloaded]]:
        wait_limit, limit_s = self._wait_limits[name], self._limit_s(name)
        if not wait_limit.is_reduced:
            fields = {"request_class": name, "wait_limit_s": wait_limit.longest_s}
            log.info("request class %s is no longer overloaded", name, extra=fields)
            return []
        shed = [
            (state, _shed(now - state.times.progress_at, later_s, limit_s))
            for state, later_s in waits
            if later_s > limit_s and not state.request.continues and self.class_of(state.request).name == name
        ]
        self._counters.num_refused[name] += len(shed)
        log.warning(
            "request class %s is overloaded: rejecting requests that would wait longer than %.3g s",
            *(name, limit_s),
            extra={
                "request_class": name,
                "wait_limit_s": limit_s,
                "usual_wait_limit_s": wait_limit.longest_s,
                "num_rejected": len(shed),
            },
        )
        return shed

    def _turn_s(self) -> float:
        """Return the seconds between two requests that a worker starts while more are queued."""
        if self._least_turn_s is None or len(self._registry.workers) <= SHORTLIST_ABOVE:
            turns_s = (
                worker.estimates.service_s.value / places_of(worker) for worker in self._registry.ready("decode")
            )
            self._least_turn_s = min(turns_s, default=0.0)
        return max(self._prompt_s.value, self._least_turn_s)

    def _counted(self, refusal: Refusal, one: RequestClass) -> Overloaded:
        self._wait_limits[one.name].count(refused=True)
        self._count_failure(refusal, one)
        return refusal.error

    def _count_failure(self, refusal: Refusal, one: RequestClass) -> None:
        self._counters.num_failures[type(refusal.error).__name__] += 1
        self._counters.num_refused[one.name] += 1
        self._counters.num_refused_for[refusal.bottleneck] += 1

    def _judged_unread(
        self, is_longer: Callable[[int], bool], now: float, one: RequestClass, key: str
    ) -> Refusal | None:
        ready = self._registry.ready if self._shortlist is None else self._shortlist.ready
        if self._is_surely_in_time((*ready("prefill"), *ready("decode")), now, one):
            return None
        threshold = self._config.local_prefill_threshold
        refusal = self._judged_size(threshold + 1, now, one, key)
        if refusal is None:
            return None
        short = self._judged_size(1, now, one, key)
        return refusal if short is not None or is_longer(threshold) else None

    def _judged_size(self, num_tokens: int, now: float, one: RequestClass, key: str) -> Refusal | None:
        first = self._first_token(self.place_for(num_tokens, now, one), now, one, key)
        return None if first is None else self._judged(first, one)

    def _is_surely_in_time(self, workers: Iterable[Worker], now: float, one: RequestClass) -> bool:
        """Return whether `_judged` would admit any prompt of the class on any of these workers.

        This fast path covers normal load at a small part of the cost of a placement.
        """
        if self._held.holds_any:
            return False
        limit_s = self._limit_s(one.name) * (LEAST_SHARE if one.refuses_misses and one.ttft_s > 0 else 1.0)
        return all(waits_at_most(worker, limit_s, now, one.priority) for worker in workers)

    def _first_token(
        self, choice: Choice | None, now: float, one: RequestClass, key: str, num_expected: int = UNKNOWN_LENGTH
    ) -> _FirstToken | None:
        """Predict the first token of a prompt, or None if no worker can take it."""
        first = None if choice is None else choice.prefill or choice.decode
        if choice is None or first is None:
            return None
        passes = now if one.refuses_misses and one.ttft_s > 0 else None  # the limit of the queue counts late prompts
        held_s, num_held = self._held.ahead(one, key, passes) if self._held.concerns(choice) else (0.0, 0)
        meanwhile_s = 0.0
        if choice.prefill is not None:  # samples the first token, so a full decode batch delays only later tokens
            meanwhile_s = choice.forecast.prompt_s + _slack_s(choice, one, num_expected)
        wait = wait_for(first, choice.decode, now, one.priority, held_s, num_held, meanwhile_s)
        forecast = choice.forecast
        own_s = forecast.prompt_s + forecast.lag_s if forecast.is_known else 0.0
        return _FirstToken(wait, own_s, held_s, first, choice.decode)

    def _judged(self, first: _FirstToken, one: RequestClass) -> Refusal | None:
        """Return the rejection of a prompt whose first token would arrive too late, or None."""
        limit_s, wait, has_goal = self._limit_s(one.name), first.wait, one.refuses_misses and one.ttft_s > 0
        left_s = limit_s - min(first.own_s, (1.0 - LEAST_SHARE) * limit_s) if has_goal else limit_s
        if wait.seconds <= left_s:
            return None
        others_s = self._others_s(one, first.worker.role)
        if not has_goal or limit_s < one.ttft_s:
            return Refusal(too_late(wait.seconds, left_s, others_s), wait.bottleneck)
        cause = _batch(first.decode) if wait.bottleneck == "decode" else _prompts(first.worker, first.held_s)
        why = _miss("TTFT", one.ttft_s, wait.seconds + first.own_s, cause)
        return Refusal(_refused(why, wait.seconds - left_s + others_s), wait.bottleneck)

    def _others_s(self, one: RequestClass, role: Role) -> float:
        """Return the seconds that earlier rejected requests will take when they retry."""
        num_refused = self._wait_limits[one.name].num_refused
        return num_refused * self._turn_s() / max(1, len(self._registry.ready(role))) if num_refused else 0.0


def _token_s(choice: Choice | None, one: RequestClass, num_tokens: int, num_expected: int) -> tuple[float, float]:
    """Return the predicted time per token of an answer, and if it ran alone; 0 if unknown or without a goal.

    A wait for a batch slot after the first token counts as slower tokens. Draft tokens make tokens faster than steps.
    What makes them slower is not counted: prompts on the same cores, or in the same steps, leave as much as the goal
    needs (`step_budget.py`, `decode_worker/pace.py`).
    """
    if choice is None or choice.decode is None or one.tpot_s <= 0:
        return 0.0, 0.0
    worker, after_s = choice.decode, choice.forecast.ttft_s
    pace = min(1.0, worker.estimates.token_pace)
    token_s, alone_s = (pace * seconds for seconds in token_s_at(worker, after_s, num_tokens))
    if not token_s:
        return 0.0, 0.0
    token_s += choice.forecast.stall_s
    if choice.prefill is not None and num_expected:
        token_s += max(0.0, choice.forecast.place_s - after_s) / (SPARE_SHARE * num_expected)
    return token_s, alone_s


def _slow(choice: Choice | None, one: RequestClass, token_s: float, alone_s: float) -> Refusal | None:
    """Return the rejection of an answer whose tokens would arrive too slowly, or None. For the times see `_token_s`."""
    limit_s = max(one.tpot_s, alone_s / (1.0 - LEAST_SHARE))
    if choice is None or choice.decode is None or not one.refuses_misses or token_s <= limit_s:
        return None
    worker = choice.decode
    why = _miss("TPOT", one.tpot_s, token_s, _batch(worker))
    later_s = worker.estimates.service_s.value / max(1, worker.load.num_requests)
    return Refusal(_refused(why, later_s), "decode")


def _slack_s(choice: Choice, one: RequestClass, num_expected: int) -> float:
    """Return how long an answer may wait for a batch slot after its first token and still meet the token goal."""
    return SPARE_SHARE * num_expected * max(0.0, one.tpot_s - choice.forecast.token_s) if one.tpot_s > 0 else 0.0


def _wait_limit_of(one: RequestClass, config: RouterConfig) -> WaitLimit:
    """Return the wait limit of a class. Classes without a time-to-first-token goal keep theirs in an overload."""
    longest_s = min(config.max_wait_s, config.queue_timeout_s)
    if one.refuses_misses and one.ttft_s > 0:
        longest_s = min(longest_s, one.ttft_s)
    is_patient = one.ttft_s <= 0 and one.name != DEFAULT
    return WaitLimit(longest_s, longest_s if is_patient else min(longest_s, config.overload_wait_s))


def too_late(predicted_s: float, limit_s: float, others_s: float = 0.0) -> Overloaded:
    """Return the error for a request that would wait longer than it may.

    `others_s`: seconds that earlier rejected requests will take when they retry. It is added to `Retry-After`.
    """
    why = f"The request would wait about {predicted_s:.1f} s; the limit is {limit_s:.3g} s."
    return _refused(why, predicted_s - limit_s + others_s)


def _miss(goal: str, goal_s: float, predicted_s: float, cause: str) -> str:
    """Return why a request is refused by a goal."""
    return f"{goal} goal {_ms(goal_s)}, predicted {_ms(predicted_s)}: {cause}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _prompts(worker: Worker, held_s: float) -> str:
    """Describe the prompts before a new one: those of a worker, and `held_s` seconds that the router holds for it."""
    load = worker.load
    num = load.num_requests
    if worker.role == "decode":  # others are decoded
        num = worker.bookings.fresh.num_requests + (load.beat.num_waiting if load.beat is not None else 0)
    more = f", and {held_s:.2g} s of prompts in the router" if held_s else ""
    waits = "prompt waits" if num == 1 else "prompts wait"
    return f"{num:,} {waits} before it with {load.num_queued_tokens:,} tokens{more}"


def _batch(worker: Worker | None) -> str:
    """Describe the batch that a new answer would join."""
    if worker is None:
        return "no decode worker is ready"
    return f"{worker.load.num_requests:,} sequences in a batch of {places_of(worker):,}"


def _refused(why: str, later_s: float) -> Overloaded:
    return Overloaded(why, retry_after_s=_retry_after_s(later_s))


def _shed(waited_s: float, later_s: float, limit_s: float) -> Overloaded:
    why = f"The service is overloaded: after {waited_s:.1f} s this request would wait {later_s:.1f} s more"
    return Overloaded(f"{why}; the limit is {limit_s:.3g} s.", retry_after_s=_retry_after_s(later_s - limit_s))


def _retry_after_s(later_s: float) -> float:
    return min(MAX_RETRY_AFTER_S, max(RETRY_AFTER_S, later_s))
