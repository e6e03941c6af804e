"""Which blocks of a prompt a worker should take from its disk or from a peer, and which peer lends. Pure.

A worker decides by the same models once more when the prompt's turn comes (`common/engine/sequences/restores.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from common.latency import WORTHWHILE, StepShape
from common.wire.messages import KVPeer
from router.dispatch.request_state import RequestState
from router.fleet import PrefixHits, PrefixIndex, Worker, WorkerRegistry, WorkerState
from router.policy import Fetch, terms_of

Hits = Mapping[int, PrefixHits]
"""How much of a prompt each worker holds, by block size."""
MOST_LENDERS = 8
"""So many of the workers that hold equally much of a prompt are compared as lenders."""


class Fetches:
    """`of` says what is worth it. `begin` counts a pull, so that the next ones find the lender busy."""

    def __init__(self, registry: WorkerRegistry, index: PrefixIndex) -> None:
        self._registry, self._index = registry, index
        self._lends_until: dict[str, float] = {}

    def of(self, state: RequestState, workers: Collection[Worker], hits: Hits, now: float) -> Mapping[str, Fetch]:
        """What each worker should fetch, by its address, where fetching is predicted to be faster than computing."""
        found: dict[str, Fetch] = {}
        lenders: dict[tuple[str, int], tuple[Worker, int] | None] = {}
        for worker in workers:
            size, address = worker.identity.block_size, worker.address
            if (held := hits.get(size)) is None or (num_blocks := held.num_blocks(address)) >= held.most_reachable:
                continue
            options = [_from_disk(worker, num_blocks, held.num_reachable(address))]
            if worker.identity.lend_address:
                layout = (worker.identity.fingerprint, size)
                if layout not in lenders:
                    lenders[layout] = self._lender(state, held, layout, now)
                if (lender := lenders[layout]) is not None and lender[0] is not worker:
                    options.append(self._from_peer(worker, num_blocks, *lender, held, now))
            saved = [option for option in options if option is not None]
            if saved:
                found[address] = max(saved, key=lambda option: option[0])[1]
        return found

    def begin(self, fetch: Fetch | None, now: float) -> None:
        """Count a pull: the request was sent to a worker that will take this."""
        if fetch is not None and fetch.lender:
            self._lends_until = {address: until for address, until in self._lends_until.items() if until > now}
            self._lends_until[fetch.lender] = now + self._busy_s(fetch.lender, now) + fetch.lending_s

    def _busy_s(self, lender: str, now: float) -> float:
        """Seconds until the lender has sent what this router had others pull from it."""
        return max(0.0, self._lends_until.get(lender, 0.0) - now)

    def _lender(
        self, state: RequestState, held: PrefixHits, layout: tuple[str, int], now: float
    ) -> tuple[Worker, int] | None:
        """The worker of a layout that lends the most blocks, the least busy one of several, and how many."""
        hashes = state.hashes(layout[1])
        for count, addresses in held.holders():
            for worker in sorted(
                self._able(addresses, layout[0]), key=lambda each: (self._busy_s(each.address, now), each.order)
            ):
                # What it is only expected to have by and by, it cannot lend yet.
                if num_blocks := self._index.num_reported(worker.address, hashes[:count]):
                    return worker, num_blocks
        return None

    def _able(self, addresses: Iterator[str], fingerprint: str) -> Iterator[Worker]:
        for _, address in zip(range(MOST_LENDERS), addresses, strict=False):
            worker = self._registry.workers.get(address)
            if worker is None or (hello := worker.hello) is None or worker.life.suspect:
                continue
            alive = worker.state in (WorkerState.READY, WorkerState.DRAINING)
            if alive and hello.lend_address and hello.fingerprint == fingerprint:
                yield worker

    def _from_peer(
        self, worker: Worker, num_blocks: int, lender: Worker, num_lent: int, held: PrefixHits, now: float
    ) -> tuple[float, Fetch] | None:
        """Seconds saved, and the pull of what `lender` has beyond the worker's blocks."""
        terms, size = terms_of(worker), worker.identity.block_size
        if num_lent <= num_blocks or not terms.peer.block_bytes:
            return None
        num_below = num_lent - max(num_blocks, held.num_blocks(lender.address))
        lending_s = terms.peer.seconds(num_lent - num_blocks) + terms_of(lender).disk.seconds(max(0, num_below))
        seconds = lending_s + self._busy_s(lender.address, now)
        computed_s = _computed_s(worker, size * num_blocks, size * num_lent)
        if seconds > WORTHWHILE * computed_s:
            return None
        hello = lender.identity
        peer = KVPeer(hello.worker_id, hello.epoch, hello.lend_address, num_lent)
        return computed_s - seconds, Fetch(size * num_lent, seconds, peer, lender.address, lending_s)


def _from_disk(worker: Worker, num_blocks: int, num_there: int) -> tuple[float, Fetch] | None:
    """Seconds saved, and the read of what is on the worker's disk beyond its memory."""
    terms, size = terms_of(worker), worker.identity.block_size
    if num_there <= num_blocks or not terms.disk.block_bytes:
        return None
    read_s = terms.disk.seconds(num_there - num_blocks)
    computed_s = _computed_s(worker, size * num_blocks, size * num_there)
    return (computed_s - read_s, Fetch(size * num_there, read_s)) if read_s < computed_s else None


def _computed_s(worker: Worker, start: int, end: int) -> float:
    terms = terms_of(worker)
    return terms.model.steps_s(StepShape.of_prompt(start, end), terms.max_step_tokens)
