"""Bookings: requests that the router has sent to a worker and that have not ended, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from common.latency import NOTHING, StepShape

SIZE_CLASSES = 4
"""Size classes of prompts per doubling of the size."""


class Booking(msgspec.Struct, frozen=True, gc=False):
    """A request sent to a worker that has not ended. `prompt` is the part to compute there, with `priority`.

    The worker's heartbeats include it once they acknowledge its `serial`. Initially it used `num_blocks` for the
    sequence's first `num_tokens` tokens, some of them cached. It has grown by `num_grown` blocks, and is predicted to
    grow by `num_more`.
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
        """Number of blocks in use."""
        return self.num_blocks + self.num_grown


@dataclass(slots=True)
class BookedWork:
    """Sums over bookings. `prompt` adds up all prompts as one step. `num_more` are predicted further blocks.

    `by_priority` contains the prompts and the number of requests of each priority.
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
        """Return the prompts, and the number of requests, of lower priorities."""
        lower = [part for level, part in self.by_priority.items() if level < priority]
        if not lower:  # fast path: called for each worker and request
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
        """Update after the blocks of a booking, or their prediction, changed."""
        self.num_blocks += after.num_held - before.num_held
        self.num_more += after.num_more - before.num_more

    def computed(self, booking: Booking) -> None:
        """Update after the prompt of a booking was computed."""
        self.prompt -= booking.prompt
        prompt, num = self.by_priority[booking.priority]
        self.by_priority[booking.priority] = (prompt - booking.prompt, num)


class PromptSizes:
    """Histogram of booked prompts that are not computed yet, in tokens by size class (factor 2^(1/4))."""

    __slots__ = ("_num_tokens", "_total")

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}
        self._total = 0

    def add(self, num_tokens: int) -> None:
        self._change(num_tokens, num_tokens)

    def remove(self, num_tokens: int) -> None:
        self._change(num_tokens, -num_tokens)

    def shorter_share(self, num_tokens: int) -> float:
        """Return the fraction of the tokens that are in prompts of about the same size or shorter; 1 if empty."""
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
    """This router's bookings on one worker.

    `total` sums all bookings, `fresh` those that the worker's last report does not include yet. `ended` sums what that
    report includes but has ended since. `sizes` covers booked prompts that are not computed.

    `fresh_since`: time since which the worker can have computed what is left of the prompts in `fresh`, unless others
    were first. `turned_at`: start of the current step, that is when a prompt was computed or reached an idle worker.
    `num_dispatched` counts bookings since the worker was discovered.
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
    """Serial of the last booking included in the worker's last report; -1 without a report."""

    def __len__(self) -> int:
        """Return the number of active bookings."""
        return len(self.by_serial)

    def add(self, booking: Booking, now: float) -> None:
        """Add a booking for work sent to the worker."""
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
        """Remove the computed prompt from the booking. Returns the new booking, or None if it has ended."""
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
        """Set the grown and predicted blocks of a booking, if it is active."""
        if (before := self.by_serial.get(serial)) is None:
            return
        after = self.by_serial[serial] = replace(before, num_grown=num_grown, num_more=num_more)
        self.total.resize(before, after)
        if self.is_fresh(after):
            self.fresh.resize(before, after)

    def release(self, booking: Booking) -> bool:
        """End a booking. Returns False if it had already ended."""
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
        """Process a report of the worker that includes all bookings up to `serial`."""
        self.reported_serial, self.fresh_since = serial, now
        self.fresh.clear()
        self.ended.clear()
        for booking in reversed(self.by_serial.values()):
            if booking.serial <= serial:
                break
            self.fresh.add(booking)

    def clear(self) -> None:
        """End all bookings, because the worker's incarnation has ended."""
        self.by_serial.clear()
        self.total, self.fresh, self.ended = BookedWork(), BookedWork(), BookedWork()
        self.sizes, self.reported_serial = PromptSizes(), -1

    def is_fresh(self, booking: Booking) -> bool:
        """Return whether the last report does not include the booking yet."""
        return booking.serial > self.reported_serial


def peak_growth(bookings: Iterable[Booking]) -> int:
    """Return the predicted peak of additional blocks that these sequences use at the same time.

    Sequences grow at the same rate, and each frees its blocks at its end. When the i-th last one ends, the i longest
    have grown by as much as it has, and the others have ended (Gong et al., "Past-Future Scheduler", ASPLOS 2025).
    """
    sizes = sorted(((one.num_more, one.num_held) for one in bookings), reverse=True)
    left = -sum(held for _, held in sizes)
    peak = 0
    for number, (num_more, held) in enumerate(sizes, 1):
        left += held
        peak = max(peak, left + number * num_more)
    return peak
