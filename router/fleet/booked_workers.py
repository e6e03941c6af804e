"""The work that this router has sent to workers and that has not ended, worker by worker. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from common.latency import NOTHING, StepShape
from router.fleet.booking import Booking
from router.fleet.worker import Worker


class BookedWorkers:
    """Workers by address, and the books of what is booked on each."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.next_serial = 1
        self.on_changed: Callable[[Worker], None] = lambda worker: None
        """Is told of a worker whose state, report or bookings changed, or that is gone and thus not ready."""

    def book(
        self,
        address: str,
        now: float,
        *,
        prompt: StepShape,
        num_blocks: int,
        priority: int = 0,
        num_tokens: int = 0,
        num_more: int = 0,
    ) -> Booking:
        """Count work that is sent under `next_serial`: `prompt` to compute, `num_blocks` of KV to hold.

        They hold `num_tokens` tokens, cached ones included, and the answer will probably need `num_more` blocks.
        """
        worker = self.workers[address]
        booking = Booking(self.next_serial, address, prompt, num_blocks, priority, num_tokens, 0, num_more)
        self.next_serial += 1
        worker.bookings[booking.serial] = booking
        if not worker.booked.num_tokens:
            worker.turned_at = now
        worker.booked.add(booking)
        worker.sizes.add(prompt.num_tokens)
        if not worker.fresh.num_tokens:
            worker.fresh_since = now
        worker.fresh.add(booking)
        worker.num_dispatched += 1
        self._changed(worker)
        return booking

    def computed(self, booking: Booking, now: float) -> Booking:
        """The prompt is computed: drop it from the booking, and return what is left of that."""
        worker = self.workers.get(booking.address)
        known = worker.bookings.get(booking.serial) if worker is not None else None
        after = replace(known or booking, prompt=NOTHING)
        if worker is not None and known is not None:
            worker.bookings[booking.serial] = after
            worker.booked.computed(known)
            worker.sizes.remove(known.prompt.num_tokens)
            worker.fresh_since = worker.turned_at = now
            if worker.is_fresh(known):
                worker.fresh.computed(known)
            else:
                worker.ended.prompt += known.prompt
            self._changed(worker)
        return after

    def resize(self, address: str, sizes: Mapping[int, tuple[int, int]]) -> None:
        """Set how many blocks bookings have gained, and will gain, by serial. Those that have ended are left out."""
        worker = self.workers[address]
        for serial, (num_grown, num_more) in sizes.items():
            if (before := worker.bookings.get(serial)) is None:
                continue
            after = worker.bookings[serial] = replace(before, num_grown=num_grown, num_more=num_more)
            worker.booked.resize(before, after)
            if worker.is_fresh(after):
                worker.fresh.resize(before, after)
        self._changed(worker)

    def release(self, booking: Booking) -> None:
        """The work has ended. Does nothing the second time, and once the worker's life has ended."""
        worker = self.workers.get(booking.address)
        known = worker.bookings.pop(booking.serial, None) if worker is not None else None
        if worker is None or known is None:
            return
        worker.booked.remove(known)
        worker.sizes.remove(known.prompt.num_tokens)
        if worker.is_fresh(known):
            worker.fresh.remove(known)
        else:
            worker.ended.add(known)
        self._changed(worker)

    def _changed(self, worker: Worker) -> None:
        worker.terms = None
        self.on_changed(worker)
