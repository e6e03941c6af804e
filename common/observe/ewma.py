"""An average that follows what it observes. Pure."""

from __future__ import annotations


class Ewma:
    """An exponentially weighted moving average: each observation moves it by the share `smoothing` of the difference.

    Without a `start` it is 0 until the first observation, which it takes whole.
    """

    __slots__ = ("_next_share", "_smoothing", "value")

    def __init__(self, smoothing: float, start: float | None = None) -> None:
        self.value = 0.0 if start is None else start
        self._smoothing = smoothing
        self._next_share = 1.0 if start is None else smoothing

    def observe(self, observed: float) -> None:
        self.value += self._next_share * (observed - self.value)
        self._next_share = self._smoothing
