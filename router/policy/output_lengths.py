"""How long answers become, as far as finished ones of their class tell. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

UNKNOWN_LENGTH = 256
"""Tokens of an answer before any has ended, and behind the longest one so far."""
NUM_KEPT = 256
"""Answers of a class that count: the latest ones."""


@dataclass(slots=True)
class _Lengths:
    """The latest lengths, by age and in order. `sums[i]` is the sum from the i-th shortest on; empty: to be made."""

    latest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def add(self, length: int) -> None:
        self.latest.append(length)
        insort(self.ordered, length)
        if len(self.latest) > NUM_KEPT:
            self.ordered.remove(self.latest.popleft())
        self.sums.clear()

    def more(self, num_tokens: int) -> float:
        """The mean of what answers of more than `num_tokens` had beyond them; `UNKNOWN_LENGTH` counts as one more."""
        if not self.sums:
            self.sums = list(accumulate(reversed(self.ordered), initial=0))  # once for nearly every answer
            self.sums.reverse()
        place = bisect_right(self.ordered, num_tokens)
        num_longer = len(self.ordered) - place
        return (self.sums[place] - num_longer * num_tokens + UNKNOWN_LENGTH) / (num_longer + 1)


class OutputLengths:
    """Learns from finished answers, by the name of their class, and says how much is to come of those under way.

    Before a class has an answer of its own, those of all classes count.
    """

    def __init__(self) -> None:
        self._of_class: dict[str, _Lengths] = {}
        self._of_all = _Lengths()

    def observe(self, request_class: str, num_tokens: int) -> None:
        """An answer of the class ended with so many tokens."""
        self._of_all.add(num_tokens)
        self._of_class.setdefault(request_class, _Lengths()).add(num_tokens)

    def expected_more(self, request_class: str, num_tokens: int, most: int) -> int:
        """Tokens that an answer which has `num_tokens` will probably have beyond these: at most `most`, at least 0."""
        known = self._of_class.get(request_class, self._of_all)
        return min(most, round(known.more(num_tokens)))
