"""Keeps bookings on decode workers at the current and predicted size of their sequences. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import islice

from router.dispatch.request_state import RequestState
from router.fleet import Worker, WorkerRegistry
from router.policy import OutputLengths

MOST_A_TICK = 500
"""Maximum number of sequences checked per tick."""


def num_more_blocks(worker: Worker, num_tokens: int, num_expected: int) -> int:
    """Return how many more blocks a sequence of `num_tokens` tokens needs for `num_expected` more tokens.

    The sequence is limited to the worker's maximum length.
    """
    most = max(num_tokens, min(num_tokens + num_expected, worker.max_tokens))
    return worker.num_blocks_of(most) - worker.num_blocks_of(num_tokens)


class BookingResizer:
    """Resizes the bookings of answers that grew or whose expected length changed.

    Each tick checks `MOST_A_TICK` sequences in round-robin order: checking ten thousand would delay tokens by 20 ms.
    """

    def __init__(self, registry: WorkerRegistry, lengths: OutputLengths) -> None:
        self._registry, self._lengths = registry, lengths
        self._next = 0

    def tick(self, states: Collection[RequestState]) -> None:
        """Check the next sequences. Called at each tick."""
        if self._next >= len(states):
            self._next = 0
        first, self._next = self._next, self._next + MOST_A_TICK
        for address, sizes in self._changed(islice(states, first, self._next)).items():
            self._registry.resize(address, sizes)

    def _changed(self, states: Iterable[RequestState]) -> dict[str, dict[int, tuple[int, int]]]:
        """Return changed bookings: by worker and serial, the blocks gained and the blocks still expected."""
        workers = self._registry.workers
        changed: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for state in states:
            assignment = state.attempts.successor or state.attempts.decode
            if assignment is None or state.done:
                continue
            worker = workers.get(assignment.address)
            booking = worker.bookings.by_serial.get(assignment.booking.serial) if worker is not None else None
            if worker is None or booking is None:
                continue
            num_output = len(state.stream.token_ids)
            num_tokens = max(state.num_prompt_tokens + num_output, booking.num_tokens)
            num_expected = self._lengths.expected_more(state.request.request_class, num_output, state.num_remaining)
            num_grown = worker.num_blocks_of(num_tokens) - worker.num_blocks_of(booking.num_tokens)
            num_more = num_more_blocks(worker, num_tokens, num_expected)
            if num_grown != booking.num_grown or num_more != booking.num_more:
                changed[worker.address][booking.serial] = (num_grown, num_more)
        return changed
