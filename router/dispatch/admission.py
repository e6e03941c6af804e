"""Whether a new request would wait too long, by the work of the workers and their rates. Pure.

A worker whose rate is unknown counts as idle. The request's own prefill is left out, because how much of it is cached
shows only once its place is chosen. Two things correct a prediction that is too short: how long requests have waited
already, and how much later than predicted first tokens came.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from types import MappingProxyType

from common.config import RouterConfig
from common.errors import Overloaded
from common.observe.ewma import Ewma
from router.dispatch.load import DispatchCounters
from router.dispatch.patience import Patience
from router.dispatch.request_state import Assignment, RequestState, Stage
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker

log = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60.0
SCARCE = 0.05
"""A decode worker with less than this share of its blocks to give is full, whatever its number of sequences."""
NUM_LATE = 4
"""Requests that must have waited for some time before it counts: one alone may be a long prompt."""
MIN_EXPECTED_S = 0.05
"""A shorter prediction teaches nothing when it proves wrong: messages and wake-ups take that long themselves."""
SMOOTHING = 0.1
"""The share of one more request in the average time of prompts."""
NOTHING: Mapping[str, float] = MappingProxyType({})


class Admission:
    """Admits new requests, or refuses and counts them."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig, counters: DispatchCounters) -> None:
        self._registry, self._config, self._counters = registry, config, counters
        self._observed: Mapping[str, float] = NOTHING
        self._lasting: Mapping[str, float] = NOTHING
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
        self._observed, self._lasting = observed_waits_s(waiting), lasting_s(decoding)

    def check(self, num_tokens: int) -> None:
        """Raises Overloaded for a prompt that would wait too long."""
        error = self._refusal(short=num_tokens <= self._config.local_prefill_threshold)
        if error is not None:
            raise self._counted(error)
        self._patience.count(refused=False)

    def check_unread(self, is_longer: Callable[[int], bool]) -> None:
        """Raises Overloaded for a request that `check` would refuse whatever its prompt turns out to be.

        `is_longer` says whether the prompt surely has more than so many tokens. Decode workers compute a short prompt
        themselves, so it may find room where a long one finds none.
        """
        error = self._refusal(short=False)
        if error is None:
            return
        if self._refusal(short=True) is not None or is_longer(self._config.local_prefill_threshold):
            raise self._counted(error)

    def expect(self, state: RequestState) -> None:
        """A request was placed: note when its first token should come."""
        assignment = state.waits_for
        if assignment is None:
            state.expected_s = 0.0
            return
        worker = self._registry.workers[assignment.address]
        state.expected_s = prefill_wait_s(worker)
        self._prompt_s.observe(prefill_s(worker, assignment.booking.num_tokens))

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
            (state, _shed(now - state.progress_at, wait_s, limit_s))
            for state, wait_s in waits_of(states, self._registry.workers)
            if wait_s > limit_s
        ]
        log.warning(
            "more requests come than can be served: requests that would wait too long are refused from now on",
            extra={"new_requests_may_wait_s": limit_s, "instead_of_s": was_s, "refused": len(shed)},
        )
        return shed

    @property
    def limit_s(self) -> float:
        """How long a new request may wait now, in seconds."""
        return self._patience.limit_s(self._turn_s(self._registry.ready("decode")))

    def _turn_s(self, decode: Iterable[Worker]) -> float:
        """Seconds between two requests that a worker begins, while more wait."""
        turns_s = (worker.service_s.value / _num_places(worker) for worker in decode)
        return max(self._prompt_s.value, min(turns_s, default=0.0))

    def _counted(self, error: Overloaded) -> Overloaded:
        self._patience.count(refused=True)
        self._counters.num_failures[type(error).__name__] += 1
        return error

    def _refusal(self, *, short: bool) -> Overloaded | None:
        """The error for a new prompt, or None. Decode workers compute a `short` one."""
        prefill = [] if short else self._registry.ready("prefill")
        decode = self._registry.ready("decode")
        wait_s = predicted_wait_s(prefill, decode, self._observed, self._lasting)
        turn_s = self._turn_s(decode)
        others_s = self._patience.num_refused * turn_s / max(1, len(prefill or decode))
        return refusal(wait_s, self._patience.limit_s(turn_s), others_s)


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
        num_tokens, worker = 0, workers[address]
        placed.sort(key=lambda one: one[0].progress_at)
        for index, (state, assignment) in enumerate(placed):
            place_s = decode_wait_s(worker, num_after=len(placed) - index) if worker.role == "decode" else 0.0
            prompts_s = prefill_s(worker, num_tokens) * worker.slowness.value
            waits.append((state, max(prompts_s, place_s)))
            num_tokens += assignment.booking.num_tokens
    return waits


