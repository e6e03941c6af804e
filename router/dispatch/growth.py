"""Keeps bookings on decode workers as large as their sequences are, and as they will probably become. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import islice

from router.dispatch.request_state import RequestState
from router.fleet import Worker, WorkerRegistry
from router.policy import OutputLengths

MOST_A_TICK = 500
"""How many sequences a tick looks at: see `Growth`."""


def num_more_blocks(worker: Worker, num_tokens: int, num_expected: int) -> int:
    """How many more blocks a sequence of `num_tokens` tokens takes once `num_expected` more have come.

    It ends at the worker's longest sequence.
    """
    most = max(num_tokens, min(num_tokens + num_expected, worker.max_tokens))
    return worker.num_blocks_of(most) - worker.num_blocks_of(num_tokens)


class Growth:
    """Resizes the bookings of answers that grew, or whose end is expected elsewhere than before.

    Each tick looks at `MOST_A_TICK` of them, in turns: with ten thousand, a look at all holds tokens up for 20 ms.
    """

    def __init__(self, registry: WorkerRegistry, lengths: OutputLengths) -> None:
        self._registry, self._lengths = registry, lengths
        self._next = 0

    def tick(self, states: Collection[RequestState]) -> None:
        """Look at those whose turn it is."""
        if self._next >= len(states):
            self._next = 0
        first, self._next = self._next, self._next + MOST_A_TICK
        for address, sizes in self._changed(islice(states, first, self._next)).items():
            self._registry.resize(address, sizes)

    def _changed(self, states: Iterable[RequestState]) -> dict[str, dict[int, tuple[int, int]]]:
        """The bookings that have changed: by worker and serial, the blocks that each has gained and will still gain."""
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
