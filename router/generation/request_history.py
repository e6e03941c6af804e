"""Records of running and recently ended requests for `diptych explain`, without prompts and answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final
from weakref import ref

import msgspec
from msgspec.structs import replace

from router.dispatch import RequestTimeline, Step, Trail
from router.observe import RequestRecord
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
MAX_REFUSED: Final = 1000
"""Refused requests that are kept."""
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
    """One request. While it runs, `ended` is the time of the query. Goals are in seconds, 0 for none."""

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


class EndedRequest(msgspec.Struct, frozen=True):
    """What is kept of a request at its end. Its description is made when it is asked for.

    `record` has no error, whose name and text are kept instead, and only the first `MAX_CHOICES` choices. `trails`
    are theirs.
    """

    record: RequestRecord
    num_choices: int
    num_output_tokens: int
    error: str
    reason: str
    ttft_s: float
    tpot_s: float
    trails: tuple[Trail | None, ...]

    @classmethod
    def of(cls, log: RequestLog, record: RequestRecord) -> EndedRequest:
        """Return what is kept of a request."""
        first, error, reason = log.choices[0].request if log.choices else None, "", ""
        if record.error is not None:
            error, reason = record.error_name, loggable(record.error)[:MAX_ERROR_CHARS]
        ttft_s, tpot_s = (first.ttft_s, first.tpot_s) if first is not None else (0.0, 0.0)
        num_choices, num_output_tokens = len(record.choices), record.num_output_tokens
        if error or num_choices > MAX_CHOICES:
            record = replace(record, error=None, choices=record.choices[:MAX_CHOICES])
        trails = tuple([one.request.trail for one in log.choices[:MAX_CHOICES]])
        return cls(record, num_choices, num_output_tokens, error, reason, ttft_s, tpot_s, trails)

    @property
    def num_bytes(self) -> int:
        """Estimated memory."""
        size = REQUEST_BYTES
        for trail in self.trails:
            for step in trail.steps if trail is not None else ():
                size += STEP_BYTES
                for one in step.choice.considered if step.choice is not None else ():
                    size += CANDIDATE_BYTES * (len(one.prefill) + len(one.decode) + len(one.local))
        return size

    def entry(self, *, is_running: bool) -> RequestHistoryEntry:
        """Describe the request."""
        record = self.record
        return RequestHistoryEntry(
            record.request_id,
            record.id,
            record.path,
            record.key,
            record.model,
            record.request_class,
            self.ttft_s,
            self.tpot_s,
            record.began,
            record.ended,
            is_running,
            record.status,
            self.error,
            self.reason,
            record.client_left,
            record.num_prompt_tokens,
            record.num_cached_tokens,
            self.num_output_tokens,
            self.num_choices,
            tuple(
                ChoiceHistory(
                    one.index,
                    one.num_tokens,
                    one.finish_reason,
                    one.first_at,
                    one.last_at,
                    one.timeline,
                    tuple(trail.steps) if trail is not None else (),
                    trail.num_omitted if trail is not None else 0,
                )
                for one, trail in zip(record.choices, self.trails, strict=False)
            ),
        )


class RequestHistory:
    """The running requests, and those that ended within `MAX_AGE_S`, as far as they fit `max_bytes`.

    Refused requests, of which an overload has many, do not take the place of the others.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_bytes, self._clock, self._num_bytes = max_bytes, clock, 0
        self._running: dict[int, ref[RequestLog]] = {}
        self._ended: deque[tuple[EndedRequest, int]] = deque()
        self._refused: deque[EndedRequest] = deque(maxlen=MAX_REFUSED)

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def span_s(self) -> float:
        """Age of the oldest ended request, in seconds."""
        return self._clock() - self._ended[0][0].record.ended if self._ended else 0.0

    def began(self, log: RequestLog) -> None:
        """Add a running request."""
        self._running[id(log)] = ref(log)

    def ended(self, log: RequestLog, record: RequestRecord) -> None:
        """Replace a running request by its record."""
        self._running.pop(id(log), None)
        if record.error is not None and not record.choices:
            self._refused.append(EndedRequest.of(log, record))
            return
        for choice in log.choices[:MAX_CHOICES]:
            if (trail := choice.request.trail) is not None:
                trail.shorten()
        ended = EndedRequest.of(log, record)
        num_bytes = ended.num_bytes
        self._ended.append((ended, num_bytes))
        self._num_bytes += num_bytes
        oldest = record.ended - MAX_AGE_S
        while self._ended and (self._num_bytes > self._max_bytes or self._ended[0][0].record.ended < oldest):
            self._num_bytes -= self._ended.popleft()[1]

    def find(self, name: str, key: str | None = None) -> Iterator[RequestHistoryEntry]:
        """Yield the requests with this id, the newest first; only those of a `key`, unless None.

        `name` is the response's `x-request-id` or `id`, or the id in a worker's log, which ends with a choice's number.
        """
        answer_id, _, choice = name.rpartition("-")
        names, oldest = {name, answer_id} if choice.isdecimal() else {name}, self._clock() - MAX_AGE_S
        names.discard("")
        for number, reference in reversed(list(self._running.items())):
            if (log := reference()) is None:  # abandoned without an end
                del self._running[number]
                continue
            client = log.client_request
            if (client.request_id == name or log.id in names) and key in (None, client.key.name):
                yield EndedRequest.of(log, log.record()).entry(is_running=True)
        for ended in chain((one for one, _ in reversed(self._ended)), reversed(self._refused)):
            record = ended.record
            is_wanted = record.request_id == name or record.id in names
            if is_wanted and key in (None, record.key) and record.ended >= oldest:
                yield ended.entry(is_running=False)
