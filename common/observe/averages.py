"""Averages, windows and quantiles of recent observations in constant memory. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from threading import Lock
from typing import Generic, TypeVar

Slot = TypeVar("Slot")
LOWEST, GROWTH, NUM_BUCKETS = 1e-5, 1.05, 425
"""Buckets grow by 5% from 10 us to about three hours, which limits the error of quantiles to 5%."""
NUM_SLOTS = 6
"""Number of slots of the window: the oldest sixth of the observations expires at once."""
NUM_RATE_SLOTS = 24
"""Number of slots of the window of a rate."""
_PER_LOG = 1.0 / math.log(GROWTH)
_BEGIN = math.log(LOWEST) * _PER_LOG


class Ewma:
    """Exponentially weighted moving average: each observation moves it by the fraction `smoothing` of the difference.

    Without `start`, the value is 0 until the first observation, which replaces it.
    """

    __slots__ = ("_next_share", "_smoothing", "value")

    def __init__(self, smoothing: float, start: float | None = None) -> None:
        self.value = 0.0 if start is None else start
        self._smoothing = smoothing
        self._next_share = 1.0 if start is None else smoothing

    def observe(self, observed: float) -> None:
        self.value += self._next_share * (observed - self.value)
        self._next_share = self._smoothing


class SlidingWindow(Generic[Slot]):
    """The last `window_s` seconds in `num_slots` slots of equal length, which expire one by one.

    `make` creates an empty slot. The owner writes to the current slot and reads the recent ones.
    """

    def __init__(self, window_s: float, num_slots: int, make: Callable[[], Slot]) -> None:
        self._slot_s, self._num_slots, self._make = window_s / num_slots, num_slots, make
        self._slots: deque[tuple[int, Slot]] = deque(maxlen=num_slots)
        self._ends_at = -math.inf  # the newest slot

    def current(self, now: float) -> Slot:
        """Return the slot for observations at `now`."""
        if now >= self._ends_at:
            number = int(now / self._slot_s)
            if not self._slots or self._slots[-1][0] < number:
                self._slots.append((number, self._make()))
            self._ends_at = (number + 1) * self._slot_s
        return self._slots[-1][1]

    def recent(self, now: float) -> list[Slot]:
        """Return the slots of the window that ends at `now`, oldest first, without empty ones."""
        oldest = int(now / self._slot_s) - self._num_slots + 1
        return [slot for number, slot in self._slots if number >= oldest]

    def series(self, now: float) -> list[Slot | None]:
        """Return one entry per slot of the window that ends at `now`, oldest first; None for empty slots."""
        newest = int(now / self._slot_s)
        by_number = dict(self._slots)
        return [by_number.get(number) for number in range(newest - self._num_slots + 1, newest + 1)]


class RecentQuantile:
    """Quantiles of the last `window_s` seconds. Thread-safe. `now` is monotonic."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window = SlidingWindow(window_s, NUM_SLOTS, lambda: [0] * NUM_BUCKETS)
        self._lock = Lock()

    def observe(self, value: float, now: float, num: int = 1) -> None:
        """Record a value in seconds, above 0, that occurred `num` times."""
        bucket = math.ceil(math.log(value) * _PER_LOG - _BEGIN) if value > LOWEST else 0
        if bucket >= NUM_BUCKETS:
            bucket = NUM_BUCKETS - 1
        with self._lock:
            self._window.current(now)[bucket] += num

    def quantile(self, share: float, now: float) -> float:
        """Return the quantile, at most 5% too large; 0.0 without observations."""
        return self.quantiles((share,), now)[1][0]

    def quantiles(self, shares: Sequence[float], now: float) -> tuple[int, list[float]]:
        """Return the number of observations and the quantile of each share, 0.0 without observations."""
        return quantiles_of(self.counts(now), shares)

    def counts(self, now: float) -> list[int]:
        """Return the number of observations by bucket; empty without any."""
        with self._lock:
            return [sum(bucket) for bucket in zip(*self._window.recent(now), strict=True)]


class RecentRate:
    """Average rate of a quantity over the last `window_s` seconds. Thread-safe.

    With `from_start`, the average is over the time since the first call until the window has passed. Otherwise earlier
    time counts as time without any of the quantity.
    """

    def __init__(self, window_s: float, *, from_start: bool = False) -> None:
        self._window = SlidingWindow(window_s, NUM_RATE_SLOTS, lambda: [0.0])
        self._window_s, self._from_start, self._lock = window_s, from_start, Lock()
        self._since: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Record an amount."""
        with self._lock:
            self._since = now if self._since is None else self._since
            self._window.current(now)[0] += amount

    def per_s(self, now: float) -> float:
        """Return the rate per second."""
        with self._lock:
            self._since = now if self._since is None else self._since
            seen_s = self._window_s
            if self._from_start:
                seen_s = min(seen_s, max(now - self._since, self._window_s / NUM_RATE_SLOTS))
            return sum(slot[0] for slot in self._window.recent(now)) / seen_s


def quantiles_of(counts: Sequence[int], shares: Sequence[float]) -> tuple[int, list[float]]:
    """Return the number of observations and the quantile of each share, from counts by bucket."""
    seen = list(accumulate(counts))
    if not seen or not seen[-1]:
        return 0, [0.0] * len(shares)
    buckets = (bisect_left(seen, max(1, math.ceil(share * seen[-1]))) for share in shares)
    return seen[-1], [float(LOWEST * GROWTH**bucket) for bucket in buckets]