def prefill_s(worker: Worker, num_tokens: int) -> float:
    """Seconds that the worker takes to compute so many prompt tokens; 0 while its rate is unknown."""
    rate = worker.beat.full_tokens_per_s if worker.beat else 0.0
    return num_tokens / rate if rate > 0 else 0.0


def prefill_wait_s(worker: Worker) -> float:
    """Seconds until the worker has computed its prompts."""
    return prefill_s(worker, worker.num_queued_tokens)


def decode_wait_s(worker: Worker, least_s: float = 0.0, num_after: int = 0) -> float:
    """Seconds until the worker's batch has a place for one more: Little's law over the requests that wait before it.

    A request takes at least `least_s` there. The last `num_after` of the worker's requests do not count.
    """
    num_places = _num_places(worker)
    num_before = worker.num_requests - num_after + 1 - num_places
    return max(0, num_before) * max(worker.service_s.value, least_s) / num_places


def _num_places(worker: Worker) -> int:
    """Places in a worker's batch; while blocks are scarce, the places that are taken."""
    beat, hello = worker.beat, worker.hello
    if beat is None or hello is None:
        return 1
    if beat.num_waiting and worker.num_available_blocks < SCARCE * hello.num_blocks:
        return max(1, beat.num_running + beat.num_transferring)
    return max(1, hello.max_num_seqs)


def predicted_wait_s(
    prefill: Sequence[Worker],
    decode: Sequence[Worker],
    observed: Mapping[str, float] = NOTHING,
    lasting: Mapping[str, float] = NOTHING,
) -> float:
    """Seconds that a new request would wait at the best of the ready workers, without its own work.

    By address, `observed` says how long others have waited there, `lasting` how long requests have been decoded.
    """

    def first_s(worker: Worker) -> float:
        predicted_s = prefill_wait_s(worker) * worker.slowness.value
        return max(predicted_s, observed.get(worker.address, 0.0))

    first = min(map(first_s, prefill or decode), default=0.0)
    place = min((decode_wait_s(worker, lasting.get(worker.address, 0.0)) for worker in decode), default=0.0)
    return max(first, place)


def refusal(wait_s: float, limit_s: float, others_s: float = 0.0) -> Overloaded | None:
    """The error for a request that would wait longer than it may; None for one to admit.

    Its client should come back after those that were refused before it, whose turns take `others_s`.
    """
    if wait_s <= limit_s:
        return None
    why = f"a new request would wait about {wait_s:.1f} s, the most it may is {limit_s:.3g} s"
    return Overloaded(why, retry_after_s=_retry_after_s(wait_s - limit_s + others_s))


def _shed(waited_s: float, wait_s: float, limit_s: float) -> Overloaded:
    why = f"more requests come than can be served: after {waited_s:.1f} s this one would wait {wait_s:.1f} s more"
    return Overloaded(f"{why}, the most is {limit_s:.3g} s now", retry_after_s=_retry_after_s(wait_s - limit_s))


def _retry_after_s(later_s: float) -> float:
    return min(MAX_RETRY_AFTER_S, max(1.0, later_s))
