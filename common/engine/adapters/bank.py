"""The adapters that a worker holds, each in a place of the model's sites, by the digest of its weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from common.engine.adapters.places import AdapterPlaces
from common.errors import ModelError
from kernels import NO_ADAPTER

log = logging.getLogger(__name__)
PLACE_WAIT_S = 20.0
"""How long a load waits for requests of an unloaded adapter, whose place it needs."""
POLL_S = 0.02
"""Between two looks whether the place is free."""


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """`name` is the one that it was loaded under; `num_bytes` those that it takes."""

    digest: str
    name: str
    place: int
    rank: int
    num_bytes: int


class AdapterBank:
    """Loads and frees adapters. The event loop's threads `load` and `retire`; the engine's thread asks for places, and
    frees what was retired once no sequence uses it.

    An adapter that was retired and is loaded again before it is freed stays.
    """

    def __init__(self, places: AdapterPlaces) -> None:
        self.max_loras = places.max_loras
        self._places = places
        self._lock = threading.Lock()  # of the tables below; `_loading` alone writes to places
        self._loading = threading.Lock()
        self._held: dict[str, HeldAdapter] = {}
        self._retired: set[str] = set()
        self._free = list(range(self.max_loras))

    @property
    def held(self) -> tuple[HeldAdapter, ...]:
        """All that take a place, retired ones included."""
        with self._lock:
            return tuple(self._held.values())

    @property
    def retired(self) -> frozenset[str]:
        """Digests of adapters that wait to be freed."""
        with self._lock:
            return frozenset(self._retired)

    def place(self, digest: str) -> int | None:
        """The place of an adapter; None when it is not here, NO_ADAPTER for ""."""
        if not digest:
            return NO_ADAPTER
        with self._lock:
            held = self._held.get(digest)
        return held.place if held is not None else None

    def load(self, name: str, path: str) -> HeldAdapter:
        """Read an adapter and put it in a free place; takes seconds. Raises ModelError."""
        with self._loading:
            return self._load(name, path)

    def retire(self, digest: str) -> None:
        """Free an adapter once no sequence uses it."""
        with self._lock:
            if digest in self._held:
                self._retired.add(digest)

    def free(self, used: Collection[str]) -> bool:
        """Free the retired adapters that are not among those `used`. No step that was launched may read them."""
        with self._lock:
            gone = [self._held.pop(digest) for digest in self._retired - set(used)]
            self._retired -= {held.digest for held in gone}
            self._free += [held.place for held in gone]
        for held in gone:
            log.info("freed the place of adapter %s (%s)", held.name, held.digest)
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
        except BaseException:  # such as for lack of memory: the next adapter overwrites all of the place
            with self._lock:
                self._free.append(place)
            raise
        with self._lock:
            self._held[adapter.digest] = held
        log.info(
            "loaded adapter %s from %s in %.2f s: rank %d, %.1f MiB, digest %s",
            *(name, path, time.monotonic() - began, held.rank, held.num_bytes / 2**20, held.digest),
        )
        return held

    def _take_place(self, deadline: float) -> int:
        """A free place, which may still be used by requests of an adapter that was unloaded. Raises ModelError."""
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
                waits = bool(self._retired)
            if not waits or time.monotonic() > deadline:
                why = "requests still use one that was unloaded" if waits else "unload one first, or give more"
                raise ModelError(f"all {self.max_loras} places for adapters are taken (--max-loras): {why}")
            time.sleep(POLL_S)
