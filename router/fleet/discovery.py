"""Discovery of workers: endpoints, handling of failed readiness probes, discovery status, and sources."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from common.config import RouterConfig
from common.observe import REMIND_S
from common.wire import Role


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """A worker by its control address, such as tcp://10.0.0.7:7001.

    `serving`: it passes its readiness probe. `terminating`: it is being stopped, its requests continue until then.
    """

    role: Role
    address: str
    serving: bool = True
    terminating: bool = False

    @property
    def withheld(self) -> str:
        """Reason for which the worker gets no new requests; "" if it may get some."""
        if self.terminating:
            return "terminating"
        return "" if self.serving else "readiness probe failing"

    @property
    def condition(self) -> str:
        """serving, terminating or unready: the label of a metric."""
        return "terminating" if self.terminating else "serving" if self.serving else "unready"


class Publish(Protocol):
    """Receives the complete current list of endpoints."""

    def __call__(self, endpoints: Sequence[Endpoint]) -> None: ...


def effective_endpoints(endpoints: Sequence[Endpoint]) -> tuple[list[Endpoint], frozenset[Role]]:
    """Return the effective endpoints, and the roles whose readiness is ignored.

    If every worker of a role fails its readiness probe, the probes are most likely at fault: a node that cannot reach
    the control plane has all its pods marked unready although they serve. As in Envoy's panic mode, readiness is then
    ignored for the whole role and the workers' own heartbeats decide. Terminating workers stay terminating.
    """
    staying = [endpoint for endpoint in endpoints if not endpoint.terminating]
    serving = {endpoint.role for endpoint in staying if endpoint.serving}
    doubted = frozenset(endpoint.role for endpoint in staying if endpoint.role not in serving)
    used = [
        replace(endpoint, serving=True) if endpoint.role in doubted and not endpoint.terminating else endpoint
        for endpoint in endpoints
    ]
    return used, doubted


log = logging.getLogger(__name__)


@dataclass(slots=True)
class DiscoveryStatus:
    """State of discovery.

    `kind` is dns, file or kubernetes. `services` maps looked-up names to roles. Times are monotonic.
    """

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
        """Record a successful lookup of all names."""
        if self.error:
            log.warning("discovery (%s): works again after %.1f s", self.kind, now - self._failing_since)
        elif self.synced_at is None:
            log.info("discovery (%s): found %s", self.kind, self._listed())
        self.num_syncs["ok"] += 1
        self.synced_at, self.error = now, ""

    def failed(self, error: str, now: float) -> None:
        """Record a failed lookup. The known workers stay."""
        self.num_syncs["failed"] += 1
        if not self.error:
            self._failing_since = now
        if error != self.error or now - self._reminded_at >= REMIND_S:
            self._reminded_at = now
            known = "no worker is known" if self.synced_at is None else f"keeping {len(self.endpoints)} known workers"
            log.warning("discovery (%s): lookup failed, %s: %s", self.kind, known, error)
        self.error = error

    def published(self, endpoints: Sequence[Endpoint]) -> None:
        """Record a change of the endpoints."""
        self.endpoints = tuple(endpoints)

    def is_synced(self) -> bool:
        """Return whether a lookup of all names has succeeded."""
        return self.synced_at is not None

    def age_s(self, now: float) -> float:
        """Return the seconds since the last successful lookup, or since the start."""
        return now - (self.started_at if self.synced_at is None else self.synced_at)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of endpoints by role and condition, including zeros."""
        roles = sorted(set(self.services.values()))
        counts = {(str(role), condition): 0 for role in roles for condition in ("serving", "unready", "terminating")}
        for endpoint in self.endpoints:
            counts[endpoint.role, endpoint.condition] += 1
        return counts

    def explain(self, role: Role, now: float) -> str:
        """Return in one line why there is no worker of a role; "" if the role is not discovered."""
        names = " and ".join(name for name, own in self.services.items() if own == role)
        if not names:
            return ""
        if self.synced_at is None:
            why = self.error or "no answer yet"
            return f"no {role} worker is known: {names} could not be looked up yet ({why})"
        stale = f"; last successful lookup {self.age_s(now):.0f} s ago: {self.error}" if self.error else ""
        noun = "service" if self.kind == "kubernetes" else "name"
        return f"no {role} worker exists: the {role} {noun} {names} has no endpoints{stale}"

    def _listed(self) -> str:
        counts = Counter(endpoint.role for endpoint in self.endpoints)
        return ", ".join(f"{counts[role]} {role} workers" for role in sorted(set(self.services.values())))


DNS_INTERVAL_S = 5.0
"""Interval of DNS lookups, in seconds."""


class Source(Protocol):
    """Publishes the current endpoints whenever they change. Retries after network failures."""

    @property
    def status(self) -> DiscoveryStatus: ...

    async def run(self) -> None: ...


def open_source(config: RouterConfig, publish: Publish) -> Source | None:
    """Create the configured source; None for a static list. Raises ConfigError."""
    services: dict[str, Role] = dict.fromkeys(config.decode_services, "decode")
    services |= dict.fromkeys(config.prefill_services, "prefill")
    match config.discovery:
        case "file":
            from router.fleet.file_source import FileSource

            return FileSource(Path(config.discovery_file), publish)
        case "dns":
            from router.fleet.dns_source import DNSSource

            return DNSSource(services, publish, interval_s=DNS_INTERVAL_S)
        case "kubernetes":
            # Imported lazily: no other source needs this HTTP client.
            from common.cluster import KubernetesClient
            from router.fleet.kubernetes_source import KubernetesSource

            access = config.cluster
            namespace = access.namespace(config.discovery_namespace, "discovery_namespace")
            return KubernetesSource(KubernetesClient(access), namespace, services, publish)
    return None
