"""Virtual token counters: of all that divide a service, the one that got the fewest tokens for its share is next. Pure.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4.3 for shares. Work conserving: one that
asks for nothing leaves its part to the others, and gets nothing for that time when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class TokenCounters:
    """Tokens that each name got, divided by its share."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._floor = 0.0  # what the one that had the last turn had got before it

    def join(self, name: str) -> None:
        """One that was absent asks again: its counter is at least that of the last one served."""
        self._tokens[name] = self.of(name)

    def charge(self, name: str, num_tokens: int, share: float = 1.0) -> None:
        """One got so many tokens."""
        self._tokens[name] = self.of(name) + num_tokens / share

    def serve(self, name: str, num_tokens: int, share: float = 1.0) -> None:
        """One had its turn, and pays so many tokens for it."""
        self._floor = max(self._floor, self._tokens.get(name, 0.0))
        self.charge(name, num_tokens, share)

    def forget(self, name: str) -> None:
        """One asks for nothing more. Its counter is kept only if it got more than others."""
        if self._tokens.get(name, 0.0) <= self._floor:
            self._tokens.pop(name, None)

    def of(self, name: str) -> float:
        """The counter of one that joins now."""
        return max(self._tokens.get(name, 0.0), self._floor)

    def in_turn(self, lines: dict[str, Iterator[T]]) -> Iterator[T]:
        """All that the lines yield; the next is that of the smallest counter at that time. Empties `lines`."""
        while lines:
            name = min(lines, key=lambda name: self._tokens.get(name, 0.0))
            if (one := next(lines[name], None)) is None:
                del lines[name]
            else:
                yield one
