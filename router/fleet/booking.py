"""Work that the router has sent to a worker and that has not ended: one booking each, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

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
class BookedWork:
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


@dataclass(slots=True)
class Bookings:
    """What this router has booked on one worker.

    `total` are the sums of all bookings, `fresh` of those that the worker's last report does not count yet; `ended` is
    what that report counts and has ended since. `sizes`: those of booked prompts that are not computed.

    `fresh_since`: from when on the worker can have computed what is left of the prompts in `fresh`, unless others came
    before them. `turned_at`: when a prompt was computed, or came to an idle worker: a step began. `num_dispatched`:
    all bookings since the worker was found.
    """

    by_serial: dict[int, Booking] = field(default_factory=dict)
    total: BookedWork = field(default_factory=BookedWork)
    fresh: BookedWork = field(default_factory=BookedWork)
    ended: BookedWork = field(default_factory=BookedWork)
    sizes: PromptSizes = field(default_factory=PromptSizes)
    fresh_since: float = 0.0
    turned_at: float = 0.0
    num_dispatched: int = 0
    reported_serial: int = -1
    """The last booking that the worker's last report counts; -1 without a report."""

    def __len__(self) -> int:
        """The number of bookings that have not ended."""
        return len(self.by_serial)

    def add(self, booking: Booking, now: float) -> None:
        """Work is sent to the worker."""
        self.by_serial[booking.serial] = booking
        if not self.total.num_tokens:
            self.turned_at = now
        self.total.add(booking)
        self.sizes.add(booking.prompt.num_tokens)
        if not self.fresh.num_tokens:
            self.fresh_since = now
        self.fresh.add(booking)
        self.num_dispatched += 1

    def computed(self, booking: Booking, now: float) -> Booking | None:
        """The prompt is computed: drop it from the booking, and return what is left; None if it has ended."""
        if (known := self.by_serial.get(booking.serial)) is None:
            return None
        after = self.by_serial[booking.serial] = replace(known, prompt=NOTHING)
        self.total.computed(known)
        self.sizes.remove(known.prompt.num_tokens)
        self.fresh_since = self.turned_at = now
        if self.is_fresh(known):
            self.fresh.computed(known)
        else:
            self.ended.prompt += known.prompt
        return after

    def resize(self, serial: int, num_grown: int, num_more: int) -> None:
        """Set how many blocks a booking has gained and will gain, if it has not ended."""
        if (before := self.by_serial.get(serial)) is None:
            return
        after = self.by_serial[serial] = replace(before, num_grown=num_grown, num_more=num_more)
        self.total.resize(before, after)
        if self.is_fresh(after):
            self.fresh.resize(before, after)

    def release(self, booking: Booking) -> bool:
        """The work has ended. False if it had ended before."""
        if (known := self.by_serial.pop(booking.serial, None)) is None:
            return False
        self.total.remove(known)
        self.sizes.remove(known.prompt.num_tokens)
        if self.is_fresh(known):
            self.fresh.remove(known)
        else:
            self.ended.add(known)
        return True

    def reported(self, serial: int, now: float) -> None:
        """The worker reports, and counts all bookings up to this one."""
        self.reported_serial, self.fresh_since = serial, now
        self.fresh.clear()
        self.ended.clear()
        for booking in reversed(self.by_serial.values()):
            if booking.serial <= serial:
                break
            self.fresh.add(booking)

    def clear(self) -> None:
        """The worker's life has ended, and with it all that was booked there."""
        self.by_serial.clear()
        self.total, self.fresh, self.ended = BookedWork(), BookedWork(), BookedWork()
        self.sizes, self.reported_serial = PromptSizes(), -1

    def is_fresh(self, booking: Booking) -> bool:
        """Whether the last report does not count the booking yet."""
        return booking.serial > self.reported_serial


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
