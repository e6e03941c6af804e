"""Virtual token counters: of all that divide a service, the one that got the fewest tokens for its share is next. Pure.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, and section 4.3 for shares. Work
conserving: one that asks for nothing leaves its part to the others, and gets nothing for that time when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class TokenCounters:
    """Tokens that each name got, divided by its share. Those that wait for more are active."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._active: set[str] = set()
        self._last = 0.0  # of the last one that was active

    def join(self, name: str) -> None:
        """One that was absent asks again: its counter is at least the smallest of those that wait already."""
        self._tokens[name] = max(self._tokens.get(name, 0.0), self._least)
        self._active.add(name)

    def charge(self, name: str, num_tokens: int, share: float = 1.0) -> None:
        """One got so many tokens, in its turn or not; while it waits, nothing else raises its counter."""
        counter = self._tokens.get(name, 0.0)
        self._tokens[name] = (counter if name in self._active else max(counter, self._least)) + num_tokens / share

    def leave(self, name: str) -> None:
        """One asks for nothing more. Its counter is kept only if it got more than others."""
        self._active.remove(name)
        counter = self._last = self._tokens[name]
        if counter <= self._least:
            del self._tokens[name]

    def in_turn(self, lines: dict[str, Iterator[T]]) -> Iterator[T]:
        """All that the lines yield; the next is that of the smallest counter at that time. Empties `lines`."""
        while lines:
            name = min(lines, key=lambda name: self._tokens.get(name, 0.0))
            if (one := next(lines[name], None)) is None:
                del lines[name]
            else:
                yield one

    @property
    def _least(self) -> float:
        return min((self._tokens[name] for name in self._active), default=self._last)
