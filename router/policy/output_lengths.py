"""Predicts the length of answers from completed ones of the same class. Pure."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

UNKNOWN_LENGTH = 256
"""Assumed length in tokens before any answer has ended, and beyond the longest one so far."""
NUM_KEPT = 256
"""Number of recent answers that are considered per class."""


@dataclass(slots=True)
class _Lengths:
    """Recent lengths by age and sorted. `sums[i]` is the sum from the i-th shortest on; computed when empty."""

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
        """Return the mean remainder of answers longer than `num_tokens`. `UNKNOWN_LENGTH` counts as one more."""
        if not self.sums:
            self.sums = list(accumulate(reversed(self.ordered), initial=0))  # about once per completed answer
            self.sums.reverse()
        place = bisect_right(self.ordered, num_tokens)
        num_longer = len(self.ordered) - place
        return (self.sums[place] - num_longer * num_tokens + UNKNOWN_LENGTH) / (num_longer + 1)


class OutputLengths:
    """Predicts the remaining length of running answers from completed ones, by class.

    Until a class has a completed answer, the answers of all classes are used.
    """

    def __init__(self) -> None:
        self._of_class: dict[str, _Lengths] = {}
        self._of_all = _Lengths()

    def observe(self, request_class: str, num_tokens: int) -> None:
        """Record a completed answer."""
        self._of_all.add(num_tokens)
        self._of_class.setdefault(request_class, _Lengths()).add(num_tokens)

    def expected_more(self, request_class: str, num_tokens: int, most: int) -> int:
        """Return the predicted number of tokens after the first `num_tokens`: at most `most`, at least 0."""
        known = self._of_class.get(request_class, self._of_all)
        return min(most, round(known.more(num_tokens)))
