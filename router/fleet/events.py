"""The last things that happened to workers, for people who look. Pure: `now` comes in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from router.fleet.worker import Worker

NUM_KEPT = 50
"""Events, for the page at /dashboard."""


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """What happened to a worker, `age_s` seconds ago. `role` is the one that it had then.

    `kind`: found, gone (discovery), withheld, back (no new work, and again), ready, lost, role (it changed its role).
    """

    kind: str
    worker: str
    role: str
    detail: str = ""
    age_s: float = 0.0


class FleetEvents:
    """Keeps the last `NUM_KEPT` events."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, FleetEvent]] = deque(maxlen=NUM_KEPT)
        self._names: dict[str, str] = {}  # by address: a lost worker's hello is forgotten

    def add(self, kind: str, worker: Worker, now: float, detail: str = "") -> None:
        """It happens now."""
        address = worker.address
        if worker.worker_id:
            self._names[address] = worker.worker_id
        name = self._names.get(address, address)
        if kind == "gone":
            self._names.pop(address, None)
        self._events.append((now, FleetEvent(kind, name, worker.role, detail)))

    def recent(self, now: float) -> tuple[FleetEvent, ...]:
        """The newest first."""
        return tuple(replace(event, age_s=max(0.0, now - at)) for at, event in reversed(self._events))
