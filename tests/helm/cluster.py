"""A rendered chart as real processes on this machine: the same commands, configuration files, environment and probes.

Each "pod" has a loopback address of its own, so that ports are those of the chart. What differs from a cluster: the
address to listen on, the folders that stand for /etc/diptych and /var/cache/diptych (the user's own cache, where
compiled kernels lie already), and where the API server is.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from common.machine.child_process import ChildProcess

from ..kubernetes_api import KubernetesAPI, endpoint
from .chart import NAMESPACE, Object, Rendered
from .programs import tools_folder

Secrets = Mapping[str, Mapping[str, bytes]]
"""Name -> file -> content, as `kubectl create secret generic --from-file` takes them."""

FETCH_TIMEOUT_S = 200.0
START_TIMEOUT_S = 240.0


def loopback_address() -> str:
    """An address of this machine that nobody else is likely to use."""
    return f"127.{random.randrange(64, 255)}.{random.randrange(256)}.{random.randrange(1, 255)}"


@dataclass
class Container:
    """One Deployment's container, run here."""

    rendered: Rendered
    name: str
    folder: Path
    overrides: Mapping[str, str]
    secrets: Secrets = field(default_factory=dict)
    index: int = 0
    address: str = field(default_factory=loopback_address)
    process: ChildProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = ChildProcess(self.name, self.log)

    @property
    def spec(self) -> Object:
        template: Object = self.rendered.named("Deployment", self.name)["spec"]["template"]["spec"]
        return template

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def variables(self, container: Object) -> dict[str, str]:
        """The container's variables as rendered."""
        fields = {
            "metadata.name": f"{self.name}-{self.index}",
            "metadata.namespace": NAMESPACE,
            "status.podIP": self.address,
        }
        values: dict[str, str] = {}
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                values[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "resourceFieldRef" in source:
                values[variable["name"]] = "1"
            else:
                values[variable["name"]] = variable["value"]
        return values

    def environment(self, container: Object) -> dict[str, str]:
        cache = str(tools_folder().parent)
        values = {name: value.replace("/var/cache/diptych", cache) for name, value in self.variables(container).items()}
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        return kept | values | {"DIPTYCH_HOST": self.address, "OMP_NUM_THREADS": "1"} | dict(self.overrides)

    def command(self, container: Object) -> list[str]:
        """As rendered, but for the folders that stand for mounts."""
        program, *words = [*container["command"], *container["args"]]
        assert program == "diptych"
        return [str(Path(sys.executable).with_name("diptych")), *(self._here(word) for word in words)]

    def _here(self, text: str) -> str:
        return text.replace("/etc/diptych", str(self.folder / "etc"))

    def _mount(self) -> None:
        """ConfigMaps and Secrets as files, where the container expects them."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.spec["containers"][0]["volumeMounts"]:
            volume, folder = volumes[mount["name"]], Path(self._here(mount["mountPath"]))
            files: Mapping[str, bytes] = {}
            if "configMap" in volume:
                data = self.rendered.named("ConfigMap", volume["configMap"]["name"])["data"]
                files = {name: self._here(text).encode() for name, text in data.items()}
            elif "secret" in volume:
                files = self.secrets[volume["secret"]["secretName"]]
            for name, content in files.items():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
                (folder / name).chmod(volume.get("secret", {}).get("defaultMode", 0o644))

    def start(self) -> None:
        """Run the init containers to their end, then the container."""
        self.folder.mkdir(parents=True)
        self._mount()
        for container in self.spec.get("initContainers", ()):
            environment = self.environment(container)
            subprocess.run(
                self.command(container), env=environment, check=True, capture_output=True, timeout=FETCH_TIMEOUT_S
            )
        container = self.spec["containers"][0]
        self.process.launch(self.command(container), self.environment(container))

    def probe(self, kind: str) -> bool:
        """What the kubelet would find."""
        container = self.spec["containers"][0]
        asked = container[f"{kind}Probe"]["httpGet"]
        port = next(each["containerPort"] for each in container["ports"] if each["name"] == asked["port"])
        try:
            url = f"{asked.get('scheme', 'HTTP').lower()}://{self.address}:{port}{asked['path']}"
            wait_s = container[f"{kind}Probe"]["timeoutSeconds"]
            reply = httpx.get(url, timeout=wait_s, trust_env=False, verify=False)  # the kubelet does not verify either
        except httpx.TransportError:
            return False
        return 200 <= reply.status_code < 400

    def wait(self, kind: str) -> None:
        """Until a probe succeeds, in the time that the chart gives it or this test has."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.probe(kind):
            assert self.process.alive, self.log.read_text()
            assert time.monotonic() < deadline, f"{self.name}: no {kind} in time\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def end(self) -> int | None:
        """SIGTERM, and the exit status; SIGKILL after the grace period, which is the chart's."""
        self.process.stop(min(self.spec["terminationGracePeriodSeconds"], 60))
        return self.process.returncode


@dataclass
class Cluster:
    """The Deployments of a rendered chart, one pod each, and the API server that routers ask."""

    rendered: Rendered
    api: KubernetesAPI
    containers: dict[str, Container]

    def of(self, role: str) -> list[Container]:
        labels = {item["metadata"]["name"]: item["metadata"]["labels"] for item in self.rendered.of("Deployment")}
        return [
            container
            for name, container in self.containers.items()
            if labels[name]["app.kubernetes.io/component"] == role
        ]

    def publish(self, container: Container) -> None:
        """What the endpoint slice controller does for a headless Service: named ports, the pod's address."""
        service = self.rendered.named("Service", container.name)
        ports = [{"name": port["name"], "port": port["port"], "protocol": "TCP"} for port in service["spec"]["ports"]]
        self.api.put(f"{container.name}-slice", container.name, [endpoint(container.address)], ports=ports)


@contextmanager
def running(
    rendered: Rendered,
    folder: Path,
    secrets: Secrets | None = None,
    kind: Callable[..., Container] = Container,
) -> Iterator[Cluster]:
    """Start everything; workers are published to the API server as they start. Nothing is left running."""
    api = KubernetesAPI(folder / "serviceaccount")
    api.namespace = NAMESPACE
    api.start()
    names = [item["metadata"]["name"] for item in rendered.of("Deployment")]
    access = {"DIPTYCH_KUBERNETES_API": api.url, "DIPTYCH_KUBERNETES_CREDENTIALS": str(api.folder)}
    cluster = Cluster(rendered, api, {})
    for name in names:
        cluster.containers[name] = kind(rendered, name, folder / name, access, secrets or {})
    try:
        for container in cluster.containers.values():
            container.start()
            if container in (*cluster.of("prefill"), *cluster.of("decode")):
                cluster.publish(container)
        for container in cluster.containers.values():
            container.wait("startup")
        for container in cluster.containers.values():
            container.wait("readiness")
        yield cluster
    finally:
        for container in cluster.containers.values():
            container.process.kill()
        api.stop()


def small_values(**over: Any) -> dict[str, Any]:
    """Values for a tiny model that needs no network, with everything else as the chart has it."""
    return {
        "models": {"smollm2-135m": None, "tiny": {"source": {"id": "tiny-random"}}},
        "workers": {"settings": {"dtype": "float32", "kv_memory_gib": 0.1}, "drainSeconds": 20},
        "router": {"drainSeconds": 20},
        "prefill": {"defaults": {"drainSeconds": 20}},
        **over,
    }
