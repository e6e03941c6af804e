"""Settings of worker discovery and Kubernetes."""

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
    """Access to the API server of the Kubernetes cluster that the process runs in."""

    kubernetes_api: str = setting(
        "",
        "URL of the Kubernetes API server",
        group="Kubernetes",
        default_note="from the environment of the container",
        pattern=r"(https?://[^\s/]+(/[^\s]*)?)?",
        expects="a URL such as https://10.0.0.1:443",
        metavar="URL",
    )
    kubernetes_credentials: str = setting(
        CREDENTIALS,
        "folder with the token, ca.crt and namespace of a service account",
        group="Kubernetes",
        details="Its files are reread when they change.",
        metavar="FOLDER",
    )

    @property
    def cluster(self) -> ClusterAccess:
        """Access with these settings. Raises ConfigError."""
        return ClusterAccess.find(self.kubernetes_api, self.kubernetes_credentials)


@dataclass(frozen=True)
class DiscoverySettings(ClusterSettings):
    """How a router finds its workers, and the latency goals."""

    discovery: str = setting(
        "static",
        "method of finding workers",
        group="Workers",
        details="`static` uses the addresses of --prefill and --decode. `dns` resolves --prefill-services and "
        "--decode-services repeatedly. `file` reads --discovery-file when it changes. `kubernetes` "
        "watches the EndpointSlices of the Services.",
        common=True,
        choices=("static", "dns", "file", "kubernetes"),
    )
    prefill_services: tuple[str, ...] = setting(
        (),
        "Services (kubernetes) or HOST:PORT (dns) of prefill workers",
        group="Workers",
        default_note="none",
        common=True,
        pattern=_SERVICE,
        expects="names such as diptych-prefill (kubernetes) or diptych-prefill:7001 (dns)",
        metavar="NAME",
    )
    decode_services: tuple[str, ...] = setting(
        (),
        "Services (kubernetes) or HOST:PORT (dns) of decode workers",
        group="Workers",
        default_note="none",
        common=True,
        pattern=_SERVICE,
        expects="names such as diptych-decode (kubernetes) or diptych-decode:7001 (dns)",
        metavar="NAME",
    )
    discovery_file: str = setting(
        "",
        "JSON file with the addresses of the workers, for --discovery file",
        group="Workers",
        details='Example: {"prefill": ["tcp://10.0.0.7:7001"], "decode": ["tcp://10.0.0.8:7001"]}. Replace it '
        "atomically: rename a new file to it.",
        **FILE,
    )
    discovery_namespace: str = setting(
        "",
        "namespace of the Services, for --discovery kubernetes",
        group="Workers",
        default_note="the namespace of the router",
        pattern=_NAMESPACE,
        expects="the name of a namespace",
        metavar="NAMESPACE",
    )
    prefill: tuple[str, ...] = setting(
        (),
        "control addresses of prefill workers",
        group="Workers",
        details="Without prefill workers, decode workers compute all prompts.",
        default_note="none",
        common=True,
        pattern=_ADDRESS,
        expects="addresses such as tcp://127.0.0.1:7001",
        metavar="ADDRESS",
    )
    decode: tuple[str, ...] = setting(
        (),
        "control addresses of decode workers",
        group="Workers",
        details="A model with --task embed or score needs none.",
        default_note="none",
        common=True,
        pattern=_ADDRESS,
        expects="addresses such as tcp://127.0.0.1:7002",
        metavar="ADDRESS",
    )
    slo_ttft_ms: float = setting(
        0.0,
        "goal for the time to first token (TTFT), in milliseconds",
        group="Goals",
        details="Work is ordered, sized and placed to meet it. See --slo-refuse.",
        default_note="no goal",
        common=True,
        **GOAL_MS,
    )
    slo_tpot_ms: float = setting(
        0.0,
        "goal for the time per output token after the first (TPOT), in milliseconds",
        group="Goals",
        details="Batches, chunks of prompts and the pace of steps are chosen to meet it. See --slo-refuse.",
        default_note="no goal",
        common=True,
        **GOAL_MS,
    )

    def check(self) -> None:
        super().check()
        addresses = (*self.prefill, *self.decode)
        for address in addresses:
            if addresses.count(address) > 1:
                field = "decode" if address in self.decode else "prefill"
                raise ConfigError(field, address, "an address that is listed once")
        services = (*self.prefill_services, *self.decode_services)
        if self.discovery == "static":
            if services:
                raise ConfigError(
                    "discovery", "static", "dns or kubernetes with --prefill-services or --decode-services"
                )
        elif addresses:
            raise ConfigError("discovery", self.discovery, "static with --prefill or --decode")
        if bool(self.discovery_file) != (self.discovery == "file"):
            allowed = (
                "the name of a file with --discovery file"
                if self.discovery == "file"
                else "empty without --discovery file"
            )
            raise ConfigError("discovery_file", self.discovery_file, allowed)
        if self.discovery == "file" and services:
            raise ConfigError("discovery", "file", "dns or kubernetes with --prefill-services or --decode-services")
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
                raise ConfigError(field, name, "a name that is listed once")

    def check_start(self) -> None:
        super().check_start()
        if not (self.prefill or self.prefill_services):  # models for embeddings or scores need no decode workers
            self.check_workers("decode")
        if self.discovery == "kubernetes":
            self.cluster.namespace(self.discovery_namespace, "discovery_namespace")

    def check_workers(self, role: Role) -> None:
        """Raise ConfigError if no worker of a required role can be found."""
        services, port = f"{role}_services", 7001 if role == "prefill" else 7002
        if self.discovery == "static":
            if not getattr(self, role):
                raise ConfigError(role, (), f"at least one address such as tcp://127.0.0.1:{port}")
        elif self.discovery != "file" and not getattr(self, services):
            raise ConfigError(services, (), f"at least one name with --discovery {self.discovery}")


@dataclass(frozen=True)
class PodSettings(ClusterSettings):
    """Settings of a worker in a Kubernetes pod."""

    pod_deletion_cost: bool = setting(
        False,
        "annotate the worker's pod with its number of requests, so that Kubernetes removes the least busy pod first",
        group="Kubernetes",
        details="The annotation is controller.kubernetes.io/pod-deletion-cost. It requires POD_NAME in the environment "
        "and permission to patch pods.",
    )

    def check_start(self) -> None:
        super().check_start()
        if self.pod_deletion_cost:
            if not os.environ.get("POD_NAME"):
                raise ConfigError("pod_deletion_cost", True, "false without POD_NAME in the environment")
            self.cluster.namespace(os.environ.get("POD_NAMESPACE", ""), "POD_NAMESPACE")
