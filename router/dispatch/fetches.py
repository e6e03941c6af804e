"""Selects the blocks of a prompt that a worker should read from disk or pull from a peer, and the peer. Pure.

The worker decides again, with the same models, when it schedules the prompt (`common/engine/sequences/restores.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from common.latency import WORTHWHILE, StepShape
from common.wire.messages import KVPeer
from router.dispatch.request_state import RequestState
from router.fleet import PrefixHits, PrefixIndex, Worker, WorkerRegistry, WorkerState
from router.policy import Fetch, forecast_inputs

Hits = Mapping[int, PrefixHits]
"""Cached blocks of a prompt on each worker, by block size."""
MOST_LENDERS = 8
"""Maximum number of workers with equally many cached blocks that are compared as lenders."""


class FetchPlanner:
    """Plans fetches of cached blocks. `begin` records a pull, so that later plans see the lender as busy."""

    def __init__(self, registry: WorkerRegistry, index: PrefixIndex) -> None:
        self._registry, self._index = registry, index
        self._lends_until: dict[str, float] = {}

    def plan(self, state: RequestState, workers: Collection[Worker], hits: Hits, now: float) -> Mapping[str, Fetch]:
        """Return the best fetch for each worker by address, where fetching is predicted to be faster than computing."""
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
        """Record a pull that was sent to a worker."""
        if fetch is not None and fetch.lender:
            self._lends_until = {address: until for address, until in self._lends_until.items() if until > now}
            self._lends_until[fetch.lender] = now + self._busy_s(fetch.lender, now) + fetch.lending_s

    def _busy_s(self, lender: str, now: float) -> float:
        """Return the seconds until the lender has sent all pulls that this router ordered."""
        return max(0.0, self._lends_until.get(lender, 0.0) - now)

    def _lender(
        self, state: RequestState, held: PrefixHits, layout: tuple[str, int], now: float
    ) -> tuple[Worker, int] | None:
        """Return the least busy of the workers with the most blocks to lend, and the number of blocks."""
        hashes = state.hashes(layout[1])
        for count, addresses in held.holders():
            for worker in sorted(
                self._able(addresses, layout[0]), key=lambda each: (self._busy_s(each.address, now), each.order)
            ):
                # Blocks that are only expected cannot be lent yet.
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
        """Return the seconds saved, and the pull of the blocks that only `lender` has."""
        inputs, size = forecast_inputs(worker), worker.identity.block_size
        if num_lent <= num_blocks or not inputs.peer.block_bytes:
            return None
        num_below = num_lent - max(num_blocks, held.num_blocks(lender.address))
        lending_s = inputs.peer.seconds(num_lent - num_blocks) + forecast_inputs(lender).disk.seconds(max(0, num_below))
        seconds = lending_s + self._busy_s(lender.address, now)
        computed_s = _computed_s(worker, size * num_blocks, size * num_lent)
        if seconds > WORTHWHILE * computed_s:
            return None
        hello = lender.identity
        peer = KVPeer(hello.worker_id, hello.epoch, hello.lend_address, num_lent)
        return computed_s - seconds, Fetch(size * num_lent, seconds, peer, lender.address, lending_s)


def _from_disk(worker: Worker, num_blocks: int, num_there: int) -> tuple[float, Fetch] | None:
    """Return the seconds saved, and the read of the blocks that are only on the worker's disk."""
    inputs, size = forecast_inputs(worker), worker.identity.block_size
    if num_there <= num_blocks or not inputs.disk.block_bytes:
        return None
    read_s = inputs.disk.seconds(num_there - num_blocks)
    computed_s = _computed_s(worker, size * num_blocks, size * num_there)
    return (computed_s - read_s, Fetch(size * num_there, read_s)) if read_s < computed_s else None


def _computed_s(worker: Worker, start: int, end: int) -> float:
    inputs = forecast_inputs(worker)
    return inputs.model.steps_s(StepShape.of_prompt(start, end), inputs.max_step_tokens)
