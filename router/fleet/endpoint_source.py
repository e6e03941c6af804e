"""Opens the source of workers that a router's configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.config import RouterConfig
from common.wire import Role
from router.fleet.discovery_status import DiscoveryStatus
from router.fleet.endpoint import Publish

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
