"""Keeps bookings on decode workers as large as their sequences are, and as they will probably become. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from router.dispatch.request_state import RequestState
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker
from router.policy.output_lengths import OutputLengths


def num_more_blocks(worker: Worker, num_tokens: int, num_expected: int) -> int:
    """Blocks that a sequence of `num_tokens` takes beyond those of now when `num_expected` tokens more have come.

    It ends at the worker's longest sequence.
    """
    most = max(num_tokens, min(num_tokens + num_expected, worker.max_tokens))
    return worker.num_blocks_of(most) - worker.num_blocks_of(num_tokens)


def follow_growth(states: Iterable[RequestState], registry: WorkerRegistry, lengths: OutputLengths) -> None:
    """Resize the bookings of answers that grew, or whose end is expected elsewhere than before; at each tick."""
    sizes: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for state in states:
        assignment = state.successor or state.decode
        if assignment is None or state.done:
            continue
        worker = registry.workers.get(assignment.address)
        booking = worker.bookings.get(assignment.booking.serial) if worker is not None else None
        if worker is None or booking is None:
            continue
        num_tokens, num_output = state.num_tokens, len(state.stream.token_ids)
        num_expected = lengths.expected_more(state.request.request_class, num_output, state.num_remaining)
        num_grown = max(0, worker.num_blocks_of(num_tokens) - worker.num_blocks_of(booking.num_tokens))
        num_more = num_more_blocks(worker, max(num_tokens, booking.num_tokens), num_expected)
        if (num_grown, num_more) != (booking.num_grown, booking.num_more):
            sizes[worker.address][booking.serial] = (num_grown, num_more)
    for address, of_worker in sizes.items():
        registry.resize(address, of_worker)
