"""Measures the load since it last changed, within seconds. Pure: `now` comes in.

`LoadWindow` averages minutes, because pools take that long to grow. Roles change in seconds, so here a window shrinks
as soon as its latest part differs from the rest by more than chance, and forgets the load before (Bifet and Gavalda,
"Learning from Time-Changing Data with Adaptive Windowing", SDM 2007, with a normal bound: arrivals are nearly Poisson).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from router.planner.offered_load import OfferedLoad, SampledRequest, averages, burstiness
from router.policy import OutputLengths

FINE_SLOT_S, NUM_FINE_SLOTS = 0.5, 60
"""Half a minute in slots of half a second: a burst is seen within one."""
KEPT_OF_SLOT = 8
"""Requests of a slot that the sample is made of: the latest ones."""
SIGNIFICANT_TURN = 4.0
"""Standard errors by which two parts of the window differ before the older is forgotten: many pairs are compared."""
LEAST_NEW_S, LEAST_OLD_S = 1.0, 2.0
"""Parts of the window are at least so long."""
FEWEST_NEW = 4
"""Arrivals that show a load that grew. The largest of them does not count: it may be one very long prompt."""
LEAST_SEEN_S = 1.0
"""Before the load has lasted so long, and has brought `FEWEST_NEW` requests, nothing is said of it."""
NUM_SPANS = 5
"""The latest loads whose length tells how long the next one lasts."""


@dataclass(slots=True)
class _Slot:
    """The arrivals of half a second: their number, sums of prompt tokens and answer tokens, sums of squares, maxima."""

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
    """Owned by the router's event loop."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._since: float | None = None
        self._latest: SampledRequest | None = None
        self._lengths: dict[int, OutputLengths] = {}
        self._spans_s: deque[float] = deque(maxlen=NUM_SPANS)
        self._changed_at: float | None = None

    # ------------------------------------------------------------ what happens

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """A request came. Its answer is taken to be as long as those to prompts of about the same length were."""
        known = self._lengths.get(num_prompt.bit_length())
        expected = (known or OutputLengths()).expected_more("", 0, most_output)
        self._add(SampledRequest(num_prompt, num_cached, expected), now)

    def turned_away(self, now: float) -> None:
        """A request came of which nothing is known: it counts like the one before it."""
        if self._latest is not None:
            self._add(self._latest, now)

    def ended(self, num_prompt: int, num_output: int) -> None:
        """A request was answered."""
        self._lengths.setdefault(num_prompt.bit_length(), OutputLengths()).observe("", num_output)

    # ------------------------------------------------------------ what it comes to

    @property
    def num_seen(self) -> int:
        """Requests that the latest estimate is made of."""
        return sum(slot.num for slot in self._slots)

    def offered(self, now: float) -> OfferedLoad | None:
        """The load since it last changed; None while too little has come to tell."""
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
        """How long the load will probably stay as it is: as long as loads did lately; infinity before the first change.

        One that has lasted for longer than usual will last as long again.
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
        """How long the window is."""
        return now - max(self._since or 0.0, now - FINE_SLOT_S * NUM_FINE_SLOTS)

    def _counts(self, now: float) -> list[int]:
        """Arrivals of whole slots, oldest first."""
        counts = {round(slot.start / FINE_SLOT_S): slot.num for slot in self._slots}
        first = math.ceil((now - self._seen_s(now)) / FINE_SLOT_S)
        return [counts.get(number, 0) for number in range(first, math.floor(now / FINE_SLOT_S))]

    def _forget(self, now: float) -> None:
        """Drop what came before the load changed, if it did."""
        if self._since is None or (begin := self._change(now)) is None:
            return
        while self._slots and self._slots[0].start < begin:
            self._slots.popleft()
        self._spans_s.append(begin - (self._since if self._changed_at is None else self._changed_at))
        self._since = self._changed_at = begin

    def _change(self, now: float) -> float | None:
        """When the load became another one, if the two parts differ by more than chance; the likeliest such time."""
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
    """By how many standard errors the rates of tokens, or of requests, of two neighbouring spans differ at most.

    The variance of what arrives in a time is the rate of squares times that time.
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
