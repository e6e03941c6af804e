"""Virtual time: events in order, and the present. The same events give the same order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


class Timer:
    """Something that happens later, unless it is cancelled."""

    __slots__ = ("then",)

    def __init__(self, then: Callable[[], None]) -> None:
        self.then: Callable[[], None] | None = then

    def cancel(self) -> None:
        self.then = None


@dataclass(slots=True)
class Clock:
    """`now` is in seconds. Events of one time happen in the order in which they were set."""

    now: float = 0.0
    num_events: int = 0
    _number: int = 0
    _events: list[tuple[float, int, Timer]] = field(default_factory=list)

    def at(self, when: float, then: Callable[[], None]) -> Timer:
        """Have something happen at `when`, or now if that is over."""
        timer = Timer(then)
        number = self._number = self._number + 1
        now = self.now
        heapq.heappush(self._events, (when if when > now else now, number, timer))
        return timer

    def after(self, delay_s: float, then: Callable[[], None]) -> Timer:
        return self.at(self.now + delay_s, then)

    def step(self) -> bool:
        """Go on to the next event, and have it happen. False when there is none."""
        events, pop = self._events, heapq.heappop
        while events:
            when, _, timer = pop(events)
            then = timer.then
            if then is None:
                continue
            self.now = when
            self.num_events += 1
            timer.then = None
            then()
            return True
        return False
