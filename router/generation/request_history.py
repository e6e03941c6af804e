"""Records of running and recently ended requests for `diptych explain`, without prompts and answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from router.dispatch import RequestTimeline, Step, Trail
from router.observe import RequestRecord
from router.policy import shortened
from router.request.errors import loggable

if TYPE_CHECKING:  # it records its requests here
    from router.generation.request_log import RequestLog

MAX_BYTES: Final = 32 * 1024 * 1024
"""Memory of ended requests."""
MAX_AGE_S: Final = 3600.0
"""Age at which ended requests are dropped."""
MAX_CHOICES: Final = 4
"""Choices of a request that are recorded; the others are counted."""
MAX_ERROR_CHARS: Final = 200
"""Maximum length of an error in records and the log. Errors may quote client input."""
REQUEST_BYTES, STEP_BYTES, CANDIDATE_BYTES = 2_000, 200, 800
"""Estimated memory of a request without steps, of a step, and of a candidate worker with its state at that time."""


class ChoiceHistory(msgspec.Struct, frozen=True):
    """One choice. Times are seconds of perf_counter, which equals the monotonic clock; 0 without tokens."""

    index: int
    num_tokens: int
    finish_reason: str
    first_at: float
    last_at: float
    timeline: RequestTimeline | None
    steps: tuple[Step, ...]
    num_omitted_steps: int = 0


class RequestHistoryEntry(msgspec.Struct, frozen=True):
    """One request. `ended` is the time of the look while it `is_running`. Goals are in seconds, 0 for none."""

    request_id: str
    id: str
    path: str
    key: str
    model: str
    request_class: str
    ttft_s: float
    tpot_s: float
    began: float
    ended: float
    is_running: bool
    status: int
    error: str
    reason: str
    client_left: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_choices: int
    choices: tuple[ChoiceHistory, ...]

    @property
    def num_bytes(self) -> int:
        """Estimated memory."""
        size = REQUEST_BYTES
        for choice in self.choices:
            size += STEP_BYTES * len(choice.steps)
            for placed in [step.choice for step in choice.steps if step.choice is not None]:
                for one in placed.considered:
                    size += CANDIDATE_BYTES * (len(one.prefill) + len(one.decode) + len(one.local))
        return size


class RequestHistory:
    """The running requests, and those that ended within `MAX_AGE_S`, as far as they fit `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_bytes, self._clock, self._num_bytes = max_bytes, clock, 0
        self._running: WeakValueDictionary[int, RequestLog] = WeakValueDictionary()
        self._ended: deque[tuple[RequestHistoryEntry, int]] = deque()

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def span_s(self) -> float:
        """Age of the oldest ended request, in seconds."""
        return self._clock() - self._ended[0][0].ended if self._ended else 0.0

    def began(self, log: RequestLog) -> None:
        """Add a running request."""
        self._running[id(log)] = log

    def ended(self, log: RequestLog, record: RequestRecord) -> None:
        """Replace a running request by its record."""
        self._running.pop(id(log), None)
        entry = _entry(log, record, is_running=False)
        num_bytes = entry.num_bytes
        self._ended.append((entry, num_bytes))
        self._num_bytes += num_bytes
        oldest = record.ended - MAX_AGE_S
        while self._ended and (self._num_bytes > self._max_bytes or self._ended[0][0].ended < oldest):
            self._num_bytes -= self._ended.popleft()[1]

    def find(self, name: str, key: str | None = None) -> Iterator[RequestHistoryEntry]:
        """Yield the requests with this id, the newest first; only those of a `key`, unless None.

        `name` is the response's `x-request-id` or `id`, or the id in a worker's log, which ends with a choice's number.
        """
        answer_id, _, choice = name.rpartition("-")
        names, oldest = {name, answer_id} if choice.isdecimal() else {name}, self._clock() - MAX_AGE_S
        names.discard("")
        for log in reversed(list(self._running.values())):
            if (log.client_request.request_id == name or log.id in names) and key in (
                None,
                log.client_request.key.name,
            ):
                yield _entry(log, log.record(), is_running=True)
        for entry, _ in reversed(self._ended):
            if (entry.request_id == name or entry.id in names) and key in (None, entry.key) and entry.ended >= oldest:
                yield entry


def _entry(log: RequestLog, record: RequestRecord, *, is_running: bool) -> RequestHistoryEntry:
    first = log.choices[0].request if log.choices else None
    error = record.error
    return RequestHistoryEntry(
        record.request_id,
        record.id,
        record.path,
        record.key,
        record.model,
        record.request_class,
        first.ttft_s if first is not None else 0.0,
        first.tpot_s if first is not None else 0.0,
        record.began,
        record.ended,
        is_running,
        record.status,
        "" if error is None else record.error_name,
        "" if error is None else loggable(error)[:MAX_ERROR_CHARS],
        record.client_left,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        len(record.choices),
        tuple(
            ChoiceHistory(
                one.index,
                one.num_tokens,
                one.finish_reason,
                one.first_at,
                one.last_at,
                one.timeline,
                *_steps(choice.request.trail),
            )
            for one, choice in zip(record.choices[:MAX_CHOICES], log.choices, strict=False)
        ),
    )


def _steps(trail: Trail | None) -> tuple[tuple[Step, ...], int]:
    if trail is None:
        return (), 0
    return tuple([one if one.choice is None else _shortened(one) for one in trail.steps]), trail.num_omitted


def _shortened(step: Step) -> Step:
    if step.choice is None or (choice := shortened(step.choice)) is step.choice:
        return step
    return replace(step, choice=choice)
