"""Selects candidate workers for a request in pools that are too large to evaluate all.

Ready workers are ranked by the cost of a usual request. A rank changes only when the worker reports, or when this
router sends it a request or one ends. Each request considers some of the cheapest workers and those that cache most of
its prompt. Among about equally cheap workers, each router starts at a random position seeded with its id, so that
routers with the same reports do not all choose the same worker (Mitzenmacher, "The power of two choices", 2001:
considering a few workers balances almost as well as considering all).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from random import Random

from common.blocks import Window
from common.wire import ROLES, Role
from router.fleet import PrefixHits, PrefixIndex, Worker, WorkerRegistry
from router.policy.routing import usual_cost

SHORTLIST_ABOVE = 32
"""Up to this number of workers, all are considered."""
NUM_CHEAP, NUM_HOLDERS = 5, 3
"""Number of considered workers per layout: cheapest ones, and those that cache most of the prompt."""
NUM_EQUAL = 32
"""The cheapest ones are taken from at most this many workers, or fewer where the cost rises clearly."""
EQUAL_SHARE, EQUAL_S = 0.25, 1e-3
"""Cost differences above this fraction plus this many seconds are clear."""
MAX_WALKS = 2
"""Maximum scans of a ranking for workers that cache a very common prefix."""
Accept = Callable[[Worker], bool]
Entry = tuple[bool, float, int, str]
"""Sort key: whether a usual request does not fit, its cost in seconds, this router's order, the address."""
Layout = tuple[Role, str]
"""A role and a layout fingerprint."""


class Shortlist:
    """Rankings of the ready workers of one router, by role and layout."""

    def __init__(self, registry: WorkerRegistry, index: PrefixIndex, *, weighs_all: bool = False) -> None:
        """For `weighs_all` see `Policy`."""
        self._registry, self._index = registry, index
        self._random = Random(registry.router_id)
        self._weighs_all = weighs_all
        self._rankings: dict[Layout, list[Entry]] = {}
        self._of_roles: dict[Role, list[tuple[Layout, list[Entry]]]] = {}  # cleared when a ranking is added or removed
        self._places: dict[str, tuple[Layout, Entry]] = {}
        self._is_kept = False
        registry.on_changed = self._on_changed

    @property
    def is_needed(self) -> bool:
        """Whether there are too many workers to consider all."""
        return len(self._registry.workers) > SHORTLIST_ABOVE and not self._weighs_all

    @property
    def windows(self) -> dict[int, Window]:
        """Attention windows of the ready workers' models, by block size in tokens."""
        ready: Iterable[Worker]
        if not self.is_needed:
            ready = [worker for worker in self._registry.workers.values() if worker.ready]
        else:
            ready = [self._worker(ranking[0]) for role in ROLES for _, ranking in self._of(role)]
        found: dict[int, Window] = {}
        for worker in ready:
            window = worker.window
            if window.block_size not in found or not window:
                found[window.block_size] = window
        return found

    def ready(self, role: Role) -> list[Worker]:
        """Return the ready workers to consider for an unknown prompt: all, unless there are many."""
        return self.workers(role, lambda worker: True, {}) if self.is_needed else self._registry.ready(role)

    def has_ready(self, role: Role) -> bool:
        """Return whether there is a ready worker of the role. For large pools only."""
        return bool(self._of(role))

    def workers(self, role: Role, accept: Accept, hits: Mapping[int, PrefixHits]) -> list[Worker]:
        """Return the workers to consider for a prompt with these `hits` by block size, filtered by `accept`."""
        found: dict[str, Worker] = {}
        for layout, ranking in self._of(role):
            for worker in self._cheap(ranking, accept):
                found[worker.address] = worker
            block_size = self._worker(ranking[0]).identity.block_size
            for worker in self._holders(layout, accept, hits.get(block_size)):
                found[worker.address] = worker
        return list(found.values())

    # ------------------------------------------------------------ inside

    def _of(self, role: Role) -> list[tuple[Layout, list[Entry]]]:
        """Return the non-empty rankings of a role."""
        if not self._is_kept:
            self._is_kept = True
            for worker in self._registry.workers.values():
                self._on_changed(worker)
        known = self._of_roles.get(role)
        if known is None:
            known = [(layout, ranking) for layout, ranking in self._rankings.items() if layout[0] == role]
            self._of_roles[role] = known
        return known

    def _worker(self, entry: Entry) -> Worker:
        return self._registry.workers[entry[3]]

    def _accepted(self, entries: Iterable[Entry], accept: Accept) -> Iterator[Worker]:
        return filter(accept, map(self._worker, entries))

    def _cheap(self, ranking: list[Entry], accept: Accept) -> list[Worker]:
        """Return some of the cheapest workers, or the very cheapest where the cost rises clearly."""
        unfit, cost_s, _, _ = ranking[0]
        limit = (unfit, (1.0 + EQUAL_SHARE) * cost_s + EQUAL_S, 0, "")
        num_equal = bisect_left(ranking, limit, hi=min(len(ranking), NUM_EQUAL))
        first = int(self._random.random() * num_equal) if num_equal > NUM_CHEAP else 0
        turned = chain(islice(ranking, first, num_equal), islice(ranking, first), islice(ranking, num_equal, None))
        return list(islice(self._accepted(turned, accept), NUM_CHEAP))

    def _holders(self, layout: Layout, accept: Accept, hits: PrefixHits | None) -> list[Worker]:
        """Return the workers that cache most of the prompt, ties by cost."""
        found: list[Worker] = []
        seen = num_walks = 0
        for mask in hits.levels() if hits else ():
            new, seen = mask & ~seen, seen | mask
            if new.bit_count() <= NUM_EQUAL:
                held = [self._places.get(address) for address in self._index.addresses(new)]
                entries: Iterable[Entry] = sorted(place[1] for place in held if place and place[0] == layout)
            elif num_walks < MAX_WALKS:
                num_walks += 1
                bit_of = self._index.bit_of
                entries = (entry for entry in self._rankings[layout] if bit_of(entry[3]) & new)
            else:
                continue
            found += islice(self._accepted(entries, accept), NUM_HOLDERS - len(found))
            if len(found) == NUM_HOLDERS:
                break
        return found

    def _on_changed(self, worker: Worker) -> None:
        """Update the rank of a worker, or remove it while it is not ready."""
        if not self._is_kept:
            return
        if (
            len(self._registry.workers) <= SHORTLIST_ABOVE or self._weighs_all
        ):  # inlined `not is_needed`: called at each heartbeat
            self._is_kept = False
            self._rankings.clear()
            self._of_roles.clear()
            self._places.clear()
            return
        before = self._places.get(worker.address)
        if not worker.ready:
            if before is not None:
                self._take_out(*before)
            return
        unfit, cost_s = usual_cost(worker)
        entry = (unfit, cost_s, worker.order, worker.address)
        layout = (worker.role, worker.identity.fingerprint)
        if before is not None:
            if before[0] == layout:
                if before[1] != entry:
                    kept = self._rankings[layout]
                    del kept[bisect_left(kept, before[1])]
                    insort(kept, entry)
                    self._places[worker.address] = layout, entry
                return
            self._take_out(*before)
        ranking = self._rankings.get(layout)
        if ranking is None:
            ranking = self._rankings[layout] = []
            self._of_roles.clear()
        insort(ranking, entry)
        self._places[worker.address] = layout, entry

    def _take_out(self, layout: Layout, entry: Entry) -> None:
        ranking = self._rankings[layout]
        del ranking[bisect_left(ranking, entry)]
        if not ranking:
            del self._rankings[layout]
            self._of_roles.clear()
        del self._places[entry[3]]
