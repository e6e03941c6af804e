"""Discovery of workers: endpoints, which of their conditions are believed, the state of discovery, and its sources."""

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
    """`address` is a control address such as tcp://10.0.0.7:7001. `serving`: the worker passes its readiness probe.

    `terminating`: the worker is being ended, and its requests go on until then.
    """

    role: Role
    address: str
    serving: bool = True
    terminating: bool = False

    @property
    def withheld(self) -> str:
        """Why the worker gets no new work; "" when it may have some."""
        if self.terminating:
            return "is being ended"
        return "" if self.serving else "does not pass its readiness probe"

    @property
    def condition(self) -> str:
        """serving, terminating or unready: the label of a metric."""
        return "terminating" if self.terminating else "serving" if self.serving else "unready"


class Publish(Protocol):
    """Takes all present endpoints, in place of those before."""

    def __call__(self, endpoints: Sequence[Endpoint]) -> None: ...


def believed(endpoints: Sequence[Endpoint]) -> tuple[list[Endpoint], frozenset[Role]]:
    """The endpoints as they are used, and the roles of which no readiness is believed.

    Where every worker of a role fails its readiness probe, the fault is most likely with the probes: a node that cannot
    report to the control plane has all its pods marked unready, though they serve. So that of a whole role counts for
    nothing, as in Envoy's panic mode, and the workers' own heartbeats decide. Workers that are being ended stay so.
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


DNS_INTERVAL_S = 5.0
"""Seconds between two lookups of names."""


class Source(Protocol):
    """Publishes the present endpoints whenever they change, and waits out failures of the network."""

    @property
    def status(self) -> DiscoveryStatus: ...

    async def run(self) -> None: ...


def open_source(config: RouterConfig, publish: Publish) -> Source | None:
    """None for a static list, which needs no watching. Raises ConfigError."""
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
            # Imported here, because no other router needs this HTTP client.
            from common.cluster import KubernetesClient
            from router.fleet.kubernetes_source import KubernetesSource

            access = config.cluster
            namespace = access.namespace(config.discovery_namespace, "discovery_namespace")
            return KubernetesSource(KubernetesClient(access), namespace, services, publish)
    return None
