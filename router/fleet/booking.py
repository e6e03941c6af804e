"""Work that the router has sent to a worker and that has not ended: one booking each, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from common.latency import NOTHING, StepShape

SIZE_CLASSES = 4
"""Classes of sizes of prompts between one size and its double."""


class Booking(msgspec.Struct, frozen=True, gc=False):
    """Work that was sent to a worker and has not ended yet: `prompt` is to be computed there, by `priority`.

    The worker's heartbeats count it once they acknowledge its `serial`. It took `num_blocks` when it was sent, for the
    sequence's first `num_tokens` tokens, of which some were cached; `num_grown` more since then, and it will probably
    take another `num_more`.
    """

    serial: int
    address: str
    prompt: StepShape
    num_blocks: int
    priority: int = 0
    num_tokens: int = 0
    num_grown: int = 0
    num_more: int = 0

    @property
    def num_held(self) -> int:
        """Blocks that it takes now."""
        return self.num_blocks + self.num_grown


@dataclass(slots=True)
class Load:
    """Sums over bookings: requests, uncached prompt tokens, KV blocks now and `num_more` that will come. `prompt` is
    all of the prompts as one step.

    `by_priority` has the prompts and the number of requests of each priority.
    """

    num_requests: int = 0
    prompt: StepShape = NOTHING
    num_blocks: int = 0
    num_more: int = 0
    by_priority: dict[int, tuple[StepShape, int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.prompt.num_tokens

    def below(self, priority: int) -> tuple[StepShape, int]:
        """Prompts, and the number of requests, of lower priorities."""
        lower = [part for level, part in self.by_priority.items() if level < priority]
        if not lower:  # as always where there is one class: this is asked of each worker for each request
            return NOTHING, 0
        return StepShape.sum(prompt for prompt, _ in lower), sum(num for _, num in lower)

    def add(self, booking: Booking) -> None:
        self.num_requests += 1
        self.prompt += booking.prompt
        self.num_blocks += booking.num_held
        self.num_more += booking.num_more
        prompt, num = self.by_priority.get(booking.priority, (NOTHING, 0))
        self.by_priority[booking.priority] = (prompt + booking.prompt, num + 1)

    def clear(self) -> None:
        self.num_requests, self.prompt, self.num_blocks, self.num_more = 0, NOTHING, 0, 0
        self.by_priority.clear()

    def remove(self, booking: Booking) -> None:
        self.num_requests -= 1
        self.prompt -= booking.prompt
        self.num_blocks -= booking.num_held
        self.num_more -= booking.num_more
        prompt, num = self.by_priority.pop(booking.priority)
        if num > 1:
            self.by_priority[booking.priority] = (prompt - booking.prompt, num - 1)

    def resize(self, before: Booking, after: Booking) -> None:
        """The booking's blocks have become more, or their prediction another."""
        self.num_blocks += after.num_held - before.num_held
        self.num_more += after.num_more - before.num_more

    def computed(self, booking: Booking) -> None:
        """The booking's prompt is computed."""
        self.prompt -= booking.prompt
        prompt, num = self.by_priority[booking.priority]
        self.by_priority[booking.priority] = (prompt - booking.prompt, num)


class PromptSizes:
    """Prompts that are booked and not computed, in tokens by classes of sizes: each is a fifth larger than the last."""

    __slots__ = ("_num_tokens", "_total")

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}
        self._total = 0

    def add(self, num_tokens: int) -> None:
        self._change(num_tokens, num_tokens)

    def remove(self, num_tokens: int) -> None:
        self._change(num_tokens, -num_tokens)

    def shorter_share(self, num_tokens: int) -> float:
        """Of all their tokens, those of shorter prompts and of those of about the same size, which came before.

        1 without any.
        """
        if not self._total:
            return 1.0
        size = _size_class(num_tokens)
        return sum(num for other, num in self._num_tokens.items() if other <= size) / self._total

    def _change(self, num_tokens: int, by: int) -> None:
        if not by:
            return
        size = _size_class(num_tokens)
        left = self._num_tokens.get(size, 0) + by
        self._total += by
        if left:
            self._num_tokens[size] = left
        else:
            del self._num_tokens[size]


def _size_class(num_tokens: int) -> int:
    return int(SIZE_CLASSES * math.log2(num_tokens)) if num_tokens > 0 else 0


def peak_growth(bookings: Iterable[Booking]) -> int:
    """The most blocks beyond those of now that these sequences will take at once, if all grow as is predicted.

    Sequences grow alike, and each gives up its blocks at its end: when the i-th last one ends, the i longest have grown
    by what it has grown, and the others are gone (Gong et al., "Past-Future Scheduler", ASPLOS 2025).
    """
    sizes = sorted(((one.num_more, one.num_held) for one in bookings), reverse=True)
    left = -sum(held for _, held in sizes)
    peak = 0
    for number, (num_more, held) in enumerate(sizes, 1):
        left += held
        peak = max(peak, left + number * num_more)
    return peak
