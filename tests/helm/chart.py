"""Renders the chart with a real helm and looks into what came out."""

from __future__ import annotations

import functools
import json
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

CHART = Path(__file__).parents[2] / "helm"
EXAMPLES = ("laptop", "gpu-node", "many-nodes", "several-models", "shared-router", "openshift", "vllm")
KUBERNETES = ("1.29", "1.33", "1.37")
# What --api-versions says when every operator that the chart knows is installed.
OPERATORS = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "gateway.networking.k8s.io/v1",
    "inference.networking.k8s.io/v1",
    "cert-manager.io/v1",
    "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy",
)
NEEDED: Object = {
    "images": {"registry": "registry.example.com"},
    "models": {"smollm2-135m": {"source": {"id": "smollm2-135m"}}},
}
"""The values without which nothing renders."""
RELEASE, NAMESPACE = "demo", "llm"
CONTROL, KV, HTTP, LEND = 7001, 7002, 7003, 7004
RANKS_KV = 7010
"""First of the ports on which the ranks of a worker receive KV, one each."""
"""Ports of workers."""


LAYOUT: Object = {"settings": {"block_size": 64, "dtype": "bfloat16"}}
"""Values of `workers` with which pools of CPUs and of GPUs pair."""


class Refused(Exception):
    """helm rendered nothing; its message."""


class UniqueKeys(yaml.CSafeLoader):
    """A YAML loader to which a key given twice is an error, as it is to Kubernetes."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"line {node.start_mark.line + 1}: a key is there twice: {keys}"
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Rendered:
    """The objects of one `helm template`, and where they came from."""

    text: str
    objects: list[Object] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        return next(item for item in self.of(kind) if item["metadata"]["name"] == name)

    def pods(self) -> Iterator[tuple[str, Object]]:
        """(name, pod template or pod) of everything that becomes a pod."""
        for item in self.of("Deployment"):
            yield item["metadata"]["name"], item["spec"]["template"]
        for item in self.of("Pod"):
            yield item["metadata"]["name"], item


def command(helm: Path, values: Sequence[str], kubernetes: str, apis: Sequence[str]) -> list[str]:
    flags = [flag for api in apis for flag in ("--api-versions", api)]
    files = [flag for name in values for flag in ("-f", str(CHART / "examples" / f"{name}.yaml"))]
    base = [str(helm), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", kubernetes]
    return [*base, *flags, *files]


def render(
    helm: Path,
    *values: str,
    over: Mapping[str, Any] | None = None,
    kubernetes: str = "1.37",
    apis: Sequence[str] = OPERATORS,
) -> Rendered:
    """The chart with example files (by name), or else what it needs, and further values over them. Raises Refused."""
    return _render(helm, values, json.dumps(over or {}), kubernetes, tuple(apis))


@functools.cache
def _render(helm: Path, values: tuple[str, ...], over: str, kubernetes: str, apis: tuple[str, ...]) -> Rendered:
    line = [*command(helm, values, kubernetes, apis), "-f", "-"]
    given = json.loads(over)
    if not values:
        given = NEEDED | given | {"images": NEEDED["images"] | given.get("images", {})}
    done = subprocess.run(line, input=json.dumps(given), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return Rendered(done.stdout, [item for item in yaml.load_all(done.stdout, UniqueKeys) if item])


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def fits(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector, with expressions of `In`, selects a pod with these labels."""
    expressions = selector.get("matchExpressions", ())
    return selects(selector["matchLabels"], labels) and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"] for each in expressions
    )


def matched(rendered: Rendered, selector: dict[str, str]) -> list[Object]:
    return [pod for _, pod in rendered.pods() if selects(selector, pod["metadata"]["labels"])]


def ports_of(pod: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in pod["spec"]["containers"] for port in each.get("ports", ())}


def settings_of(rendered: Rendered, deployment: Object) -> dict[str, Any]:
    """The one section of the configuration file that a Deployment's pods read."""
    spec = deployment["spec"]["template"]["spec"]
    name = next(volume["configMap"]["name"] for volume in spec["volumes"] if volume["name"] == "config")
    table = tomllib.loads(rendered.named("ConfigMap", name)["data"]["diptych.toml"])
    assert len(table) == 1
    return next(iter(table.values()))
