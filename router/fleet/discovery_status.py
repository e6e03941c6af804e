"""The state of discovery for /ready, for metrics, and for a log without repetitions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.observe import REMIND_S
from common.wire import Role
from router.fleet.endpoint import Endpoint

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DiscoveryStatus:
    """`kind` is dns, file or kubernetes, `services` maps each name to look up to its role. Times are monotonic."""

    kind: str
    services: Mapping[str, Role]
    started_at: float
    endpoints: tuple[Endpoint, ...] = ()
    num_syncs: Counter[str] = field(default_factory=lambda: Counter(ok=0, failed=0))
    synced_at: float | None = None
    error: str = ""
    _failing_since: float = 0.0
    _reminded_at: float = 0.0

    def synced(self, now: float) -> None:
        """All names were looked up."""
        if self.error:
            log.warning("discovery (%s) works again after %.1f s", self.kind, now - self._failing_since)
        elif self.synced_at is None:
            log.info("discovery (%s): %s", self.kind, self._listed())
        self.num_syncs["ok"] += 1
        self.synced_at, self.error = now, ""

    def failed(self, error: str, now: float) -> None:
        """A lookup failed; the known workers stay."""
        self.num_syncs["failed"] += 1
        if not self.error:
            self._failing_since = now
        if error != self.error or now - self._reminded_at >= REMIND_S:
            self._reminded_at = now
            known = f"{len(self.endpoints)} known workers stay" if self.synced_at is not None else "no worker is known"
            log.warning("discovery (%s) fails, %s: %s", self.kind, known, error)
        self.error = error

    def published(self, endpoints: Sequence[Endpoint]) -> None:
        """The endpoints have changed."""
        self.endpoints = tuple(endpoints)

    def age_s(self, now: float) -> float:
        """Seconds since all names were last looked up, or else since the start."""
        return now - (self.started_at if self.synced_at is None else self.synced_at)

    def counts(self) -> dict[tuple[str, str], int]:
        """Endpoints by role and condition, zeros included."""
        roles = sorted(set(self.services.values()))
        counts = {(str(role), condition): 0 for role in roles for condition in ("serving", "unready", "terminating")}
        for endpoint in self.endpoints:
            counts[endpoint.role, endpoint.condition] += 1
        return counts

    def explain(self, role: Role, now: float) -> str:
        """Why there is no worker of a role, in one line; "" for a role that is not discovered."""
        names = " and ".join(name for name, own in self.services.items() if own == role)
        if not names:
            return ""
        if self.synced_at is None:
            return f"no {role} worker is known: {names} could not be looked up yet ({self.error or 'no answer yet'})"
        stale = f"; not looked up for {self.age_s(now):.0f} s: {self.error}" if self.error else ""
        noun = "service" if self.kind == "kubernetes" else "name"
        return f"no {role} worker exists: the {role} {noun} {names} has no endpoints{stale}"

    def _listed(self) -> str:
        counts = Counter(endpoint.role for endpoint in self.endpoints)
        return ", ".join(f"{counts[role]} {role} workers" for role in sorted(set(self.services.values())))
