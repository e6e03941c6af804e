"""Which ready workers come into question for a request, and what they hold of its prompt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from common.wire import Role
from router.dispatch.request_state import RequestState
from router.fleet import PrefixHits, PrefixIndex, Worker, WorkerRegistry
from router.policy import Shortlist

Hits = Mapping[int, PrefixHits]
"""How much of a prompt each worker holds, by block size."""


class Candidates:
    """Finds the workers among which a request's place is chosen: all ready ones, or of many a shortlist."""

    def __init__(self, registry: WorkerRegistry, index: PrefixIndex, shortlist: Shortlist) -> None:
        self._registry, self._index, self._shortlist = registry, index, shortlist

    def usable(self, role: Role, state: RequestState) -> list[Worker]:
        """Ready workers with room for the request so far, and with the weights that its answer began with.

        A prefill worker needs room for two more tokens, if the answer may have them; for none if the prompt is pooled.
        """
        accept = _accepting(role, state)
        return [worker for worker in self._registry.ready(role) if accept(worker)]

    def of(self, state: RequestState, deaf: Collection[str], hits: Hits) -> tuple[list[Worker], list[Worker]]:
        """Usable prefill and decode workers to weigh, without `deaf` ones and those that failed this request.

        When no other worker is left, one that failed gets a second chance. A failed prefill worker gets none beside a
        decode worker, which can prefill itself.
        """
        decode = [] if state.pools else self._weighed("decode", state, deaf, hits)
        prefill = self._weighed("prefill", state, deaf, hits)
        if not state.failed_lives:
            return prefill, decode
        spared = [worker for worker in prefill if (worker.address, worker.epoch) not in state.failed_lives]
        others = [worker for worker in decode if (worker.address, worker.epoch) not in state.failed_lives]
        return (spared if decode else spared or prefill), (others or decode)

    def _weighed(self, role: Role, state: RequestState, deaf: Collection[str], hits: Hits) -> list[Worker]:
        """All usable workers of a role, or out of many those that are worth a look."""
        if not self._shortlist.is_needed:
            return [worker for worker in self.usable(role, state) if worker.address not in deaf]
        accept = _accepting(role, state, deaf)
        if state.failed_lives:
            others = self._shortlist.workers(role, _sparing(accept, state.failed_lives), hits)
            if others:
                return others
        return self._shortlist.workers(role, accept, hits)

    def may_decode(self, state: RequestState, deaf: Collection[str]) -> bool:
        """Whether a decode worker can take the request at all; of many none is asked yet."""
        if self._shortlist.is_needed:
            return self._shortlist.has_ready("decode")
        accept, workers = _accepting("decode", state, deaf), self._registry.workers.values()
        return any(worker.role == "decode" and worker.ready and accept(worker) for worker in workers)

    def hits(self, state: RequestState) -> Hits:
        """What workers hold of the prompt, by size of a block."""
        if state.computes_all or self._index.is_empty:
            return {}
        windows = self._shortlist.windows
        return {size: self._index.hits(state.hashes(size), window) for size, window in windows.items()}


def _accepting(role: Role, state: RequestState, deaf: Collection[str] = ()) -> Callable[[Worker], bool]:
    """Whether a worker has room for the request so far, the weights that its answer began with, and its adapter."""
    more = 0 if state.pools else 1 if role == "decode" else min(2, state.num_remaining)
    num_tokens = state.num_tokens + more
    weights, adapter = state.weights, state.request.adapter

    def accept(worker: Worker) -> bool:
        if worker.max_tokens < num_tokens or (deaf and worker.address in deaf):
            return False
        if adapter and adapter not in worker.digests:
            return False
        return weights is None or weights == worker.identity.weights

    return accept


def _sparing(accept: Callable[[Worker], bool], lives: Collection[tuple[str, int]]) -> Callable[[Worker], bool]:
    """What `accept` says, but False for a worker whose present life failed the request."""
    return lambda worker: accept(worker) and (worker.address, worker.epoch) not in lives
