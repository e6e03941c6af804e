"""What happened in the last seconds, in constant memory. Pure: `now` comes in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Slot = TypeVar("Slot")


class SlidingWindow(Generic[Slot]):
    """The last `window_s` seconds in `num_slots` slots of equal length, which expire one by one.

    `make` makes an empty slot; the owner writes to the current one and sums over the recent ones.
    """

    def __init__(self, window_s: float, num_slots: int, make: Callable[[], Slot]) -> None:
        self._slot_s, self._num_slots, self._make = window_s / num_slots, num_slots, make
        self._slots: deque[tuple[int, Slot]] = deque(maxlen=num_slots)
        self._ends_at = -math.inf  # the newest slot

    def current(self, now: float) -> Slot:
        """The slot that observations of `now` belong to."""
        if now >= self._ends_at:
            number = int(now / self._slot_s)
            if not self._slots or self._slots[-1][0] < number:
                self._slots.append((number, self._make()))
            self._ends_at = (number + 1) * self._slot_s
        return self._slots[-1][1]

    def recent(self, now: float) -> list[Slot]:
        """The slots of the window that ends at `now`, oldest first; those in which nothing happened are missing."""
        oldest = int(now / self._slot_s) - self._num_slots + 1
        return [slot for number, slot in self._slots if number >= oldest]

    def series(self, now: float) -> list[Slot | None]:
        """One entry for each slot of the window that ends at `now`, oldest first; None where nothing happened."""
        newest = int(now / self._slot_s)
        by_number = dict(self._slots)
        return [by_number.get(number) for number in range(newest - self._num_slots + 1, newest + 1)]
