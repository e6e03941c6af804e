"""Predicted and observed waits of requests at workers, and the set of requests being decoded. Pure.

`Decoding` is updated by events, so that no tick iterates over all requests:

    add ─> open ── look: tokens of its decode worker have arrived ─> decoded ── it moves ─> open
                                                                     └────── it ends ─> removed
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
from router.policy import forecast_inputs, place_s, step_tokens, wait_s

NUM_LATE = 4
"""Minimum number of requests that must have waited before the wait counts. A single one may be a long prompt."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Predicted wait of a first token for other requests, and the role that is the bottleneck."""

    seconds: float
    bottleneck: Role


def observed_waits_s(waits: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return by address the time that at least `NUM_LATE` requests have waited. Omits addresses with fewer."""
    return {address: waits_s[-NUM_LATE] for address, waits_s in _sorted_by_address(waits).items()}


def lasting_s(begun: Mapping[str, Mapping[str, float]], now: float) -> dict[str, float]:
    """Return by address the median decode time so far of its running requests. Omits addresses with only a few.

    `begun` is the start of each request by address and id. When load rises, requests that have ended were fast; running
    requests show sooner that a full batch is slow.
    """
    return {address: now - median_high(times.values()) for address, times in begun.items() if len(times) >= NUM_LATE}


def _sorted_by_address(times: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Return the sorted times of each address that has at least `NUM_LATE`."""
    by_address: dict[str, list[float]] = {}
    for address, seconds in times:
        by_address.setdefault(address, []).append(seconds)
    return {address: sorted(found) for address, found in by_address.items() if len(found) >= NUM_LATE}


def waits_of(states: Iterable[RequestState], workers: Mapping[str, Worker]) -> list[tuple[RequestState, float]]:
    """Return requests that wait for a first token, in placement order, with the seconds until they start."""
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
    """Predict the wait of a prompt at `first`, which computes it, and of its answer for a batch slot at `decode`.

    A worker without any completed step counts as idle, unless requests wait there. The router holds `num_held` earlier
    requests for each decode worker, whose prompts take `held_s` seconds of `first`. A batch slot that becomes free
    within `meanwhile_s`, while the prompt is computed, causes no delay.
    """
    prompts_s = _prompts_s(first, now, priority) + held_s
    batch_s = place_s(decode, priority=priority, num_more=num_held) if decode is not None else 0.0
    return Wait(max(prompts_s, batch_s - meanwhile_s), "prefill" if prompts_s >= batch_s - meanwhile_s else "decode")


def waits_at_most(worker: Worker, limit_s: float, now: float, priority: int) -> bool:
    """Return whether neither a prompt nor, on a decode worker, its answer waits longer than `limit_s` there."""
    inputs = forecast_inputs(worker)
    all_s = max(worker.estimates.observed_s, (inputs.waiting_s + inputs.fresh_s) * worker.estimates.slowness)
    if (
        all_s <= limit_s and inputs.num_requests < inputs.num_places and not worker.estimates.observed_from
    ):  # common case
        return True
    if _prompts_s(worker, now, priority) > limit_s:
        return False
    return worker.role == "prefill" or place_s(worker, priority=priority) <= limit_s


def _prompts_s(worker: Worker, now: float, priority: int) -> float:
    if worker.load.step_model.is_known:
        return wait_s(worker, now, priority)
    return worker.estimates.observed_from.get(priority, worker.estimates.observed_s)


class Decoding:
    """The requests of a router in two sets: those being decoded, and the few `open` ones."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[str, tuple[int, RequestState]] = {}
        self._number_of: dict[str, int] = {}
        self._begun: dict[str, dict[str, float]] = {}  # by address of the decode worker and request id
        self._address_of: dict[str, str] = {}

    def add(self, state: RequestState) -> None:
        """Track a new request until it is discarded."""
        request_id = state.request.request_id
        number = self._number_of[request_id] = next(self._numbers)
        self._open[request_id] = (number, state)
        state.on_move = self._reopen

    def discard(self, state: RequestState) -> None:
        """Stop tracking a request."""
        request_id = state.request.request_id
        self._number_of.pop(request_id, None)
        self._open.pop(request_id, None)
        self._forget(request_id)

    def look(self) -> None:
        """Move open requests that are now decoded to the other set. Call before reading `open` and `begun`."""
        for _, state in list(self._open.values()):
            if (decode := state.decoded_on) is not None:
                request_id = state.request.request_id
                del self._open[request_id]
                self._begun.setdefault(decode.address, {})[request_id] = decode.delivered_at
                self._address_of[request_id] = decode.address

    @property
    def open(self) -> list[RequestState]:
        """Requests that were not being decoded at the last `look`, or have moved since, in order of arrival."""
        return [state for _, state in sorted(self._open.values(), key=_number)]

    @property
    def begun(self) -> Mapping[str, Mapping[str, float]]:
        """Time of the worker's first token for each answer that it decodes, by address and request id."""
        return self._begun

    # ------------------------------------------------------------ inside

    def _reopen(self, state: RequestState) -> None:
        """Process a change of workers."""
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
