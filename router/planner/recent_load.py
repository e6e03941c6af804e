"""Measures the load since its last change, within seconds. Pure.

`LoadWindow` averages over minutes, because pools take that long to grow. Roles change in seconds, so this window is
shortened as soon as its latest part differs significantly from the rest (Bifet and Gavalda, "Learning from
Time-Changing Data with Adaptive Windowing", SDM 2007, with a normal bound: arrivals are nearly Poisson).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from router.planner.offered_load import OfferedLoad, SampledRequest, averages, burstiness
from router.policy import OutputLengths

FINE_SLOT_S, NUM_FINE_SLOTS = 0.5, 60
"""Half a minute in slots of half a second."""
KEPT_OF_SLOT = 8
"""Number of latest requests per slot that are sampled."""
SIGNIFICANT_TURN = 4.0
"""Standard errors by which two parts of the window must differ before the older is dropped. Many pairs are compared."""
LEAST_NEW_S, LEAST_OLD_S = 1.0, 2.0
"""Minimum lengths of the two parts of the window, in seconds."""
FEWEST_NEW = 4
"""Minimum arrivals that show an increased load. The largest is excluded: it may be a single very long prompt."""
LEAST_SEEN_S = 1.0
"""Minimum duration of a load, in seconds, before it is reported. It also needs `FEWEST_NEW` requests."""
NUM_SPANS = 5
"""Number of previous loads whose durations predict the duration of the current one."""


@dataclass(slots=True)
class _Slot:
    """Arrivals of half a second: number, sums of prompt and answer tokens, sums of squares, maxima."""

    start: float
    num: int = 0
    tokens: tuple[float, float] = (0.0, 0.0)
    squares: tuple[float, float] = (0.0, 0.0)
    largest: tuple[float, float] = (0.0, 0.0)
    kept: deque[SampledRequest] = field(default_factory=lambda: deque(maxlen=KEPT_OF_SLOT))

    def add(self, request: SampledRequest) -> None:
        parts = (float(request.num_uncached), float(request.num_output))
        self.num += 1
        self.tokens = (self.tokens[0] + parts[0], self.tokens[1] + parts[1])
        self.squares = (self.squares[0] + parts[0] ** 2, self.squares[1] + parts[1] ** 2)
        self.largest = (max(self.largest[0], parts[0]), max(self.largest[1], parts[1]))
        self.kept.append(request)


class RecentLoad:
    """Measures the load since its last change. Not thread-safe: use only from the event loop."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._since: float | None = None
        self._latest: SampledRequest | None = None
        self._lengths: dict[int, OutputLengths] = {}
        self._spans_s: deque[float] = deque(maxlen=NUM_SPANS)
        self._changed_at: float | None = None

    # ------------------------------------------------------------ observations

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """Record a new request. Its answer is assumed to be as long as those to prompts of similar length."""
        known = self._lengths.get(num_prompt.bit_length())
        expected = (known or OutputLengths()).expected_more("", 0, most_output)
        self._add(SampledRequest(num_prompt, num_cached, expected), now)

    def turned_away(self, now: float) -> None:
        """Record a request that was not read, and is assumed to equal the previous one."""
        if self._latest is not None:
            self._add(self._latest, now)

    def ended(self, num_prompt: int, num_output: int) -> None:
        """Record a completed request."""
        self._lengths.setdefault(num_prompt.bit_length(), OutputLengths()).observe("", num_output)

    # ------------------------------------------------------------ results

    @property
    def num_seen(self) -> int:
        """Number of requests in the latest estimate."""
        return sum(slot.num for slot in self._slots)

    def offered(self, now: float) -> OfferedLoad | None:
        """Return the load since its last change; None if there is too little data."""
        while self._slots and self._slots[0].start <= now - FINE_SLOT_S * NUM_FINE_SLOTS:
            self._slots.popleft()
        self._forget(now)
        num = self.num_seen
        if self._since is None or num < FEWEST_NEW or (seen_s := self._seen_s(now)) < LEAST_SEEN_S:
            return None
        rate = num / seen_s
        requests = averages([one for slot in self._slots for one in slot.kept])
        return OfferedLoad(rate, rate, burstiness(self._counts(now)), requests)

    def lasting_s(self, now: float) -> float:
        """Return how long the load will probably last: the usual duration; infinity before the first change.

        A load that has lasted longer than usual is assumed to last as long again.
        """
        if self._changed_at is None or not self._spans_s:
            return math.inf
        age_s, usual_s = now - self._changed_at, median(self._spans_s)
        return usual_s - age_s if age_s < usual_s else age_s

    # ------------------------------------------------------------ inside

    def _add(self, request: SampledRequest, now: float) -> None:
        start = math.floor(now / FINE_SLOT_S) * FINE_SLOT_S
        if not self._slots or self._slots[-1].start < start:
            self._slots.append(_Slot(start))
        self._slots[-1].add(request)
        self._latest = request
        self._since = now if self._since is None else self._since

    def _seen_s(self, now: float) -> float:
        """Return the length of the window in seconds."""
        return now - max(self._since or 0.0, now - FINE_SLOT_S * NUM_FINE_SLOTS)

    def _counts(self, now: float) -> list[int]:
        """Return the arrivals of complete slots, oldest first."""
        counts = {round(slot.start / FINE_SLOT_S): slot.num for slot in self._slots}
        first = math.ceil((now - self._seen_s(now)) / FINE_SLOT_S)
        return [counts.get(number, 0) for number in range(first, math.floor(now / FINE_SLOT_S))]

    def _forget(self, now: float) -> None:
        """Drop requests from before a change of the load, if there was one."""
        if self._since is None or (begin := self._change(now)) is None:
            return
        while self._slots and self._slots[0].start < begin:
            self._slots.popleft()
        self._spans_s.append(begin - (self._since if self._changed_at is None else self._changed_at))
        self._since = self._changed_at = begin

    def _change(self, now: float) -> float | None:
        """Return the most likely time of a significant change of the load, or None."""
        first = now - self._seen_s(now)
        sums = _Sums()
        whole = _Sums.of(self._slots)
        best, found = SIGNIFICANT_TURN, None
        edges = [slot.start for slot in self._slots]
        edges.append(edges[-1] + FINE_SLOT_S if edges else now)
        for number in range(len(self._slots), -1, -1):
            if number < len(self._slots):
                sums.add(self._slots[number])
            begin = edges[number]
            new_s, old_s = now - begin, begin - first
            if new_s < LEAST_NEW_S or old_s < LEAST_OLD_S:
                continue
            if (score := _difference(sums, new_s, whole, old_s)) > best:
                best, found = score, begin
        return found


