"""Virtual token counters: the next client is the one with the fewest tokens for its share. Pure.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, and section 4.3 for shares. The
sharing is work-conserving: an idle client leaves its part to the others, and is not compensated later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class TokenCounters:
    """Number of tokens per name divided by its share. Names with queued requests are active."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._active: set[str] = set()
        self._last = 0.0  # counter of the last active name

    def join(self, name: str) -> None:
        """Activate a name. Its counter is raised to the minimum of the active ones."""
        self._tokens[name] = max(self._tokens.get(name, 0.0), self._least)
        self._active.add(name)

    def charge(self, name: str, num_tokens: int, share: float = 1.0) -> None:
        """Charge a name for tokens. Nothing else raises the counter of an active name."""
        counter = self._tokens.get(name, 0.0)
        self._tokens[name] = (counter if name in self._active else max(counter, self._least)) + num_tokens / share

    def leave(self, name: str) -> None:
        """Deactivate a name. Its counter is kept only if it is above the others."""
        self._active.remove(name)
        counter = self._last = self._tokens[name]
        if counter <= self._least:
            del self._tokens[name]

    def in_order(self, lines: dict[str, Iterator[T]]) -> Iterator[T]:
        """Merge the iterators in `lines`: the next item comes from the name with the smallest counter.

        Empties `lines`.
        """
        while lines:
            name = min(lines, key=lambda name: self._tokens.get(name, 0.0))
            if (one := next(lines[name], None)) is None:
                del lines[name]
            else:
                yield one

    @property
    def _least(self) -> float:
        return min((self._tokens[name] for name in self._active), default=self._last)
