"""How long new requests wait at workers, how long others have waited there, and which answers are decoded where. Pure.

`Decoding` is kept up to date by events, so that no tick looks at all requests:

    add ─> open ── look: tokens of its decode worker come ─> decoded ── it moves ─> open
                                                            └────── it ends ─> gone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from statistics import median_high

from common.latency import StepShape
from common.wire import MAX_PRIORITY, Role
from router.dispatch.request_state import Assignment, RequestState, Stage
from router.fleet import Worker
from router.policy import place_s, step_tokens, terms_of, wait_s

NUM_LATE = 4
"""Requests that must have waited for some time before it counts: one alone may be a long prompt."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How many seconds a first token is predicted to wait for others, and the pool that has too few workers for it."""

    seconds: float
    behind: Role


def observed_waits_s(waits: Iterable[tuple[str, float]]) -> dict[str, float]:
    """By address, how long `NUM_LATE` requests have waited at least; without addresses where fewer wait."""
    return {address: waits_s[-NUM_LATE] for address, waits_s in _sorted_by_address(waits).items()}


def lasting_s(begun: Mapping[str, Mapping[str, float]], now: float) -> dict[str, float]:
    """By address, how long half of its requests have been decoded; without addresses that decode only a few.

    `begun`: when each of them began, by address and id. When load rises, the requests that have ended were quick: those
    that run show sooner that a full batch is slow.
    """
    return {address: now - median_high(times.values()) for address, times in begun.items() if len(times) >= NUM_LATE}


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
        placed.sort(key=lambda one: one[0].times.progress_at)
        for index, (state, assignment) in enumerate(placed):
            decode_s = place_s(worker, num_after=len(placed) - index) if worker.role == "decode" else 0.0
            prompts_s = worker.load.step_model.steps_s(before, step_tokens(worker)) * worker.estimates.slowness
            waits.append((state, max(prompts_s, decode_s)))
            before += assignment.booking.prompt
    return waits


def wait_for(
    first: Worker,
    decode: Worker | None,
    now: float,
    priority: int = -MAX_PRIORITY,
    held_s: float = 0.0,
    num_held: int = 0,
    meanwhile_s: float = 0.0,
) -> Wait:
    """How long a prompt waits at `first`, which computes it, and its answer for a place at `decode`.

    A worker that has computed nothing yet counts as idle, unless others wait there. The router holds `num_held`
    requests before it for each decode worker, whose prompts take `held_s` seconds of `first`. A place that becomes free
    while the prompt is computed, for `meanwhile_s` seconds, delays nothing.
    """
    prompts_s = _prompts_s(first, now, priority) + held_s
    batch_s = place_s(decode, priority=priority, num_more=num_held) if decode is not None else 0.0
    return Wait(max(prompts_s, batch_s - meanwhile_s), "prefill" if prompts_s >= batch_s - meanwhile_s else "decode")


def waits_at_most(worker: Worker, limit_s: float, now: float, priority: int) -> bool:
    """Whether a prompt waits no longer at a worker, by `wait_for`, nor its answer if that is a decode worker."""
    terms = terms_of(worker)
    all_s = max(worker.estimates.observed_s, (terms.waiting_s + terms.fresh_s) * worker.estimates.slowness)
    if all_s <= limit_s and terms.num_requests < terms.num_places and not worker.estimates.observed_from:  # as a rule
        return True
    if _prompts_s(worker, now, priority) > limit_s:
        return False
    return worker.role == "prefill" or place_s(worker, priority=priority) <= limit_s


def _prompts_s(worker: Worker, now: float, priority: int) -> float:
    if worker.load.step_model.is_known:
        return wait_s(worker, now, priority)
    return worker.estimates.observed_from.get(priority, worker.estimates.observed_s)


class Decoding:
    """The requests of a router in two parts: those that a worker decodes, and the `open` ones, which are few."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[str, tuple[int, RequestState]] = {}
        self._number_of: dict[str, int] = {}
        self._begun: dict[str, dict[str, float]] = {}  # by address of a decode worker, by id
        self._address_of: dict[str, str] = {}

    def add(self, state: RequestState) -> None:
        """A new request, until it is discarded."""
        request_id = state.request.request_id
        number = self._number_of[request_id] = next(self._numbers)
        self._open[request_id] = (number, state)
        state.on_move = self._reopen

    def discard(self, state: RequestState) -> None:
        """The request is over."""
        request_id = state.request.request_id
        self._number_of.pop(request_id, None)
        self._open.pop(request_id, None)
        self._forget(request_id)

    def look(self) -> None:
        """Count the open requests that are decoded by now as such; before the two questions below."""
        for _, state in list(self._open.values()):
            if (decode := state.decoded_on) is not None:
                request_id = state.request.request_id
                del self._open[request_id]
                self._begun.setdefault(decode.address, {})[request_id] = decode.delivered_at
                self._address_of[request_id] = decode.address

    @property
    def open(self) -> list[RequestState]:
        """Requests that were not being decoded at the last look or have moved since, in the order of their coming."""
        return [state for _, state in sorted(self._open.values(), key=_number)]

    @property
    def begun(self) -> Mapping[str, Mapping[str, float]]:
        """When the worker's first token came of each answer that it decodes, by its address and the request's id."""
        return self._begun

    # ------------------------------------------------------------ inside

    def _reopen(self, state: RequestState) -> None:
        """It changed workers."""
        request_id = state.request.request_id
        number = self._number_of.get(request_id)
        if number is not None and request_id not in self._open:
            self._forget(request_id)
            self._open[request_id] = (number, state)

    def _forget(self, request_id: str) -> None:
        address = self._address_of.pop(request_id, None)
        if address is not None:
            begun = self._begun[address]
            del begun[request_id]
            if not begun:
                del self._begun[address]


def _number(one: tuple[int, RequestState]) -> int:
    return one[0]
