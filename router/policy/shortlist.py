"""Which ready workers are weighed for a request when there are too many to weigh all.

Every worker of a large pool has a place in a ranking by what a usual request would cost there. The place changes only
when the worker reports, or when this router sends it work or hears of its end. A request is weighed at some of the
cheapest workers and at those that hold most of its prompt. Of workers that are about equally cheap each router takes
some from a place on that it draws by chance, seeded with its id, so that routers that have heard the same reports do
not all choose the same worker (Mitzenmacher, "The power of two choices", 2001: a look at a few balances almost as well
as a look at all).
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

FEW = 32
"""Up to so many workers all are weighed."""
NUM_CHEAP, NUM_HOLDERS = 5, 3
"""Workers of one layout that are weighed: of the cheapest, and of those that hold most of the prompt."""
NUM_EQUAL = 32
"""Out of at most so many cheapest workers those are taken; of fewer where the next costs clearly more."""
EQUAL_SHARE, EQUAL_S = 0.25, 1e-3
"""A worker costs clearly more beyond this share and so many seconds."""
MAX_WALKS = 2
"""How often a ranking is searched for holders of a prefix that very many workers hold."""
Accept = Callable[[Worker], bool]
Entry = tuple[bool, float, int, str]
"""Whether a usual request does not fit, its cost in seconds, this router's order, the address."""
Layout = tuple[Role, str]
"""A role and the fingerprint of a layout."""


class Shortlist:
    """Keeps the rankings of one router up to date: one for each role and layout, of its ready workers."""

    def __init__(self, registry: WorkerRegistry, index: PrefixIndex, *, weighs_all: bool = False) -> None:
        """`weighs_all`: see `Policy`."""
        self._registry, self._index = registry, index
        self._random = Random(registry.router_id)
        self._weighs_all = weighs_all
        self._rankings: dict[Layout, list[Entry]] = {}
        self._of_roles: dict[Role, list[tuple[Layout, list[Entry]]]] = {}  # emptied when a ranking comes or goes
        self._places: dict[str, tuple[Layout, Entry]] = {}
        self._is_kept = False
        registry.on_changed = self._on_changed

    @property
    def is_needed(self) -> bool:
        """Whether there are more workers than are weighed for each request."""
        return len(self._registry.workers) > FEW and not self._weighs_all

    @property
    def windows(self) -> dict[int, Window]:
        """By the tokens of a block, how far the models of the ready workers with such blocks look back."""
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
        """Ready workers to weigh for a prompt of which nothing is known: all, unless there are many."""
        return self.workers(role, lambda worker: True, {}) if self.is_needed else self._registry.ready(role)

    def has_ready(self, role: Role) -> bool:
        """Whether there is a ready worker of the role, once there are many workers."""
        return bool(self._of(role))

    def workers(self, role: Role, accept: Accept, hits: Mapping[int, PrefixHits]) -> list[Worker]:
        """Ready workers of a role that `accept` takes, to weigh for a prompt. `hits`: its own, by size of a block."""
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
        """The rankings of a role; none is empty."""
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
        """Some of the cheapest workers: the very cheapest where the next ones cost clearly more."""
        unfit, cost_s, _, _ = ranking[0]
        limit = (unfit, (1.0 + EQUAL_SHARE) * cost_s + EQUAL_S, 0, "")
        num_equal = bisect_left(ranking, limit, hi=min(len(ranking), NUM_EQUAL))
        first = int(self._random.random() * num_equal) if num_equal > NUM_CHEAP else 0
        turned = chain(islice(ranking, first, num_equal), islice(ranking, first), islice(ranking, num_equal, None))
        return list(islice(self._accepted(turned, accept), NUM_CHEAP))

    def _holders(self, layout: Layout, accept: Accept, hits: PrefixHits | None) -> list[Worker]:
        """Workers that hold most of the prompt, of equal ones the cheapest."""
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
        """Give the worker its new place, or none while it is not ready."""
        if not self._is_kept:
            return
        if len(self._registry.workers) <= FEW or self._weighs_all:  # not `is_needed`: this is once a heartbeat
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
