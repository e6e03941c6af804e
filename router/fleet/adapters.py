"""LoRA adapters loaded on the workers of a model, and the orders that are missing there. Pure.

Workers own what is loaded. The newest version of a name wins, whichever router issued it, and is sent to workers that
have an older version or none. This way workers that join or restart catch up, a restarted router learns from the
workers, and routers do not have to know each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from common.errors import InvalidRequest
from common.wire import ROLES
from common.wire.messages import MAX_ADAPTERS, AdapterState, SetAdapter, WorkerHeartbeat
from router.fleet.registry import WorkerRegistry
from router.fleet.worker import Worker, WorkerState

MAX_VERSION = 2**61
"""Higher versions in reports are ignored, because no order could ever be newer."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that clients may request. `ready`: a ready worker has loaded it."""

    name: str
    path: str
    digest: str
    ready: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """State of an order: `missing` workers have not executed it, `failures` contains error messages of workers.

    `digest` is that of the weights that `num_loaded` workers have loaded. `superseded`: a newer order exists.
    """

    missing: tuple[str, ...]
    failures: tuple[str, ...]
    num_loaded: int = 0
    digest: str = ""
    superseded: bool = False


class FleetAdapters:
    """The adapters of one model's workers, from their heartbeats. Not thread-safe: use only from the event loop."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        registry.is_gone, registry.has_adapter = self.is_gone, self.has
        self._newest: dict[str, SetAdapter] = {}
        self._digests: dict[str, tuple[int, str]] = {}
        """Last known (version, digest) by name."""

    # ------------------------------------------------------------ worker reports

    def on_heartbeat(self, beat: WorkerHeartbeat, max_loras: int) -> list[SetAdapter]:
        """Process a heartbeat. Returns the orders that this worker has missed."""
        if not max_loras:
            return []
        versions = {state.name: state.version for state in beat.adapters}
        for state in beat.adapters:
            self._learn(state)
        return [
            order
            for order in self._newest.values()
            if versions.get(order.name, 0) < order.version and (order.path or order.name in versions)
        ]

    def digest_of(self, name: str) -> str:
        """Return the digest of the weights of a name.

        If workers loaded different files for the same version, the most frequent ones count. "" if the name is not
        loaded, or no worker has loaded it yet.
        """
        order = self._newest.get(name)
        if order is None or not order.path:
            return ""
        found = self._loaded(name, order.version)
        if found:
            digest = max(found, key=lambda one: (found[one], one))
            self._digests[name] = (order.version, digest)
            return digest
        version, digest = self._digests.get(name, (0, ""))
        return digest if version == order.version else ""

    def has(self, name: str) -> bool:
        """Return whether clients may request the name. A worker may still be loading it."""
        order = self._newest.get(name)
        return order is not None and bool(order.path) and bool(self.digest_of(name) or self._is_loading(order))

    def names(self) -> Iterator[AdapterInfo]:
        """Return all adapters that clients may request."""
        for name, order in sorted(self._newest.items()):
            if order.path and (digest := self.digest_of(name)):
                ready = any(digest in worker.load.digests for role in ROLES for worker in self._registry.ready(role))
                yield AdapterInfo(name, order.path, digest, ready)

    def is_gone(self, digest: str) -> bool:
        """Return whether no name refers to these weights any more, and no worker has them."""
        if any(digest in worker.load.digests for worker in self._alive()):
            return False
        return all(self.digest_of(name) != digest for name in self._newest)

    # ------------------------------------------------------------ orders

    def order(self, name: str, path: str, now_us: int) -> SetAdapter:
        """Create a new version of a name; "" unloads it. Raises InvalidRequest if there are too many names."""
        if name not in self._newest and len(self._newest) >= MAX_ADAPTERS:
            self._forget()
            if len(self._newest) >= MAX_ADAPTERS:
                raise InvalidRequest(f"lora_name: {MAX_ADAPTERS} adapter names are already in use", param="lora_name")
        before = self._newest.get(name)
        order = SetAdapter(name=name, version=max(now_us, before.version + 1 if before else 0), path=path)
        self._newest[name] = order
        return order

    def path_of(self, name: str) -> str:
        """Return the folder of an adapter, "" if it is not loaded."""
        order = self._newest.get(name)
        return order.path if order is not None else ""

    def outcome(self, order: SetAdapter) -> Outcome:
        """Return how far an order has been executed by the workers that accept adapters."""
        newest = self._newest.get(order.name)
        missing, failures, digests = [], [], Counter[str]()
        for worker in self._alive():
            state = next((one for one in worker.load.adapters if one.name == order.name), None)
            has_none = state is None and not order.path  # unloading a name that the worker never had
            if has_none or (state is not None and state.version > order.version):
                continue
            if state is None or state.version < order.version or state.status == "loading":
                missing.append(worker.name)
            elif state.status == "failed":
                failures.append(f"{worker.name}: {state.message}")
            elif state.status == "loaded":
                digests[state.digest] += 1
        digest = max(digests, key=lambda one: (digests[one], one), default="")
        superseded = newest is not None and newest.version > order.version
        return Outcome(tuple(missing), tuple(failures), digests[digest], digest, superseded)

    def takers(self) -> list[Worker]:
        """Return the ready workers that accept adapters."""
        return [worker for role in ROLES for worker in self._registry.ready(role) if worker.identity.max_loras]

    # ------------------------------------------------------------ inside

    def _learn(self, state: AdapterState) -> None:
        known = self._newest.get(state.name)
        if state.version > MAX_VERSION or (known is not None and known.version >= state.version):
            return
        if known is None and len(self._newest) >= MAX_ADAPTERS:
            self._forget()
        path = "" if state.status == "unloaded" else state.path
        self._newest[state.name] = SetAdapter(name=state.name, version=state.version, path=path)

    def _forget(self) -> None:
        """Forget the oldest unloaded name."""
        gone = [order for order in self._newest.values() if not order.path]
        if gone:
            del self._newest[min(gone, key=lambda order: order.version).name]

    def _alive(self) -> Iterator[Worker]:
        states = (WorkerState.READY, WorkerState.DRAINING)
        workers: Iterable[Worker] = self._registry.workers.values()
        return (one for one in workers if one.state in states and one.identity.max_loras)

    def _loaded(self, name: str, version: int) -> Mapping[str, int]:
        """Count the workers by digest that have loaded this version of a name."""
        found: Counter[str] = Counter()
        for worker in self._alive():
            for state in worker.load.adapters:
                if state.name == name and state.version == version and state.status == "loaded":
                    found[state.digest] += 1
        return found

    def _is_loading(self, order: SetAdapter) -> bool:
        return any(
            state.name == order.name and state.version == order.version and state.status == "loading"
            for worker in self._alive()
            for state in worker.load.adapters
        )
