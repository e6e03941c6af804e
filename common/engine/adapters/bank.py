"""Adapters loaded on a worker, each in a slot of the model's LoRA sites, by the digest of its weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from common.engine.adapters.slots import AdapterSlots
from common.errors import ModelError
from kernels import NO_ADAPTER

log = logging.getLogger(__name__)
PLACE_WAIT_S = 20.0
"""Time, in seconds, that a load waits for requests of an unloaded adapter whose slot it needs."""
POLL_S = 0.02
"""Poll interval, in seconds, while waiting for a slot."""


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """A loaded adapter. `name`: name under which it was loaded. `num_bytes`: its memory."""

    digest: str
    name: str
    place: int
    rank: int
    num_bytes: int


class AdapterBank:
    """Loads and frees adapters.

    Threads of the event loop call `load` and `retire`. The engine thread looks up slots and frees retired adapters that
    no sequence uses. A retired adapter that is loaded again before it is freed is kept.
    """

    def __init__(self, places: AdapterSlots) -> None:
        self.max_loras = places.max_loras
        self._places = places
        self._lock = threading.Lock()  # protects the tables below; `_loading` serialises writes to slots
        self._loading = threading.Lock()
        self._held: dict[str, HeldAdapter] = {}
        self._retired: set[str] = set()
        self._free = list(range(self.max_loras))

    @property
    def held(self) -> tuple[HeldAdapter, ...]:
        """All adapters in slots, including retired ones."""
        with self._lock:
            return tuple(self._held.values())

    @property
    def retired(self) -> frozenset[str]:
        """Digests of adapters waiting to be freed."""
        with self._lock:
            return frozenset(self._retired)

    def place(self, digest: str) -> int | None:
        """Return the slot of an adapter; None if it is not loaded, NO_ADAPTER for ""."""
        if not digest:
            return NO_ADAPTER
        with self._lock:
            held = self._held.get(digest)
        return held.place if held is not None else None

    def load(self, name: str, path: str) -> HeldAdapter:
        """Load an adapter into a free slot, which takes seconds. Raises ModelError."""
        with self._loading:
            return self._load(name, path)

    def retire(self, digest: str) -> None:
        """Mark an adapter to be freed once no sequence uses it."""
        with self._lock:
            if digest in self._held:
                self._retired.add(digest)

    def free(self, used: Collection[str]) -> bool:
        """Free the retired adapters that are not in `used`. No launched step may read them."""
        with self._lock:
            gone = [self._held.pop(digest) for digest in self._retired - set(used)]
            self._retired -= {held.digest for held in gone}
            self._free += [held.place for held in gone]
        for held in gone:
            log.info("adapter %s: freed its slot (digest %s)", held.name, held.digest)
        return bool(gone)

    def _load(self, name: str, path: str) -> HeldAdapter:
        began = time.monotonic()
        adapter = self._places.read(path)
        with self._lock:
            if (known := self._held.get(adapter.digest)) is not None:
                self._retired.discard(adapter.digest)
                return known
        place = self._take_place(began + PLACE_WAIT_S)
        try:
            num_bytes = self._places.fill(place, adapter, path)
            held = HeldAdapter(adapter.digest, name, place, adapter.rank, num_bytes)
        except BaseException:  # for example out of memory; the next adapter overwrites the whole slot
            with self._lock:
                self._free.append(place)
            raise
        with self._lock:
            self._held[adapter.digest] = held
        log.info(
            "adapter %s: loaded from %s in %.2f s: rank %d, %.1f MiB, digest %s",
            *(name, path, time.monotonic() - began, held.rank, held.num_bytes / 2**20, held.digest),
        )
        return held

    def _take_place(self, deadline: float) -> int:
        """Return a free slot, waiting for requests of unloaded adapters if necessary. Raises ModelError."""
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
                waits = bool(self._retired)
            if not waits or time.monotonic() > deadline:
                why = "requests still use an unloaded adapter" if waits else "unload an adapter, or increase the limit"
                raise ModelError(f"all {self.max_loras} adapter slots (--max-loras) are in use: {why}")
            time.sleep(POLL_S)
