"""The routing policy of Diptych before it predicted times, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet import Worker
from router.policy import PlainPolicy, RequestShape

REQUEST_TOKENS, MOST_HITS, RESERVE, OVERFLOW = 64, 4 * 64, 256, 4
"""Prompt tokens that a request on a decode worker counts as; the most that its hits count; tokens of an answer that
should find room; how many requests one beyond the batch counts besides itself."""


class ByTokens(PlainPolicy):
    """What Diptych did before it predicted times: the fewest prompt tokens to compute, and requests as tokens."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        cost = _decode_tokens if workers[0].role == "decode" else _prefill_tokens
        return min(workers, key=lambda worker: (*cost(worker, shape), worker.bookings.num_dispatched, worker.address))


def _prefill_tokens(worker: Worker, shape: RequestShape) -> tuple[bool, bool, int, int]:
    return worker.life.suspect, False, worker.load.num_queued_tokens + shape.uncached(worker), worker.load.num_requests


def _decode_tokens(worker: Worker, shape: RequestShape) -> tuple[bool, bool, int, int]:
    uncached, num_requests = shape.uncached(worker), worker.load.num_requests
    overflow = max(0, num_requests + 1 - max(1, worker.identity.max_num_seqs))
    tokens = worker.load.num_queued_tokens + REQUEST_TOKENS * (num_requests + OVERFLOW * overflow)
    lacks_room = worker.num_blocks_of(uncached + min(shape.num_remaining, RESERVE)) > worker.load.num_available_blocks
    return worker.life.suspect, lacks_room, tokens - min(shape.num_tokens - uncached, MOST_HITS), num_requests
