"""Quantiles of recent observations, in constant memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from threading import Lock

from common.observe.sliding_window import SlidingWindow

LOWEST, GROWTH, NUM_BUCKETS = 1e-5, 1.05, 425
"""Buckets grow by 5 % from 10 us to about three hours, which bounds the error of a quantile."""
NUM_SLOTS = 6
"""Of the window: the oldest sixth of the observations expires at once."""
_PER_LOG = 1.0 / math.log(GROWTH)
_BEGIN = math.log(LOWEST) * _PER_LOG


class RecentQuantile:
    """Observations of the last `window_s` seconds. One thread may observe while another asks; `now` is monotonic."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window = SlidingWindow(window_s, NUM_SLOTS, lambda: [0] * NUM_BUCKETS)
        self._lock = Lock()

    def observe(self, value: float, now: float, num: int = 1) -> None:
        """A value in seconds, above 0, that was seen `num` times."""
        bucket = math.ceil(math.log(value) * _PER_LOG - _BEGIN) if value > LOWEST else 0
        if bucket >= NUM_BUCKETS:
            bucket = NUM_BUCKETS - 1
        with self._lock:
            self._window.current(now)[bucket] += num

    def quantile(self, share: float, now: float) -> float:
        """The value that `share` of the observations do not exceed, at most 5 % too large; 0.0 without any."""
        return self.quantiles((share,), now)[1][0]

    def quantiles(self, shares: Sequence[float], now: float) -> tuple[int, list[float]]:
        """The number of observations, and the quantile of each share, 0.0 without any."""
        return quantiles_of(self.counts(now), shares)

    def counts(self, now: float) -> list[int]:
        """The observations by bucket; empty without any."""
        with self._lock:
            return [sum(bucket) for bucket in zip(*self._window.recent(now), strict=True)]


def quantiles_of(counts: Sequence[int], shares: Sequence[float]) -> tuple[int, list[float]]:
    """The number of observations by bucket, and the quantile of each share, 0.0 without any."""
    seen = list(accumulate(counts))
    if not seen or not seen[-1]:
        return 0, [0.0] * len(shares)
    buckets = (bisect_left(seen, max(1, math.ceil(share * seen[-1]))) for share in shares)
    return seen[-1], [float(LOWEST * GROWTH**bucket) for bucket in buckets]
