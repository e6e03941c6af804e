"""Settings of where processes run: how a router finds workers, and what autoscalers read."""

from __future__ import annotations

import os
from dataclasses import dataclass

from common.cluster import CREDENTIALS, ClusterAccess
from common.config.field import FILE, GOAL_MS, Config, setting
from common.errors import ConfigError
from common.wire import Role

_SERVICE = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)(:[0-9]{1,5})?"
_ADDRESS = r"(tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}|ipc://.+)"
_NAMESPACE = r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?"


@dataclass(frozen=True)
class ClusterSettings(Config):
    """How to reach the API server of the Kubernetes cluster that a process runs in."""

    kubernetes_api: str = setting(
        "",
        "URL of the Kubernetes API server; empty: the one that the environment of every container names",
        group="Kubernetes",
        pattern=r"(https?://[^\s/]+(/[^\s]*)?)?",
        expects="a URL such as https://10.0.0.1:443",
        metavar="URL",
    )
    kubernetes_credentials: str = setting(
        CREDENTIALS,
        "folder with a service account's token, ca.crt and namespace; read anew as they change",
        group="Kubernetes",
        metavar="FOLDER",
    )

    @property
    def cluster(self) -> ClusterAccess:
        """Raises ConfigError."""
        return ClusterAccess.find(self.kubernetes_api, self.kubernetes_credentials)


@dataclass(frozen=True)
class DiscoverySettings(ClusterSettings):
    """How a router learns which workers there are."""

    discovery: str = setting(
        "static",
        "how workers are found; static: --prefill and --decode list them; dns: host names are looked up again and "
        "again; file: --discovery-file lists them and is read again when it changes; kubernetes: the EndpointSlices of "
        "Services are watched",
        group="Workers",
        choices=("static", "dns", "file", "kubernetes"),
    )
    prefill_services: tuple[str, ...] = setting(
        (),
        "where prefill workers are found: names of Services (kubernetes) or HOST:PORT (dns); none: decode workers do "
        "everything",
        group="Workers",
        pattern=_SERVICE,
        expects="names such as diptych-prefill (kubernetes) or diptych-prefill:7001 (dns)",
        metavar="NAME",
    )
    decode_services: tuple[str, ...] = setting(
        (),
        "where decode workers are found: names of Services (kubernetes) or HOST:PORT (dns)",
        group="Workers",
        pattern=_SERVICE,
        expects="names such as diptych-decode (kubernetes) or diptych-decode:7001 (dns)",
        metavar="NAME",
    )
    discovery_file: str = setting(
        "",
        'with --discovery file: JSON such as {"prefill": ["tcp://10.0.0.7:7001"], "decode": ["tcp://10.0.0.8:7001"]}, '
        "to be replaced as a whole (written beside, then renamed)",
        group="Workers",
        **FILE,
    )
    discovery_namespace: str = setting(
        "",
        "namespace of the Services; empty: the router's own",
        group="Workers",
        pattern=_NAMESPACE,
        expects="a namespace's name",
        metavar="NAMESPACE",
    )
    prefill: tuple[str, ...] = setting(
        (),
        "control addresses of the prefill workers; none: decode workers do everything",
        group="Workers",
        pattern=_ADDRESS,
        expects="addresses such as tcp://127.0.0.1:7001",
        metavar="ADDRESS",
    )
    decode: tuple[str, ...] = setting(
        (),
        "control addresses of the decode workers; a model that embeds or scores (--task) needs none",
        group="Workers",
        pattern=_ADDRESS,
        expects="at least one address such as tcp://127.0.0.1:7002",
        metavar="ADDRESS",
    )
    slo_ttft_ms: float = setting(
        0.0,
        "milliseconds within which a first token should come: a request that would wait longer behind others gets 429 "
        "at once; 0: no such goal, --max-wait-s alone limits the wait",
        group="Scaling",
        **GOAL_MS,
    )
    slo_tpot_ms: float = setting(
        0.0,
        "milliseconds that a token after the first should take: a request whose tokens would take longer beside those "
        "that run gets 429 at once; 0: no such goal",
        group="Scaling",
        **GOAL_MS,
    )

    def check(self) -> None:
        super().check()
        addresses = (*self.prefill, *self.decode)
        for address in addresses:
            if addresses.count(address) > 1:
                field = "decode" if address in self.decode else "prefill"
                raise ConfigError(field, address, "each worker address once")
        services = (*self.prefill_services, *self.decode_services)
        if self.discovery == "static":
            if services:
                raise ConfigError("discovery", "static", "dns or kubernetes, for --prefill-services, --decode-services")
        elif addresses:
            raise ConfigError("discovery", self.discovery, "static, where --prefill or --decode list addresses")
        if bool(self.discovery_file) != (self.discovery == "file"):
            allowed = "the name of a file with --discovery file" if self.discovery == "file" else "empty otherwise"
            raise ConfigError("discovery_file", self.discovery_file, allowed)
        if self.discovery == "file" and services:
            raise ConfigError("discovery", "file", "dns or kubernetes, for --prefill-services, --decode-services")
        if self.discovery_namespace and self.discovery != "kubernetes":
            raise ConfigError("discovery_namespace", self.discovery_namespace, "empty without --discovery kubernetes")
        for name in services:
            field = "decode_services" if name in self.decode_services else "prefill_services"
            _, colon, port = name.rpartition("]")[2].partition(":")
            if self.discovery == "dns" and not (colon and 0 < int(port) < 65536):
                raise ConfigError(field, name, "HOST:PORT with --discovery dns, such as diptych-decode:7001")
            if self.discovery == "kubernetes" and (colon or name.startswith("[")):
                raise ConfigError(field, name, "the name of a Service with --discovery kubernetes, without a port")
            if services.count(name) > 1:
                raise ConfigError(field, name, "each name once")

    def check_start(self) -> None:
        super().check_start()
        if not (self.prefill or self.prefill_services):  # else a model may be served that needs no decode workers
            self.check_workers("decode")
        if self.discovery == "kubernetes":
            self.cluster.namespace(self.discovery_namespace, "discovery_namespace")

    def check_workers(self, role: Role) -> None:
        """Refuse settings by which no worker of a role that is needed can be found. Raises ConfigError."""
        services, port = f"{role}_services", 7001 if role == "prefill" else 7002
        if self.discovery == "static":
            if not getattr(self, role):
                raise ConfigError(role, (), f"at least one address such as tcp://127.0.0.1:{port}")
        elif self.discovery != "file" and not getattr(self, services):
            raise ConfigError(services, (), f"at least one name with --discovery {self.discovery}")


@dataclass(frozen=True)
class PodSettings(ClusterSettings):
    """Settings of a worker in a pod."""

    pod_deletion_cost: bool = setting(
        False,
        "keep controller.kubernetes.io/pod-deletion-cost on the worker's own pod at its number of requests, so that a "
        "pool that shrinks loses its least busy pod; needs POD_NAME and the right to patch pods",
        group="Kubernetes",
    )

    def check_start(self) -> None:
        super().check_start()
        if self.pod_deletion_cost:
            if not os.environ.get("POD_NAME"):
                raise ConfigError("pod_deletion_cost", True, "false where POD_NAME is not set in the environment")
            self.cluster.namespace(os.environ.get("POD_NAMESPACE", ""), "POD_NAMESPACE")