@dataclass(slots=True)
class _Sums:
    num: int = 0
    tokens: tuple[float, float] = (0.0, 0.0)
    squares: tuple[float, float] = (0.0, 0.0)
    largest: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, slots: deque[_Slot]) -> _Sums:
        total = cls()
        for slot in slots:
            total.add(slot)
        return total

    def add(self, slot: _Slot) -> None:
        self.num += slot.num
        self.tokens = (self.tokens[0] + slot.tokens[0], self.tokens[1] + slot.tokens[1])
        self.squares = (self.squares[0] + slot.squares[0], self.squares[1] + slot.squares[1])
        self.largest = (max(self.largest[0], slot.largest[0]), max(self.largest[1], slot.largest[1]))


def _difference(new: _Sums, new_s: float, whole: _Sums, old_s: float) -> float:
    """Return the largest difference of the rates of tokens or requests in two neighbouring spans, in standard errors.

    The variance of what arrives in a time span is the rate of squares times the span.
    """
    series = (
        (new.tokens[0], whole.tokens[0], whole.squares[0], new.largest[0]),
        (new.tokens[1], whole.tokens[1], whole.squares[1], new.largest[1]),
        (float(new.num), float(whole.num), float(whole.num), 1.0),
    )
    largest = 0.0
    for of_new, of_whole, squares, most in series:
        by = of_new / new_s - (of_whole - of_new) / old_s
        if by > 0.0:
            by = max(0.0, by - most / new_s)
        if not squares or (by > 0.0 and new.num < FEWEST_NEW):
            continue
        error = math.sqrt(squares / (new_s + old_s) * (1.0 / new_s + 1.0 / old_s))
        largest = max(largest, abs(by) / error)
    return largest
